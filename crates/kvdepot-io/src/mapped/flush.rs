//! Flushes the processor's caches, which persistent memory needs in place of fsync.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_clflush, _mm_sfence};
    use std::sync::OnceLock;

    const LINE_BYTES: usize = 64;

    #[derive(Clone, Copy)]
    enum Way {
        Clwb,
        Clflushopt,
        Clflush,
    }

    fn way() -> Way {
        static WAY: OnceLock<Way> = OnceLock::new();
        *WAY.get_or_init(|| {
            // SAFETY: every 64-bit x86 processor has CPUID; leaf 7 is only read where leaf 0 reports it.
            #[allow(unused_unsafe, reason = "safe in later versions of the compiler")]
            let features = unsafe { if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 } };
            match features {
                bits if bits & (1 << 24) != 0 => Way::Clwb,
                bits if bits & (1 << 23) != 0 => Way::Clflushopt,
                _ => Way::Clflush,
            }
        })
    }

    pub(crate) unsafe fn flush(start: *const u8, bytes: usize) {
        let first = start as usize / LINE_BYTES * LINE_BYTES;
        let way = way();
        for line in (first..start as usize + bytes).step_by(LINE_BYTES) {
            // SAFETY: the line holds a byte of the caller's memory, and the instruction is one that the processor has.
            unsafe {
                match way {
                    Way::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                    Way::Clflushopt => {
                        asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                    Way::Clflush => _mm_clflush(line as *const u8),
                }
            }
        }
    }

    pub(crate) fn fence() {
        // SAFETY: part of SSE, which every 64-bit x86 processor has.
        #[allow(unused_unsafe, reason = "safe in later versions of the compiler")]
        unsafe {
            _mm_sfence();
        }
    }
}

/// Whether this build can flush caches.
pub(super) const IS_KNOWN: bool = cfg!(target_arch = "x86_64");

/// Writes the cache lines of this memory back.
///
/// # Safety
/// The memory is mapped.
#[allow(unused_variables, reason = "other processors: a device is refused when it is opened")]
pub(super) unsafe fn flush(start: *const u8, bytes: usize) {
    #[cfg(test)]
    testing::note(testing::Noted::Flush { start: start as usize, bytes });
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        x86::flush(start, bytes);
    }
}

/// Orders this thread's earlier flushes and writes before its later ones.
pub(super) fn fence() {
    #[cfg(test)]
    testing::note(testing::Noted::Fence);
    #[cfg(target_arch = "x86_64")]
    x86::fence();
    // Nothing is flushed there, but another process that maps the file must see writes in this order.
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}

/// What this thread has flushed: no test can see it in the memory.
#[cfg(test)]
pub(super) mod testing {
    use std::cell::RefCell;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Noted {
        Flush { start: usize, bytes: usize },
        Fence,
    }

    thread_local! {
        static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn note(what: Noted) {
        NOTED.with_borrow_mut(|noted| noted.push(what));
    }

    /// Returns what was noted since the last call.
    pub(crate) fn take() -> Vec<Noted> {
        NOTED.take()
    }
}
