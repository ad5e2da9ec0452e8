//! The CUDA engines against the stand-in driver, and, with `KVDEPOT_TEST_GPU=1`, the same against a real one.

mod allocations;
mod faults;
mod flight;
pub(crate) mod hangs;
mod registration;
pub(crate) mod rig;
mod schedules;
pub(crate) mod whole;
