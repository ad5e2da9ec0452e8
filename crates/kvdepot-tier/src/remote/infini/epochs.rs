//! Epochs on an InfiniStore server, which has none: each is a separate entry.

use std::time::{Duration, Instant};

use kvdepot_core::limits::REMOTE_FOREIGN_EPOCHS_MAX;
use kvdepot_core::{ErrorKind, NamespaceSpec, Result};

use super::super::server::Server;
use super::super::socket::Socket;
use super::super::value::{MARK, epoch_name};
use super::{Failed, Outcome, Talk};

/// Sends a request that any InfiniStore server can answer, and adds the epochs that passed while it was unreachable,
/// all by `deadline`.
pub(in crate::remote) fn greet(server: &Server, stream: &Socket, deadline: Instant) -> Result<()> {
    let mut talk = Talk::new(server, stream, deadline, Duration::ZERO);
    let error = |(Failed::Answer(error) | Failed::Amid(error, _) | Failed::Lost(error))| error;
    let mut greet = || {
        talk.exists(b"kvdepot").map_err(error)?;
        server.shared.spaces().iter().try_for_each(|space| {
            let there = talk.epoch(&space.spec).map_err(error)?;
            if there < space.epoch {
                server.move_to(space, || talk.raise(&space.spec, there, space.epoch).map_err(error))?;
            }
            Ok(())
        })
    };
    greet()
}

impl Talk<'_> {
    /// Returns the newest epoch on the server.
    pub(super) fn epoch(&mut self, spec: &NamespaceSpec) -> Outcome<u32> {
        let mut epoch = 0;
        while self.exists(epoch_name(spec, epoch + 1).as_bytes())? {
            epoch += 1;
            if epoch == REMOTE_FOREIGN_EPOCHS_MAX {
                let what =
                    "a remote server reports that a namespace was reset more often than possible: empty it";
                let error = self.bad(ErrorKind::Unsupported, what).with("namespace", spec.root());
                return Err(Failed::Answer(error.with("epochs_max", REMOTE_FOREIGN_EPOCHS_MAX - 1)));
            }
        }
        Ok(epoch)
    }

    pub(super) fn set_epoch(&mut self, spec: &NamespaceSpec, epoch: u32) -> Outcome<()> {
        let there = self.epoch(spec)?;
        self.raise(spec, there, epoch)
    }

    /// Adds the epochs after `there` to the server.
    fn raise(&mut self, spec: &NamespaceSpec, there: u32, epoch: u32) -> Outcome<()> {
        if epoch >= REMOTE_FOREIGN_EPOCHS_MAX {
            let what = "an InfiniStore server cannot store so many resets of a namespace";
            let error = self.bad(ErrorKind::Unsupported, what).with("namespace", spec.root());
            let error = error.with("epoch", epoch).with("epochs_max", REMOTE_FOREIGN_EPOCHS_MAX - 1);
            return Err(Failed::Answer(error));
        }
        for epoch in there.saturating_add(1)..=epoch {
            self.turn()?;
            self.put(epoch_name(spec, epoch).as_bytes(), MARK, None)?;
        }
        Ok(())
    }
}
