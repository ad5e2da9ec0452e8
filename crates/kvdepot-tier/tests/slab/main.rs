//! The Slab tier.

mod conformance;
mod crash;
mod crash_images;
mod device;
mod faults;
mod media;
mod returns;
