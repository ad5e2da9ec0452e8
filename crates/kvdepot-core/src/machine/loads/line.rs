//! The loads that found no space and lease nothing. They retry one after another, the oldest first.

use std::collections::BTreeMap;

use super::super::event::{Effects, Job, Token};

#[derive(Debug, Default)]
pub(super) struct Line {
    /// Those that do not retry now, by their turns.
    waiting: BTreeMap<u64, Token>,
    turns: u64,
    /// The one that retries now.
    retrying: Option<Token>,
}

impl Line {
    /// Returns the turn of a load that is new here.
    pub(super) const fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    pub(super) fn wait(&mut self, turn: u64, token: Token) {
        self.waiting.insert(turn, token);
    }

    /// Begins a load's retry. Returns false if another one retries now.
    pub(super) fn begin_retry(&mut self, turn: u64, token: Token) -> bool {
        if self.retrying.is_some() {
            return false;
        }
        self.waiting.remove(&turn);
        self.retrying = Some(token);
        true
    }

    /// Ends a load's retry. Returns whether it was retrying.
    pub(super) fn end_retry(&mut self, token: Token) -> bool {
        self.retrying.take_if(|other| *other == token).is_some()
    }

    /// Forgets a load. Returns whether it was waiting or retrying.
    pub(super) fn leave(&mut self, turn: Option<u64>, token: Token) -> bool {
        let waited = turn.is_some_and(|turn| self.waiting.remove(&turn).is_some());
        self.end_retry(token) || waited
    }

    /// Returns the oldest load, unless one retries now.
    pub(super) fn next(&self) -> Option<Token> {
        self.waiting.values().next().copied().filter(|_| self.retrying.is_none())
    }

    /// Makes the oldest load retry, unless one retries now.
    pub(super) fn retry_oldest(&self, out: &mut Effects) {
        out.again.extend(self.next().map(Job::Load));
    }
}
