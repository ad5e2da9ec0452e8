//! Fault injection: a device and an engine that fail by a plan, for the tests of all crates.
//!
//! A plan is drawn from a seed (`read_eio=0.1,seed=7`) or scripted step by step ([`Faults::at`]). The same seed and the
//! same order of operations give the same faults.

mod device;
mod engine;
mod memory;
mod plan;
mod queue;
mod spec;
mod volume;

pub use device::FaultDevice;
pub use engine::FaultEngine;
pub use memory::{Image, Loss, MemoryDevice, Mutation};
pub use plan::{Fault, FaultOp, Faults};
pub use queue::FaultQueue;
pub use volume::{FaultVolume, Kept, MemoryVolume, VolumeOp};
