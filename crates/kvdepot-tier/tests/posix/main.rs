//! The Posix tier. What starts processes or also runs on NFS is apart.

#[path = "../common/mod.rs"]
mod common;

mod batches;
mod bit_flip;
mod cap;
mod checkpoint;
mod compression;
mod crash_images;
mod epochs;
mod faults;
mod format;
mod full_disk;
mod hostile;
mod overwrite;
mod past_epochs;
mod restart;
