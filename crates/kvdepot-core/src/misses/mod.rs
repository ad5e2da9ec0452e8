//! Why a block is not there: what became of blocks that left, and by which word a miss is counted.
//!
//! The machine says what went ([`Gone`]) and what a claim did not find ([`Missed`]), as data. A [`Ghosts`] table remembers the
//! first, and answers for the second. It lies outside of the machine, so no hold of the machine's lock pays for it, and a
//! lookup that finds its blocks does not come here.

mod ghosts;
mod gone;
mod reason;

pub use ghosts::{GHOST_BYTES, Ghost, Ghosts};
pub use gone::{Fate, Gone, Missed, Short};
pub use reason::Reason;
