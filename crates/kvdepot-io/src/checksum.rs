//! The checksum of block files: CRC-64/NVME, over bytes that may lie in several runs.

use crc_fast::{CrcAlgorithm, Digest};

use crate::buf::SlotBuf;

/// Returns the CRC-64/NVME of a piece of memory.
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// Returns the CRC-64/NVME of bytes `start..end` of a slot, across its runs. `None` if the slot is shorter than `end`.
pub fn crc64_slot(slot: &SlotBuf, start: usize, end: usize) -> Option<u64> {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut seen = 0;
    for run in slot.slice(start, end) {
        // SAFETY: `run` lies in the slot, readable by the contract of `SlotBuf::new`, which also keeps writers away
        // while a holder reads.
        digest.update(unsafe { std::slice::from_raw_parts(run.ptr, run.len) });
        seen += run.len;
    }
    (seen == end.saturating_sub(start)).then(|| digest.finalize())
}

/// The polynomial of CRC-64/NVME, the highest power in the lowest bit, without the power of 64.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
/// The polynomials 1 and x.
const ONE: u64 = 1 << 63;
const X: u64 = 1 << 62;

/// Returns the product of two polynomials, modulo that of the checksum.
const fn product(a: u64, mut b: u64) -> u64 {
    let (mut sum, mut bit) = (0, ONE);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = (b >> 1) ^ if b & 1 == 0 { 0 } else { POLYNOMIAL };
        bit >>= 1;
    }
    sum
}

/// The powers of x whose exponents are powers of two, from 8, the bits of a byte, on.
const BYTE_POWERS: [u64; 64] = {
    let mut power = product(X, X);
    power = product(power, power);
    power = product(power, power);
    let mut powers = [power; 64];
    let mut index = 1;
    while index < powers.len() {
        power = product(power, power);
        powers[index] = power;
        index += 1;
    }
    powers
};

/// Returns the CRC-64/NVME of two concatenated pieces of memory, from the CRC of each and the length of the second.
///
/// It takes about 0.1 us for each bit that is set in the length. `crc_fast::checksum_combine` squares matrices of bits,
/// which takes tens of microseconds: as long as the checksum of a MiB.
pub fn combined(first: u64, second: u64, second_bytes: u64) -> u64 {
    let shifts = BYTE_POWERS.iter().enumerate().filter(|(bit, _)| second_bytes >> bit & 1 == 1);
    shifts.fold(first, |shifted, (_, &power)| product(power, shifted)) ^ second
}

/// What each byte adds to a checksum.
const BYTES: [u64; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let (mut sum, mut bit) = (byte as u64, 0);
        while bit < 8 {
            sum = (sum >> 1) ^ if sum & 1 == 0 { 0 } else { POLYNOMIAL };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

/// Returns the length of the shortest piece at the beginning of `bytes`, of a byte or more, that has this CRC-64/NVME.
/// Takes a byte at a time: about a second for 400 MB.
pub fn prefix_with(bytes: &[u8], checksum: u64) -> Option<usize> {
    let mut sum = u64::MAX;
    let ends_here = |byte: &u8| {
        sum = BYTES[usize::from(sum as u8 ^ byte)] ^ (sum >> 8);
        !sum == checksum
    };
    bytes.iter().position(ends_here).map(|last| last + 1)
}

/// Returns whether bytes `start..end` of a slot are all zero; `false` if the slot is shorter than `end`.
pub fn is_zero(slot: &SlotBuf, start: usize, end: usize) -> bool {
    let mut seen = 0;
    for run in slot.slice(start, end) {
        // SAFETY: as in `crc64_slot`.
        let bytes = unsafe { std::slice::from_raw_parts(run.ptr, run.len) };
        if bytes.iter().any(|&byte| byte != 0) {
            return false;
        }
        seen += run.len;
    }
    seen == end.saturating_sub(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_pieces_of_any_length_are_combined() {
        let bytes: Vec<u8> = (0..3 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for at in [0, 1, 7, 4096, 1 << 20, (2 << 20) + 333, bytes.len() - 1, bytes.len()] {
            let (first, second) = bytes.split_at(at);
            assert_eq!(combined(crc64(first), crc64(second), second.len() as u64), crc64(&bytes), "at {at}");
        }
        for second_bytes in [u64::MAX, 1 << 63, 0x0123_4567_89ab_cdef] {
            let expected = crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, 7, 11, second_bytes);
            assert_eq!(combined(7, 11, second_bytes), expected);
        }
    }

    #[test]
    fn a_piece_is_found_by_its_checksum() {
        let bytes: Vec<u8> = (0..10_000).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for length in [1, 2, 255, 4096, bytes.len()] {
            assert_eq!(prefix_with(&bytes, crc64(&bytes[..length])), Some(length));
            assert_eq!(prefix_with(&[0; 10_000], crc64(&vec![0; length])), Some(length));
        }
        assert_eq!(prefix_with(&bytes, crc64(b"else")), None);
        assert_eq!(prefix_with(&bytes, crc64(b"")), None);
    }

    #[test]
    fn the_check_value_of_the_catalogue() {
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        let slot = SlotBuf::anonymous(4096);
        slot.write_at(7, b"123456789");
        assert_eq!(crc64_slot(&slot, 7, 16), Some(0xae8b_1486_0a79_9888));
        assert_eq!(crc64_slot(&slot, 0, 4097), None);
        assert_eq!(combined(crc64(b"1234"), crc64(b"56789"), 5), crc64(b"123456789"));
        assert_eq!(combined(0, crc64(b"123"), 3), crc64(b"123"), "0 is the checksum of nothing");
        assert!(is_zero(&slot, 0, 7) && !is_zero(&slot, 0, 8) && !is_zero(&slot, 4000, 4097));
    }
}
