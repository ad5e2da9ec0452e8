//! Where an RDMA transport is plugged in. Without one the door says that there is none, and TCP works all the same.

use std::any::Any;
use std::fmt::Debug;

use kvdepot_core::Result;
use kvdepot_depot::values::Values;
use kvdepot_wire::infini::ConnInfo;

/// Queue pairs for InfiniStore clients: operations `E` over TCP, `W` and `A` in SENDs.
pub trait RdmaTransport: Send + Sync + Debug {
    /// Connects a queue pair to the client's and begins to serve it, with values that this connection owns. Returns what
    /// the client must know, and the queue pair, which ends when that value is dropped: at the connection's end (P4).
    /// May wait; called on a thread that may.
    fn exchange(&self, client: ConnInfo, values: Values) -> Result<(ConnInfo, Box<dyn Any + Send + Sync>)>;
}
