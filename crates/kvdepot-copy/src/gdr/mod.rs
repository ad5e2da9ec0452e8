//! Copies between HBM and the pool through an RDMA adapter (GPUDirect RDMA). The adapter's DMA engine moves the bytes,
//! so a small range costs a work request instead of a driver call, and the device's copy engines and multiprocessors
//! stay free.
//!
//! Queue pairs connected to themselves WRITE from pool to device and READ from device to pool. All memory is registered
//! with the adapter: the pool and the engine's KV cache in advance, anything else for the duration of a batch.
//!
//! P3 here:
//! - Before: `run` makes its own stream wait for the engine's event and records an event after that; the lane's thread
//!   waits for the latter before it posts. The engine's event may be reused as soon as `run` has returned.
//! - After a dump: a completion means that the bytes are in host memory.
//! - After a load: a completion means that the adapter has finished, but its writes may still be on their way to the
//!   device. So each queue pair's last WRITEs of a group are followed by a READ of the bytes written last: a read
//!   pushes earlier writes along the bus. When it has completed, the bytes are in HBM, and an event recorded from then
//!   on follows them.
//!
//! A load's `run` returns when its last group was submitted. Instead, a device could wait for a word that the host
//! writes when the adapter has finished (`cuStreamWaitValue32`), and `run` could return immediately. But such a wait
//! blocks a hardware queue that the device shares among streams, the engine's included, for as long as the host takes.
//! That is not done before it could be tried on hardware.

mod attach;
mod choice;
mod config;
mod engine;
mod fallback;
mod lane;
mod mutation;
mod posting;
mod regions;
mod trouble;

#[cfg(test)]
mod tests;

pub(crate) use attach::asked_for;
pub use attach::{engine_for, require};
pub use choice::{Nic, nearest};
pub use config::{GdrConfig, NICS_VARIABLE, UseGdr};
pub use engine::{DeviceRegistration, GdrEngine};
