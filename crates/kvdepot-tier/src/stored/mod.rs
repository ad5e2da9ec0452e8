//! What lies on the medium of a tier, read by a process that does not own it: for `kvdepot ls`, `namespaces` and
//! `verify`. Each tier with a medium has a [`Source`]; [`Check`] compares the checksums of its blocks.

mod check;
mod shards;
mod source;

pub use check::{Check, Checked, Finding};
pub(crate) use shards::divide;
pub(crate) use source::{Damaged, Source};
pub use source::{InUse, Stored, StoredBlock, StoredNamespace};
