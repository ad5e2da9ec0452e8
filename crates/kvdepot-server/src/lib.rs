//! The doors of a depot process: local, a unix socket for engines on the same node, and wire, for other machines.

mod descriptors;
mod ended;
mod handover;
pub mod http;
pub mod keeper;
pub mod local;
pub mod lock;
mod log_limit;
pub mod logging;
mod neighbours;
mod panics;
mod peer;
pub mod place;
mod quarantine;
mod refusal;
mod serving;
mod systemd;
mod users;
pub mod wire;

pub use ended::Ended;
pub use http::StatusDoor;
pub use local::LocalDoor;
pub use lock::DoorLock;
pub use place::Place;
pub use serving::{Serving, serve_depot};
pub use wire::{WireConfig, WireDoor};
