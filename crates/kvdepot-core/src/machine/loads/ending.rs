//! The loads of a connection that ended.
//!
//! All of them count as ended in the step in which their connection ends: from then on they get no answer but an error,
//! no lease and no turn, whatever still arrives for them. They leave the tables in pieces, in steps to come. Their leases
//! end with those of the connection.

use super::super::event::{Discarded, Effects, Job, Owner, Token};
use super::super::pool::Pool;
use super::Loads;
use super::load::Load;
use crate::error::{Error, ErrorKind};

impl Loads {
    /// Ends the loads of an owner that ended.
    pub(crate) fn end_owner(&mut self, pool: &mut Pool, owner: Owner, out: &mut Effects) {
        if self.next_of(owner).is_some() && self.ended.insert(owner) {
            self.close_ended(pool, owner, out);
        }
    }

    /// Answers the next loads of an owner that ended, as many as one step may.
    pub(crate) fn close_ended(&mut self, pool: &mut Pool, owner: Owner, out: &mut Effects) {
        let mut waited = false;
        for _ in 0..self.pace.owner_loads {
            let Some(load) = self.next_of(owner).and_then(|token| self.map.remove(&token)) else { break };
            waited |= self.line.leave(load.turn, load.token);
            self.close(pool, load, out);
        }
        if waited {
            // The next one may need less.
            self.line.retry_oldest(out);
        }
        if self.ended.contains(&owner) {
            out.again.push(Job::EndLoads(owner));
        }
    }

    /// Passes on the turn of a load that has ended, and whose connection may have ended.
    pub(super) fn pass_turn(&mut self, token: Token, out: &mut Effects) {
        if let Some(load) = self.map.get(&token) {
            self.line.leave(load.turn, token);
        }
        self.line.retry_oldest(out);
    }

    /// Answers a load of an owner that ended.
    pub(super) fn close(&mut self, pool: &mut Pool, load: Box<Load>, out: &mut Effects) {
        self.forget(pool, &load);
        let closed = Error::new(ErrorKind::Closed, "the connection has ended");
        out.replies.push((load.token, Err(closed)));
        out.discarded.push(Discarded::new(load));
    }

    /// Forgets a load that is not in the table of loads any more.
    pub(super) fn forget(&mut self, pool: &mut Pool, load: &Load) {
        pool.uses.let_go(load.namespace.space);
        self.by_owner.remove(&(load.owner, load.token));
        if !self.ended.is_empty() && self.next_of(load.owner).is_none() {
            self.ended.remove(&load.owner);
        }
    }

    fn next_of(&self, owner: Owner) -> Option<Token> {
        let mut of_owner = self.by_owner.range((owner, 0)..=(owner, Token::MAX));
        of_owner.next().map(|(_, token)| *token)
    }
}
