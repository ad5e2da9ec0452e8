//! Copies between HBM and the pool on CUDA devices, through the driver API, which is loaded at run time.
//!
//! `memcpy` makes one driver call for each range, and `batch` one for many ranges. `kernel` lets a few blocks of
//! threads read and write host memory. `auto` takes for each group the method that was measured to be fastest. All of
//! them are one [`CudaEngine`]: the methods differ only in how a group's ranges are passed to the driver (`submit.rs`).
//!
//! P3 on a device: a batch's stream waits for the engine's compute event. Every group has an event after its last
//! copy; a thread waits for it before it reports the group, and the engine's compute stream can wait for it, too.

pub mod bench;
pub mod calibration;
pub(crate) mod context;
mod describe;
pub mod device;
mod driver;
mod engine;
pub(crate) mod events;
mod gate;
mod kernel;
mod lane;
mod measure;
mod mutation;
mod plan;
mod pools;
mod submit;
pub(crate) mod trust;
pub(crate) mod types;

#[cfg(test)]
pub(crate) mod tests;

pub use calibration::{Calibration, Choice};
pub use describe::{DeviceReport, Report, describe};
pub use device::{DeviceInfo, DeviceSelector};
pub use driver::Driver;
pub use engine::{
    CudaConfig, CudaEngine, DUMP_BYTES_IN_FLIGHT_DEFAULT, KERNEL_BLOCKS_DEFAULT,
    LOAD_BYTES_IN_FLIGHT_DEFAULT, Mode,
};
pub use submit::Method;
pub use trust::Distrusted;
