//! What reliable connections must do, on the stand-in under many seeds and, with `KVDEPOT_TEST_VERBS=system`, on the
//! machine's own library and first active port (`make test-rdma`: a software device in a virtual machine).
#![allow(missing_docs, reason = "a test")]

mod errors;
mod lab;
mod lifetime;
mod messages;
mod one_sided;
mod queues;
