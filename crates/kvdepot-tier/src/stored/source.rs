//! What a reader of a medium finds there.

use std::fmt::Debug;
use std::path::Path;

use kvdepot_core::{BlockKey, NamespaceId, Result};

/// Tells whether a depot uses a medium now.
pub type InUse = Box<dyn Fn() -> Result<bool> + Send + Sync>;

/// A namespace as a medium knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredNamespace {
    /// The namespace without its epoch.
    pub root: NamespaceId,
    /// Its current epoch.
    pub epoch: u32,
    /// Number of its blocks.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Why its blocks will not be found at the next start.
    pub problem: Option<&'static str>,
}

/// A block as a medium lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its namespace, without the epoch.
    pub root: NamespaceId,
    /// Its key, with the id of the current epoch.
    pub key: BlockKey,
    /// Where it lies on the medium.
    pub offset_bytes: u64,
    /// Its length there, including its header if that precedes it.
    pub bytes: u64,
    /// Grows with every block written to the medium.
    pub order: u64,
    /// Part of a checksum, which the list has of the block.
    pub(crate) tag: u64,
    /// Whether the medium shows that all of the block was written.
    pub(crate) is_settled: bool,
}

impl StoredBlock {
    /// Returns whether both are the same bytes at the same place.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Self { is_settled: false, ..*self } == Self { is_settled: false, ..*other }
    }
}

/// An entry of a list of blocks that cannot be read, so that the block is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damaged {
    /// The namespace that it seems to belong to.
    pub(crate) root: Option<NamespaceId>,
    pub(crate) offset_bytes: u64,
    /// Tells it from what may lie there later.
    pub(crate) checksum: u64,
    pub(crate) reason: &'static str,
}

/// The content of a medium.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// In the order of their names.
    pub namespaces: Vec<StoredNamespace>,
    /// In the order of their places.
    pub blocks: Vec<StoredBlock>,
    pub(crate) damaged: Vec<Damaged>,
    /// What is wrong with the medium apart from blocks and namespaces.
    pub problem: Option<&'static str>,
}

impl Stored {
    /// Sorts blocks by their places, and counts them. The other namespaces have no blocks.
    pub(crate) fn new(mut namespaces: Vec<StoredNamespace>, mut blocks: Vec<StoredBlock>) -> Self {
        namespaces.sort_unstable_by_key(|namespace| namespace.root.0);
        blocks.sort_unstable_by_key(|block| block.offset_bytes);
        for block in &blocks {
            let found = namespaces.binary_search_by_key(&block.root.0, |namespace| namespace.root.0);
            if let Some(namespace) = found.ok().and_then(|at| namespaces.get_mut(at)) {
                namespace.blocks += 1;
                namespace.bytes += block.bytes;
            }
        }
        Self { namespaces, blocks, ..Self::default() }
    }
}

/// A medium that is only read, also while a depot writes to it.
pub(crate) trait Source: Send + Sync + Debug {
    /// The name of the tier that the medium belongs to.
    fn tier(&self) -> &'static str;

    fn path(&self) -> &Path;

    /// Lists what a start would find.
    fn list(&self) -> Result<Stored>;

    /// Reads a block and compares the checksums that the tier compares. Any error but `Unsupported` means that the block
    /// is broken, or that its place holds something else by now.
    fn check(&self, block: &StoredBlock) -> Result<()>;

    /// Returns whether nothing has been written to a block's place since it was listed, up to now.
    fn is_there(&self, block: &StoredBlock) -> Result<bool>;

    /// Returns whether a depot uses the medium now.
    fn is_in_use(&self) -> Result<bool>;
}
