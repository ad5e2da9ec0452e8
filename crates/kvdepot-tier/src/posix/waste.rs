//! What is left of past epochs: bytes that stay charged until they are really gone (P5).
//!
//! A reset that is stored by a rename moves an epoch's blocks to a directory of another name, and corrupt files go with
//! their epoch. Neither is found under its known name, so they are charged here until a scan of a later epoch has found
//! no directory of a past one that could not be removed.

use std::path::{Path, PathBuf};

use hashbrown::{HashMap, HashSet};
use kvdepot_core::NamespaceId;

use super::space::Space;

/// Bytes of one namespace in one directory.
#[derive(Debug)]
struct Left {
    bytes: u64,
    /// The latest epoch to which the bytes belong.
    epoch: u32,
}

/// By namespace and directory.
#[derive(Debug, Default)]
pub(super) struct Waste {
    left: HashMap<(NamespaceId, usize), Left>,
    /// Where a past epoch's directory could not be removed since the last scan.
    stuck: HashSet<(NamespaceId, usize)>,
    /// Bytes of such directories that no tier knew when it found them.
    found: HashMap<(NamespaceId, usize, PathBuf), u64>,
}

impl Waste {
    /// Notes that a namespace's directories are scanned again.
    pub(super) fn look_again(&mut self, root: NamespaceId, directory: usize) {
        self.stuck.remove(&(root, directory));
    }

    pub(super) fn is_stuck(&mut self, root: NamespaceId, directory: usize) {
        self.stuck.insert((root, directory));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Adds bytes of an epoch; returns whether none of its namespace were known there.
    pub(super) fn keep(&mut self, space: &Space, directory: usize, bytes: u64) -> bool {
        let before = self.left.len();
        let left = self.left.entry((space.root, directory)).or_insert(Left { bytes: 0, epoch: 0 });
        left.bytes += bytes;
        left.epoch = left.epoch.max(space.epoch);
        self.left.len() > before
    }

    /// Returns whether bytes of a directory that cannot be removed are known that no tier knew when it found them.
    pub(super) fn has_found(&self, root: NamespaceId, directory: usize, top: &Path) -> bool {
        self.found.contains_key(&(root, directory, top.to_owned()))
    }

    /// Notes what was found in a directory that cannot be removed; returns what was known of it before.
    pub(super) fn find(&mut self, root: NamespaceId, directory: usize, top: &Path, bytes: u64) -> u64 {
        self.found.insert((root, directory, top.to_owned()), bytes).unwrap_or(0)
    }

    /// Takes out up to `bytes` of a namespace in one directory; returns how many there were.
    pub(super) fn release(&mut self, root: NamespaceId, directory: usize, bytes: u64) -> u64 {
        let Some(left) = self.left.get_mut(&(root, directory)) else { return 0 };
        let bytes = bytes.min(left.bytes);
        left.bytes -= bytes;
        bytes
    }

    /// Takes out what belongs to earlier epochs of a namespace, except where a directory could not be removed; returns
    /// its bytes.
    pub(super) fn settle(&mut self, space: &Space) -> u64 {
        let Self { left, stuck, found } = self;
        let mut bytes = 0;
        found.retain(|(root, directory, _), found| {
            let gone = *root == space.root && !stuck.contains(&(*root, *directory));
            bytes += if gone { *found } else { 0 };
            !gone
        });
        left.retain(|(root, directory), left| {
            let gone =
                *root == space.root && left.epoch < space.epoch && !stuck.contains(&(*root, *directory));
            bytes += if gone { left.bytes } else { 0 };
            !gone
        });
        bytes
    }
}
