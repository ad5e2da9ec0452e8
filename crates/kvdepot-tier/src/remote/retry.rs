//! Retries of resets that servers owe. Each server has its own thread for it, so a server that hangs does not delay the
//! others.

use std::time::Duration;

use kvdepot_core::limits::EPOCH_RETRY_MS;

use super::everyone::Everyone;
use super::server::Health;

impl Everyone {
    /// Retries, until the tier ends, to make a server take the resets that it owes.
    pub(super) fn retry_owed(&self, index: usize) {
        let server = &self.servers[index];
        while !self.shared.is_stopping() {
            std::thread::park_timeout(Duration::from_millis(EPOCH_RETRY_MS));
            let owed = self.shared.spaces.lock().owed_by(index);
            for space in owed {
                if self.shared.is_stopping() || server.health() != Health::Up {
                    break;
                }
                let (root, address) = (space.spec.root(), &server.address);
                match self.retry_at(index, &space) {
                    Ok(()) => {
                        if self.shared.spaces.lock().get(root).is_none() {
                            // It was closed meanwhile.
                            server.close_namespace(&space.spec);
                        }
                        tracing::warn!(namespace = %root, server = %address, "a remote server has taken a reset now");
                    }
                    Err(error) => {
                        tracing::debug!(%error, namespace = %root, "a remote server has not taken a reset");
                    }
                }
            }
        }
    }
}
