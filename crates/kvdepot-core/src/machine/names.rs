//! Names of blocks inside the machine.

use crate::key::BlockHash;

/// One epoch of one namespace. Its number is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SpaceId(pub(crate) u32);

/// A block's name inside the machine: 20 bytes where a [`crate::BlockKey`] takes 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    pub(crate) space: SpaceId,
    pub(crate) hash: BlockHash,
}
