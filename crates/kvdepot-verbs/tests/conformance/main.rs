//! Conformance tests of reliable connections, on the stand-in under many seeds. With `KVDEPOT_TEST_VERBS=system` they
//! use the machine's own library and first active port (`make test-rdma`: a software device in a virtual machine).
#![allow(missing_docs, reason = "a test")]

mod errors;
mod lab;
mod lifetime;
mod messages;
mod one_sided;
mod queues;
