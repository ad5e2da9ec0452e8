//! State shared by all connections of a wire door.

use std::sync::Arc;

use kvdepot_depot::Depot;
use kvdepot_depot::values::Values;
use kvdepot_wire::own::Token;
use tokio_rustls::TlsAcceptor;

use super::config::WireConfig;
use super::counters::Counters;
use super::rdma::Rdma;

/// An open door, as its connections see it.
pub(super) struct Door {
    pub(super) config: WireConfig,
    pub(super) depot: Arc<Depot>,
    pub(super) values: Values,
    pub(super) token: Option<Token>,
    pub(super) tls: Option<TlsAcceptor>,
    pub(super) rdma: Option<Arc<Rdma>>,
    pub(super) counters: Arc<Counters>,
}
