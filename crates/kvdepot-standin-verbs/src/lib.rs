//! A libibverbs of our own over host memory, for tests: the real names, a schedule from a seed.
//!
//! What it does is what the rules of reliable connections allow, and as unlike a well-behaved device as they allow: work
//! is done late, queue pairs take turns at random, the bytes of a WRITE land in any order, a READ takes its bytes at one
//! time and places them at another. What it checks is what devices check: keys, ranges, access, domains, states,
//! lengths, packet numbers, room in queues; and what devices leave to luck: places of a send queue come back only when
//! a completion was polled, a queue that overruns is lost.
//!
//! It is loaded by path (`Verbs::load_from`), by `LD_PRELOAD`, or under the name `libibverbs.so.1`; in the latter cases
//! the environment configures it (`config`). Queue pairs of two processes on one machine find each other by sockets
//! named after their numbers, and move bytes by `process_vm_readv` and `process_vm_writev`.
//!
//! Two modes. *Lazy* (from [`StandIn`]): between two processes as below, within one nothing happens until somebody polls
//! a completion queue or waits for its event, so a missing wait always shows. *Eager* (from the environment): a thread
//! does the work.

mod completion;
mod config;
mod control;
mod engine;
mod exports;
mod memory;
mod message;
mod objects;
mod peer;
mod request;
mod rng;
mod schedule;
mod state;

pub use control::{StandIn, library_path};
