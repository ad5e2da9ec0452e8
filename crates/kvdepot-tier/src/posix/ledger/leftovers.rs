//! Files of failed writes: their bytes count as used in the ledger until the file is known to be gone.

use std::path::PathBuf;

use hashbrown::HashSet;

/// Failed writes that are remembered until their files are known to be gone; what is forgotten counts as used until
/// the next survey.
const LEFTOVERS_MAX: usize = 4096;

/// A write that failed: its bytes are free once its temporary file is known to be gone, and not to have been renamed.
#[derive(Debug)]
pub(super) struct Leftover {
    pub(super) directory: usize,
    pub(super) temporary: PathBuf,
    pub(super) bytes: u64,
    /// The membership in which they were spent.
    pub(super) membership: u64,
    /// Whether its rename failed and may have taken effect: if there is no temporary file, there may be one of its final
    /// name, or somebody has removed that and counted its bytes as free.
    pub(super) in_doubt: bool,
    /// Whether its file could not be removed: tried again in every turn with the ledger.
    pub(super) is_stuck: bool,
}

/// Failed writes whose bytes still count as used.
#[derive(Debug, Default)]
pub(in crate::posix) struct Leftovers {
    all: Vec<Leftover>,
    /// Directories in which a thread removes some of them now.
    clearing: HashSet<usize>,
}

impl Leftovers {
    /// Adds a write that failed, and the membership in which its bytes were spent.
    pub(in crate::posix) fn add(
        &mut self,
        directory: usize,
        temporary: PathBuf,
        bytes: u64,
        membership: u64,
        in_doubt: bool,
    ) {
        self.push(Leftover { directory, temporary, bytes, membership, in_doubt, is_stuck: false });
    }

    fn push(&mut self, leftover: Leftover) {
        if self.all.len() < LEFTOVERS_MAX {
            self.all.push(leftover);
        }
    }

    /// Returns whether there are some that nobody has tried to remove, and can now.
    pub(in crate::posix) fn has_new(&self) -> bool {
        self.all.iter().any(|leftover| !leftover.is_stuck && !self.clearing.contains(&leftover.directory))
    }

    /// Returns the directories for other threads to clear.
    pub(super) fn begin_to_clear(&mut self) -> Vec<usize> {
        let directories = self.all.iter().map(|leftover| leftover.directory);
        let mut begun = Vec::new();
        for directory in directories {
            if self.clearing.insert(directory) {
                begun.push(directory);
            }
        }
        begun
    }

    /// Takes out those of one directory.
    pub(super) fn take(&mut self, directory: usize) -> Vec<Leftover> {
        let is_here = |leftover: &mut Leftover| leftover.directory == directory;
        self.all.extract_if(.., is_here).collect()
    }

    /// Notes that no thread clears a directory any more; what it could not remove comes back.
    pub(super) fn end_clearing(&mut self, directory: usize, stuck: Vec<Leftover>) {
        self.clearing.remove(&directory);
        stuck.into_iter().for_each(|leftover| self.push(leftover));
    }
}
