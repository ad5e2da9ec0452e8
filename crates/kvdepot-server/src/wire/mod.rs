//! The wire door: TCP for clients on other machines, InfiniStore's and our own, and HTTP for administrators. See
//! `docs/wire.md`.

mod config;
mod connection;
mod conversation;
mod counters;
mod door;
mod http;
mod infini;
mod own;
mod rdma;
mod self_test;
mod shared;
mod socket;
mod spare;
mod stream;
mod tls;

pub use config::{EvictConfig, TlsConfig, WireConfig};
pub use door::WireDoor;
pub use rdma::{RdmaConfig, RdmaLink};
