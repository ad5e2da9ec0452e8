//! The Object tier against a server of buckets that can be made to fail. Tests named `real` put a real S3 server behind
//! that one: `make test-s3` runs them.

mod bucket_server;

mod bill;
mod conformance;
mod credentials;
mod faults;
mod heard;
mod packs;
mod real;
