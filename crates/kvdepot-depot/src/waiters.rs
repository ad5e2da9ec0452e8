//! Threads that wait for replies: each is woken only by its own.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::machine::{Owner, Reply, Token};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

/// A thread that waits for one reply.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    reply: Mutex<Option<Result<Reply>>>,
    came: Condvar,
}

impl Waiter {
    /// Returns the reply, if it comes by the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> Option<Result<Reply>> {
        let mut reply = self.reply.lock();
        while reply.is_none() {
            if self.came.wait_until(&mut reply, deadline).timed_out() {
                break;
            }
        }
        reply.take()
    }

    fn answer(&self, reply: Result<Reply>) {
        *self.reply.lock() = Some(reply);
        self.came.notify_one();
    }
}

/// Who gets a reply.
#[derive(Debug)]
enum Recipient {
    Waits(Arc<Waiter>),
    /// Nobody any more: what the reply grants this owner is to be given back.
    GaveUp(Owner),
}

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    replies: Mutex<HashMap<Token, Recipient>>,
}

impl Waiters {
    pub(crate) fn register(&self, token: Token) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::default());
        self.replies.lock().insert(token, Recipient::Waits(Arc::clone(&waiter)));
        waiter
    }

    /// Answers all waiting threads with an error.
    pub(crate) fn fail_all(&self) {
        for recipient in std::mem::take(&mut *self.replies.lock()).into_values() {
            if let Recipient::Waits(waiter) = recipient {
                waiter.answer(Err(Error::new(ErrorKind::Unavailable, "the depot is dead")));
            }
        }
    }

    /// Returns the tokens of all expected replies.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        self.replies.lock().keys().copied().collect()
    }

    /// Expects no reply to this token.
    pub(crate) fn forget(&self, token: Token) {
        self.replies.lock().remove(&token);
    }

    /// Ends a wait for a reply that is on its way. Returns the reply if it has come.
    pub(crate) fn give_up(&self, token: Token, owner: Owner, waiter: &Waiter) -> Option<Result<Reply>> {
        if let Some(recipient) = self.replies.lock().get_mut(&token) {
            *recipient = Recipient::GaveUp(owner);
        }
        waiter.reply.lock().take()
    }

    /// Delivers a reply. If the thread that waited for it has given up, returns the reply and the owner that it is for. There may
    /// be no waiter at all, if its request has ended in another way.
    pub(crate) fn deliver(&self, token: Token, reply: Result<Reply>) -> Option<(Owner, Result<Reply>)> {
        let mut replies = self.replies.lock();
        match replies.remove(&token)? {
            // Under the lock: who gives up finds the reply.
            Recipient::Waits(waiter) => {
                waiter.answer(reply);
                None
            }
            Recipient::GaveUp(owner) => Some((owner, reply)),
        }
    }
}
