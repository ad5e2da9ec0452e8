//! The progress of a file transfer and its next step: one place that handles short counts, for plain calls and for
//! queues of the kernel.

/// The next step of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadNext {
    /// Read again from [`ReadProgress::done`] on.
    More,
    /// Read again through a descriptor without O_DIRECT: the next offset is not aligned for it.
    MoreBuffered,
    /// All bytes were read.
    Whole,
    /// The file is too short.
    EndsEarly,
}

/// A read of a file's first bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadProgress {
    done: usize,
    whole: usize,
    /// The alignment of offsets while O_DIRECT is in use.
    direct_step: Option<usize>,
}

impl ReadProgress {
    pub(crate) const fn new(whole: usize, direct_step: Option<usize>) -> Self {
        Self { done: 0, whole, direct_step }
    }

    pub(crate) const fn done(&self) -> usize {
        self.done
    }

    pub(crate) const fn whole(&self) -> usize {
        self.whole
    }

    pub(crate) const fn is_direct(&self) -> bool {
        self.direct_step.is_some()
    }

    /// Notes that `count` bytes were read.
    pub(crate) fn came(&mut self, count: usize) -> ReadNext {
        self.done = self.done.saturating_add(count).min(self.whole);
        if self.done == self.whole {
            ReadNext::Whole
        } else if count == 0 {
            ReadNext::EndsEarly
        } else if self.direct_step.is_some_and(|step| !self.done.is_multiple_of(step)) {
            self.direct_step = None;
            ReadNext::MoreBuffered
        } else {
            ReadNext::More
        }
    }
}

/// The next step of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteNext {
    /// Write again from [`WriteProgress::done`] on.
    More,
    /// All bytes were written.
    Whole,
    /// The system makes no progress.
    Stuck,
}

/// A write of a complete file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteProgress {
    done: usize,
    whole: usize,
    /// The alignment of offsets: 1 without O_DIRECT.
    step: usize,
}

impl WriteProgress {
    pub(crate) const fn new(whole: usize, step: usize) -> Self {
        Self { done: 0, whole, step }
    }

    pub(crate) const fn done(&self) -> usize {
        self.done
    }

    pub(crate) const fn whole(&self) -> usize {
        self.whole
    }

    /// Notes that `count` bytes were written. Bytes after the last full step are written again.
    pub(crate) fn went(&mut self, count: usize) -> WriteNext {
        let reached = self.done.saturating_add(count);
        let next = reached / self.step * self.step;
        if count > 0 && reached >= self.whole {
            self.done = self.whole;
            return WriteNext::Whole;
        }
        if next <= self.done {
            return WriteNext::Stuck;
        }
        self.done = next;
        WriteNext::More
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direct_read_leaves_o_direct_at_an_odd_offset_and_for_good() {
        let mut read = ReadProgress::new(10_000, Some(4096));
        assert_eq!(read.came(4096), ReadNext::More);
        assert!(read.is_direct());
        assert_eq!(read.came(1), ReadNext::MoreBuffered);
        assert!(!read.is_direct());
        assert_eq!((read.came(7), read.done()), (ReadNext::More, 4104));
        assert_eq!(read.came(0), ReadNext::EndsEarly);
        assert_eq!(read.came(usize::MAX), ReadNext::Whole);
    }

    #[test]
    fn a_direct_write_goes_on_at_a_whole_step_or_not_at_all() {
        let mut write = WriteProgress::new(12_288, 4096);
        assert_eq!((write.went(5000), write.done()), (WriteNext::More, 4096));
        assert_eq!(write.went(4095), WriteNext::Stuck);
        assert_eq!(write.went(8192), WriteNext::Whole);
        let mut buffered = WriteProgress::new(3, 1);
        assert_eq!((buffered.went(1), buffered.went(0)), (WriteNext::More, WriteNext::Stuck));
    }
}
