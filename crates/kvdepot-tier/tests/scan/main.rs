//! Media that are read by a process that does not own them.

mod dax;
mod files;
mod slab;
mod tools;
