//! The engine against both stand-ins: a device that runs streams late, and an adapter that works late and whose writes
//! arrive later still.

mod choosing;
mod failures;
mod registration;
mod rig;
mod schedules;
