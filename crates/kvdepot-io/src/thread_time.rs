//! Processor time of the calling thread: how long work took, without the time in which other threads had the processor.

use std::time::Duration;

use rustix::time::ClockId;

use crate::clock;

/// Returns the processor time of this thread since it began.
pub fn thread_time() -> Duration {
    clock::read(ClockId::ThreadCPUTime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_processor_time() {
        let before = thread_time();
        let mut sum = 0_u64;
        while thread_time() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(thread_time() > before);
    }
}
