//! Threads that wait for replies: each is woken only by its own.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::machine::{Reply, Token};
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
}

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    waiting: Mutex<HashMap<Token, Arc<Waiter>>>,
}

impl Waiters {
    pub(crate) fn register(&self, token: Token) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::default());
        self.waiting.lock().insert(token, Arc::clone(&waiter));
        waiter
    }

    /// Answers all waiting threads with an error.
    pub(crate) fn fail_all(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        for waiter in waiting.into_values() {
            *waiter.reply.lock() = Some(Err(Error::new(ErrorKind::Unavailable, "the depot is dead")));
            waiter.came.notify_one();
        }
    }

    /// Returns the tokens of all expected replies.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        self.waiting.lock().keys().copied().collect()
    }

    pub(crate) fn forget(&self, token: Token) {
        self.waiting.lock().remove(&token);
    }

    /// Delivers a reply. There may be no waiter, if its request has ended in another way.
    pub(crate) fn deliver(&self, token: Token, reply: Result<Reply>) {
        if let Some(waiter) = self.waiting.lock().remove(&token) {
            *waiter.reply.lock() = Some(reply);
            waiter.came.notify_one();
        }
    }
}
