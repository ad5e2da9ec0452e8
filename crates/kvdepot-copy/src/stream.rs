//! Copies that bypass the cache: a batch larger than the cache would only evict other data, and ordinary stores read
//! every line before they overwrite it.

/// Batches from this size on bypass the cache. Smaller ones are likely to be used while they are still in it.
pub(crate) const STREAM_BYTES_MIN: u64 = 4 << 20;

/// Copies `len` bytes past the cache where the processor supports it, else like `memcpy`.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= 4096 && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's contract, and the feature was found.
        unsafe {
            match avx2::pages() {
                avx2::SIDE_BY_SIDE => avx2::copy::<{ avx2::SIDE_BY_SIDE }>(from, to, len),
                _ => avx2::copy::<1>(from, to, len),
            }
        };
        return;
    }
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Orders streamed stores before later ones. Call it once before reporting that the bytes have arrived.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence touches no memory; SSE is part of x86_64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __cpuid, __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256,
    };
    use std::sync::OnceLock;

    const LANE: usize = 32;
    /// A line whose parts are written between other lines goes to memory twice, so steps begin at lines.
    const LINE: usize = 64;
    /// The bytes of one step in a page: two cache lines.
    const STEP: usize = 4 * LANE;
    const PAGE: usize = 4096;
    /// Number of pages that Intel's processors copy side by side, each with an open DRAM row and a stream of the hardware
    /// prefetcher. There, four is as good as eight and better than two and one, on small pages and on huge ones.
    pub(super) const SIDE_BY_SIDE: usize = 4;

    /// Number of pages to copy side by side. AMD's processors run out of write-combining buffers with four: a copy then
    /// takes three times as long as one page after the other, which is no slower than any other way there. Figures of
    /// both are in docs/benchmarks.md.
    pub(super) fn pages() -> usize {
        static PAGES: OnceLock<usize> = OnceLock::new();
        *PAGES.get_or_init(|| if vendor() == *b"GenuineIntel" { SIDE_BY_SIDE } else { 1 })
    }

    fn vendor() -> [u8; 12] {
        // SAFETY: every 64-bit x86 processor has CPUID.
        #[allow(unused_unsafe, reason = "safe in later versions of the compiler")]
        let leaf = unsafe { __cpuid(0) };
        let mut name = [0; 12];
        for (part, register) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            part.copy_from_slice(&register.to_le_bytes());
        }
        name
    }

    /// Copies `PAGES` pages side by side.
    ///
    /// # Safety
    /// As for `super::copy`; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy<const PAGES: usize>(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(LINE).min(len);
        // SAFETY: `head <= len`.
        unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
        let mut at = head;
        while at + PAGES * PAGE <= len {
            for offset in (0..PAGE).step_by(STEP) {
                for page in 0..PAGES {
                    let here = at + page * PAGE + offset;
                    // SAFETY: `here + STEP <= at + PAGES * PAGE <= len`, and `to + here` is aligned to a lane; a
                    // prefetch may name any address.
                    unsafe {
                        if PAGES > 1 {
                            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(here + 2 * STEP).cast());
                        }
                        step(from.add(here), to.add(here));
                    }
                }
            }
            at += PAGES * PAGE;
        }
        while at + STEP <= len {
            // SAFETY: `at + STEP <= len`, and `to + at` is aligned to a lane.
            unsafe { step(from.add(at), to.add(at)) };
            at += STEP;
        }
        // SAFETY: the rest, inside of `len`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), len - at) };
    }

    /// # Safety
    /// `STEP` bytes must be valid on both sides, `to` aligned to a lane.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn step(from: *const u8, to: *mut u8) {
        let (source, target) = (from.cast::<__m256i>(), to.cast::<__m256i>());
        // SAFETY: four lanes are one step.
        unsafe {
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
    }
}

#[cfg(test)]
mod tests {
    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// All variants, whichever this processor takes.
    fn variants() -> Vec<(&'static str, Copy)> {
        let mut all: Vec<(&'static str, Copy)> = vec![("chosen", super::copy)];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            all.push(("one page", super::avx2::copy::<1>));
            all.push(("side by side", super::avx2::copy::<{ super::avx2::SIDE_BY_SIDE }>));
        }
        all
    }

    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let source: Vec<u8> = (0..70_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for (name, copy) in variants() {
            for len in [0, 1, 31, 4095, 4096, 4097, 5000, 16_384, 16_500, 50_001] {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 29), (63, 64), (17, 17)] {
                    let mut target = vec![0xEE; 70_000];
                    // SAFETY: both offsets plus the length stay below 70 000.
                    unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                    super::fence();
                    assert_eq!(
                        target[to..to + len],
                        source[from..from + len],
                        "{name}: len {len} from {from} to {to}"
                    );
                    assert!(
                        target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xEE),
                        "{name}"
                    );
                }
            }
        }
    }
}
