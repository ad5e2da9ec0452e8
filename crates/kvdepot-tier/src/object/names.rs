//! Names of objects. Blocks and epochs have different prefixes, so that a lifecycle rule for blocks spares epochs.

use kvdepot_core::{BlockHash, NamespaceId};
use object_store::path::Path;

/// Names below a prefix of a bucket.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Empty, or ends with a slash.
    prefix: String,
}

impl Names {
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") } }
    }

    pub(super) fn block(&self, root: NamespaceId, epoch: u32, hash: BlockHash) -> Path {
        Path::from(format!("{}blocks/{root}/e{epoch}/{hash}", self.prefix))
    }

    /// Returns the prefix of a namespace's blocks, which has one part per epoch below it.
    pub(super) fn blocks(&self, root: NamespaceId) -> Path {
        Path::from(format!("{}blocks/{root}", self.prefix))
    }

    /// Returns the prefix of a namespace's packs in an epoch. It is below that of the epoch's blocks, so that whatever
    /// deletes these deletes packs as well.
    pub(super) fn packs(&self, root: NamespaceId, epoch: u32) -> Path {
        Path::from(format!("{}blocks/{root}/e{epoch}/packs", self.prefix))
    }

    /// Returns the name of a pack.
    pub(super) fn pack(&self, root: NamespaceId, epoch: u32, name: &str) -> Path {
        Path::from(format!("{}blocks/{root}/e{epoch}/packs/{name}", self.prefix))
    }

    /// Returns the name of the object with a namespace's epoch.
    pub(super) fn epoch(&self, root: NamespaceId) -> Path {
        Path::from(format!("{}epochs/{root}", self.prefix))
    }

    /// Returns the name of an object to test whether the store honours conditions.
    pub(super) fn trial(&self, number: u64) -> Path {
        Path::from(format!("{}epochs/trial-{number:016x}", self.prefix))
    }
}

/// Returns the epoch in the last part of such a name.
pub(super) fn epoch_of(path: &Path) -> Option<u32> {
    path.filename()?.strip_prefix('e')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        let names = Names::new("kv/a");
        let (root, hash) = (NamespaceId([1; 16]), BlockHash([2; 16]));
        let block = names.block(root, 7, hash);
        assert_eq!(block.as_ref(), format!("kv/a/blocks/{root}/e7/{hash}"));
        assert!(
            block.prefix_matches(&names.blocks(root))
                && !names.epoch(root).prefix_matches(&names.blocks(root))
        );
        assert_eq!(epoch_of(&Path::from(format!("kv/a/blocks/{root}/e7"))), Some(7));
        assert_eq!((epoch_of(&names.epoch(root)), epoch_of(&Path::from("e"))), (None, None));
        assert_eq!(Names::new("").epoch(root).as_ref(), format!("epochs/{root}"));
    }
}
