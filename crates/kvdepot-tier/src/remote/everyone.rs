//! All servers of the tier.

use std::sync::Arc;

use super::server::Server;
use super::shared::Shared;

/// The tier's servers, for work that may outlive the call that began it.
#[derive(Clone)]
pub(super) struct Everyone {
    pub(super) shared: Arc<Shared>,
    pub(super) servers: Arc<[Arc<Server>]>,
}
