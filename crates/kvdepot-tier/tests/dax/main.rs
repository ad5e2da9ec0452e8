//! The Dax tier on files and on media that the tests script. What also runs on a device is apart.

#[path = "../dax_media/mod.rs"]
mod dax_media;

mod ahead;
mod crash_images;
mod faults;
mod hangs;
mod leases;
mod namespaces;
mod overlaps;
mod shared;
mod verify;
mod writeback;
