//! The Slab tier.

mod conformance;
mod crash_images;
mod faults;
mod returns;
