//! The wire door, over TCP and TLS.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/wire.rs"]
mod wire;

mod door;
mod infini;
mod own;
mod tls;
