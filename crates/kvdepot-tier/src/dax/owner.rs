//! Who owns a medium. A lock applies to an inode, and containers that are given the same device each have their own
//! node for it: both locks succeed. So a depot that opens a medium writes a random word on it. After each flush it checks
//! that the word is still there, before the flushed bytes count. The last opener owns the medium; the others neither serve
//! nor acknowledge anything any more (P1, P8).

use std::sync::atomic::{AtomicBool, Ordering, fence};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::mapped::Medium;

use super::layout::{Geometry, OWNER_AT, OWNER_BYTES, SUPERBLOCK_BYTES};

/// The word written by one opener.
#[derive(Debug)]
pub(super) struct Owner {
    word: [u8; OWNER_BYTES],
    is_lost: AtomicBool,
}

impl Owner {
    /// `word` must be one that nobody else has.
    pub(super) fn new(word: [u8; OWNER_BYTES]) -> Self {
        Self { word, is_lost: AtomicBool::new(false) }
    }

    /// Takes ownership of the medium.
    pub(super) fn take(&self, medium: &dyn Medium) -> Result<()> {
        medium.write(OWNER_AT, &self.word)?;
        medium.persist()?;
        self.check_word(medium)
    }

    /// Returns whether another owner was seen.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Fails, now and from then on, if somebody else has opened the medium or formatted it.
    pub(super) fn check(&self, medium: &dyn Medium, geometry: &Geometry) -> Result<()> {
        // What the caller has read was read before the word is.
        fence(Ordering::Acquire);
        let mut bytes = [0; OWNER_AT as usize + OWNER_BYTES];
        if !self.is_lost() {
            medium.read(0, &mut bytes)?;
        }
        self.compare(
            medium,
            bytes[..SUPERBLOCK_BYTES] == geometry.encode() && bytes[OWNER_AT as usize..] == self.word,
        )
    }

    /// Like `check`, while the medium is being formatted.
    pub(super) fn check_word(&self, medium: &dyn Medium) -> Result<()> {
        let mut word = [0; OWNER_BYTES];
        medium.read(OWNER_AT, &mut word)?;
        self.compare(medium, word == self.word)
    }

    fn compare(&self, medium: &dyn Medium, is_same: bool) -> Result<()> {
        if is_same && !self.is_lost() {
            return Ok(());
        }
        let error = Error::new(
            ErrorKind::Io,
            "another depot has opened this medium, or it was overwritten: nothing of it is served or written any more. Give each \
             depot its own medium, and restart this one",
        )
        .with("path", medium.path().display());
        if !self.is_lost.swap(true, Ordering::AcqRel) {
            tracing::error!(%error, "a medium is lost");
        }
        Err(error)
    }
}
