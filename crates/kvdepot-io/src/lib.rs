//! Reading and writing block files: engines, devices, decorators.

pub mod buf;

pub use buf::{MemRun, SlotBuf};
