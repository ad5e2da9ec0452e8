//! Pool, index, tasks and pipeline of a depot, and the client of its local door.

mod acquire;
mod claim;
pub mod config;
pub mod depot;
pub mod direct;
mod io_queue;
pub mod message;
mod namespace;
mod ops;
pub mod pool;
mod resolver;
pub mod session;
mod state;
pub mod stats;
pub mod values;

pub use config::DepotConfig;
pub use depot::Depot;
pub use pool::PoolMapping;
pub use session::Session;
pub mod client;
pub mod seqpacket;
