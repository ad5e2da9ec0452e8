//! The Slab tier.

mod compression;
mod conformance;
mod crash;
mod crash_images;
mod device;
mod faults;
#[path = "../common/killed.rs"]
mod killed;
mod media;
mod returns;
#[path = "../common/sysfs.rs"]
mod sysfs;
mod writeback;
