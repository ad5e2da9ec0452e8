//! Decides when an adapter that fails batches counts as unusable.

use kvdepot_core::{Error, ErrorKind};

/// Number of batches in a row that an adapter may fail in one direction: a port that flaps, or a request that is lost,
/// costs one.
const FAILURES_MAX: u32 = 3;

/// The failures of an adapter in one direction.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    in_a_row: u32,
}

impl Trouble {
    pub(crate) const fn succeeded(&mut self) {
        self.in_a_row = 0;
    }

    /// Counts a batch that the adapter failed. Returns whether the adapter counts as unusable. One that did not answer
    /// does immediately: every further batch would wait as long.
    pub(crate) fn failed(&mut self, error: &Error) -> bool {
        self.in_a_row += 1;
        self.in_a_row >= FAILURES_MAX || error.kind() == ErrorKind::Timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_unusable_after_failures_in_a_row_or_without_an_answer() {
        let of = |kind| Error::new(kind, "failed");
        let mut trouble = Trouble::default();
        assert!(!trouble.failed(&of(ErrorKind::Io)) && !trouble.failed(&of(ErrorKind::Io)));
        trouble.succeeded();
        assert!(!trouble.failed(&of(ErrorKind::Io)) && !trouble.failed(&of(ErrorKind::Io)));
        assert!(trouble.failed(&of(ErrorKind::Io)));
        assert!(Trouble::default().failed(&of(ErrorKind::Timeout)));
    }
}
