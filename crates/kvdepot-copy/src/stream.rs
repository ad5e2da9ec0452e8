//! Copies that go around the cache: a batch larger than the cache would only push other data out, and ordinary stores
//! read every line before they overwrite it.

/// From here on a batch is copied around the cache. Smaller ones are likely to be used while they are still in it.
pub(crate) const STREAM_BYTES_MIN: u64 = 4 << 20;

/// Copies `len` bytes around the cache where the processor can, else as `memcpy` does.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= 4096 && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's contract, and the feature was found.
        unsafe { copy_avx2(from, to, len) };
        return;
    }
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Orders streamed stores before what comes after: call once before telling anybody that the bytes are there.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence touches no memory; SSE is part of x86_64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _MM_HINT_NTA, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256};
    const LANE: usize = 32;
    const STEP: usize = 4 * LANE;
    // Far enough ahead to hide memory latency at some 10 GB/s.
    const AHEAD: usize = 1024;
    let head = to.align_offset(LANE).min(len);
    // SAFETY: `head <= len`.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    let mut at = head;
    while at + STEP <= len {
        // SAFETY: `at + STEP <= len`, and `to + at` is aligned to a lane; a prefetch may name any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(at + AHEAD).cast());
            _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(at + AHEAD + 64).cast());
            let source = from.add(at).cast::<__m256i>();
            let target = to.add(at).cast::<__m256i>();
            let lanes = [
                _mm256_loadu_si256(source),
                _mm256_loadu_si256(source.add(1)),
                _mm256_loadu_si256(source.add(2)),
                _mm256_loadu_si256(source.add(3)),
            ];
            _mm256_stream_si256(target, lanes[0]);
            _mm256_stream_si256(target.add(1), lanes[1]);
            _mm256_stream_si256(target.add(2), lanes[2]);
            _mm256_stream_si256(target.add(3), lanes[3]);
        }
        at += STEP;
    }
    // SAFETY: the rest, inside of `len`.
    unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), len - at) };
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let source: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for len in [0, 1, 31, 4095, 4096, 4097, 5000, 8192, 12_345] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 29), (63, 64), (17, 17)] {
                let mut target = vec![0xEE; 20_000];
                // SAFETY: both offsets plus the length stay below 20 000.
                unsafe { super::copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                super::fence();
                assert_eq!(target[to..to + len], source[from..from + len], "len {len} from {from} to {to}");
                assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xEE));
            }
        }
    }
}
