//! The Remote tier against a server of both protocols that can be made to fail.

mod pool_server;

mod batches;
mod conformance;
mod faults;
mod foreign_bounds;
mod lookup;
mod resets;
