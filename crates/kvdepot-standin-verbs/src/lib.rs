//! A libibverbs of our own over host memory, for tests: the real names, a schedule from a seed.
//!
//! It does what the rules of reliable connections allow, and behaves as unlike a typical device as they allow: work is
//! done late, queue pairs take turns at random, the bytes of a WRITE arrive in any order, a READ takes its bytes at one
//! time and places them at another. It checks what devices check: keys, ranges, access, domains, states, lengths,
//! packet numbers, space in queues. It also enforces what devices leave to luck: entries of a send queue are freed only
//! when a completion was polled, and a queue that overruns is lost.
//!
//! It is loaded by path (`Verbs::load_from`), by `LD_PRELOAD`, or under the name `libibverbs.so.1`; in the latter cases
//! the environment configures it (`config`). Queue pairs of two processes on one machine find each other by sockets
//! named after their numbers, and move bytes by `process_vm_readv` and `process_vm_writev`.
//!
//! There are two modes. In *eager* mode (from the environment), a thread does the work. In *lazy* mode (from
//! [`StandIn`]), that is so only between two processes; within one, work is done when something polls a completion queue
//! or waits for its event, so a missing wait always shows.

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
