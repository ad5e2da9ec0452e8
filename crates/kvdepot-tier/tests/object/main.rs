//! The Object tier against a server of buckets that can be made to fail.

mod bucket_server;

mod bill;
mod conformance;
mod credentials;
mod faults;
