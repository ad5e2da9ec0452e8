//! The engine with both stand-ins: a device that runs streams late, and an adapter that works late and whose writes
//! arrive even later.

mod choosing;
mod failures;
mod giving_up;
mod registration;
mod rig;
mod schedules;
