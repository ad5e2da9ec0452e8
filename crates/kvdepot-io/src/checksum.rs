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

/// Returns the CRC-64/NVME of two concatenated pieces of memory, from the CRC of each and the length of the second.
pub fn combined(first: u64, second: u64, second_bytes: u64) -> u64 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, second_bytes)
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
