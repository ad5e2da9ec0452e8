//! Copies between HBM and the pool by an RDMA adapter (GPUDirect RDMA): the adapter's DMA engine moves the bytes, so
//! small ranges cost a work request instead of a call of the driver, and neither copy engines nor multiprocessors of the
//! device are taken.
//!
//! Queue pairs connected to themselves WRITE from pool to device and READ from device to pool. What may be named is
//! registered with the adapter: the pool and the engine's KV cache ahead, anything else for the time of a batch.
//!
//! P3 here:
//! - Before: `run` lets a stream of its own wait for the engine's event and records an event behind that; the lane's
//!   thread waits for the latter before it posts. The engine's event may be used again as soon as `run` has returned.
//! - After a dump: a completion tells that the bytes are in host memory.
//! - After a load: a completion tells that the adapter is through, but its writes may still be on the way to the device.
//!   So each queue pair's last WRITEs of a group are followed by a READ of what was written last: a read pushes the writes
//!   before it along the bus. When that has completed, the bytes are in HBM, and an event recorded from then on comes
//!   after them for whatever waits for it.
//!
//! A load's `run` returns when its last group was submitted. A device could instead be made to wait for a word that the
//! host writes when the adapter is through (`cuStreamWaitValue32`), and `run` return at once; but such a wait blocks a
//! hardware queue that the device shares among streams, the engine's included, for as long as the host takes. That was
//! not taken before it could be tried on hardware.

mod attach;
mod choice;
mod config;
mod engine;
mod fallback;
mod lane;
mod mutation;
mod posting;
mod regions;

#[cfg(test)]
mod tests;

pub(crate) use attach::asked_for;
pub use attach::{engine_for, require};
pub use choice::{Nic, nearest};
pub use config::{GdrConfig, NICS_VARIABLE, UseGdr};
pub use engine::{DeviceRegistration, GdrEngine};
