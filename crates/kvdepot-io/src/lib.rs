//! Reads and writes block files: engines, devices and their decorators.
//!
//! Two independent axes: an [`IoEngine`] decides how requests run (threads, aio or io_uring behind one trait), and a
//! [`Device`] decides what files are (a directory, or a faulty one for tests: [`faults`]).

pub mod aligned;
pub mod boot_time;
pub mod buf;
mod cached;
pub mod checksum;
pub mod choose;
mod clock;
pub mod cut;
mod desk;
pub mod device;
pub mod directory;
pub mod engine;
pub mod faults;
pub mod fork;
pub mod inherited;
mod intake;
pub mod iobuf;
pub mod kernel;
pub mod mapped;
pub mod noop;
pub mod owner;
mod progress;
pub mod psync;
pub mod queued;
pub mod random;
pub mod recording;
mod shared_memory;
pub mod socket;
pub mod thread_time;
pub mod transfer;
mod trial;
pub mod volume;
mod watchdog;

pub use aligned::AlignedBuf;
pub use buf::{MemRun, SlotBuf};
pub use choose::{EngineKind, open_engine};
pub use device::{Device, DeviceFile, DeviceSpace, DirectAlign, DirectUse, FileStat, ListEntry};
pub use directory::DirDevice;
pub use engine::{
    Call, Class, EngineStats, FileWritten, IoEngine, Op, Prepared, ReadFile, Request, WriteFile,
};
pub use iobuf::IoBuf;
pub use noop::NoopEngine;
pub use psync::{PsyncConfig, PsyncEngine};
pub use queued::QueuedEngine;
pub use shared_memory::SharedMemory;
pub use volume::{FileVolume, Volume};
