//! The Mooncake tier over a store in memory that can be made to fail.

mod mooncake_store;

mod conformance;
mod faults;
