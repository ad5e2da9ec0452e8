//! A pool server behind the Remote tier of another depot.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/gate.rs"]
mod gate;
#[path = "../common/pool.rs"]
mod pool;
#[path = "../common/wire.rs"]
mod wire;

mod hung;
mod pool_server;
mod sharing;
mod tls;
