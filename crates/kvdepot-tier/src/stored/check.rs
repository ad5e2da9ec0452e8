//! Reads every block of a medium, also while a depot writes there. What fails is looked up again and read a second time:
//! if the depot has written to its place meanwhile, or has dropped it, it is no finding.

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_core::{BlockHash, BlockKey, ErrorKind, NamespaceId, Result};

use super::source::{Source, Stored, StoredBlock};

/// A block that is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its namespace, without the epoch; `None` = that is not known.
    pub root: Option<NamespaceId>,
    /// Its hash; `None` = that is not known.
    pub hash: Option<BlockHash>,
    /// Where it lies on the medium.
    pub offset_bytes: u64,
    /// What is wrong.
    pub reason: String,
}

/// The outcome of a piece of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of blocks that were read for the first time.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that were read, those read again included.
    pub read_bytes: u64,
    /// Blocks that have failed twice.
    pub findings: Vec<Finding>,
}

/// A check of the blocks that a medium had when it began.
#[derive(Debug)]
pub struct Check {
    source: Arc<dyn Source>,
    first: Stored,
    /// Blocks that are yet to be read.
    left: std::vec::IntoIter<StoredBlock>,
    failed: Vec<StoredBlock>,
    is_second: bool,
}

impl Check {
    /// Begins a check of all namespaces, or of one. The caller has just listed `stored`.
    pub(crate) fn new(source: Arc<dyn Source>, stored: &Stored, root: Option<NamespaceId>) -> Self {
        let is_asked = |found: NamespaceId| root.is_none_or(|root| root == found);
        let blocks: Vec<StoredBlock> =
            stored.blocks.iter().filter(|block| is_asked(block.root)).copied().collect();
        let damaged =
            stored.damaged.iter().filter(|one| root.is_none() || one.root.is_some_and(is_asked)).cloned();
        let first = Stored { damaged: damaged.collect(), ..Stored::default() };
        Self { source, first, left: blocks.into_iter(), failed: Vec::new(), is_second: false }
    }

    /// Reads blocks until they have at least `bytes`; `None` = the check has ended. After an error it has not ended, and
    /// what it knows is incomplete.
    pub fn next(&mut self, bytes: u64) -> Result<Option<Checked>> {
        let mut checked = Checked::default();
        while let Some(block) = self.left.next() {
            self.read(&block, &mut checked)?;
            if checked.read_bytes >= bytes {
                break;
            }
        }
        if checked != Checked::default() {
            return Ok(Some(checked));
        }
        if self.is_second || (self.failed.is_empty() && self.first.damaged.is_empty()) {
            return Ok(None);
        }
        self.look_again().map(Some)
    }

    fn read(&mut self, block: &StoredBlock, checked: &mut Checked) -> Result<()> {
        let outcome = self.source.check(block);
        checked.read_bytes += block.bytes;
        if !self.is_second {
            checked.blocks += 1;
            checked.bytes += block.bytes;
        }
        let error = match outcome {
            Ok(()) => return Ok(()),
            // A later version may have written it.
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
            Err(error) => error,
        };
        if !self.is_second {
            self.failed.push(*block);
        } else if self.source.is_there(block)? {
            checked.findings.push(Finding {
                root: Some(block.root),
                hash: Some(block.key.hash),
                offset_bytes: block.offset_bytes,
                reason: error.to_string(),
            });
        }
        Ok(())
    }

    /// Lists the medium again, and has those blocks read again that still are where they failed.
    fn look_again(&mut self) -> Result<Checked> {
        self.is_second = true;
        // Before the list: what a depot is still writing after this is not in it, or is read after it was written.
        let is_in_use = self.source.is_in_use()?;
        let now = self.source.list()?;
        let failed = std::mem::take(&mut self.failed);
        let keys: HashMap<BlockKey, &StoredBlock> = failed.iter().map(|block| (block.key, block)).collect();
        let is_again = |block: &&StoredBlock| {
            let is_same = keys.get(&block.key).is_some_and(|before| before.is(block));
            // A depot may still be writing what it wrote last.
            is_same && (block.is_settled || !is_in_use)
        };
        let again: Vec<StoredBlock> = now.blocks.iter().filter(is_again).copied().collect();
        self.left = again.into_iter();
        let mut checked = Checked::default();
        if !is_in_use {
            let lost = self.first.damaged.iter().filter(|one| now.damaged.contains(one));
            checked.findings.extend(lost.map(|one| Finding {
                root: one.root,
                hash: None,
                offset_bytes: one.offset_bytes,
                reason: one.reason.to_owned(),
            }));
        }
        Ok(checked)
    }
}
