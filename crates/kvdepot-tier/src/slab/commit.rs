//! Group commit: written groups wait, in order, for one sync that covers all of them.

use std::collections::VecDeque;

/// Groups that are written but not synced yet, each with what must be done afterwards.
#[derive(Debug)]
pub(super) struct Commit<T> {
    waiting: VecDeque<T>,
    /// Number of groups that the running sync covers.
    covered: Option<usize>,
}

impl<T> Default for Commit<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), covered: None }
    }
}

impl<T> Commit<T> {
    /// Number of waiting groups.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a written group.
    pub(super) fn written(&mut self, group: T) {
        self.waiting.push_back(group);
    }

    /// Returns the group that was written first.
    pub(super) fn first(&self) -> Option<&T> {
        self.waiting.front()
    }

    /// Begins a sync if something waits and no sync is running.
    pub(super) fn begin(&mut self) -> bool {
        let begins = self.covered.is_none() && !self.waiting.is_empty();
        if begins {
            self.covered = Some(self.waiting.len());
        }
        begins
    }

    /// Ends the sync: returns the groups that it covered, in order. Those written in the meantime wait for the next
    /// sync.
    pub(super) fn end(&mut self) -> Vec<T> {
        let covered = self.covered.take().unwrap_or(0);
        self.waiting.drain(..covered).collect()
    }

    /// The sync failed: returns all groups, including those written in the meantime. They lie after one that may be
    /// torn, where no walk gets to.
    pub(super) fn fail(&mut self) -> Vec<T> {
        self.covered = None;
        self.waiting.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_covers_what_was_written_before_it_began() {
        let mut commit = Commit::default();
        assert!(!commit.begin());
        commit.written(1);
        commit.written(2);
        assert!(commit.begin() && !commit.begin());
        commit.written(3);
        assert_eq!(commit.end(), [1, 2]);
        assert!(commit.begin());
        assert_eq!((commit.end(), commit.len()), (vec![3], 0));
        commit.written(4);
        assert!(commit.begin());
        commit.written(5);
        assert_eq!((commit.fail(), commit.len(), commit.begin()), (vec![4, 5], 0, false));
    }
}
