//! Media for tests: one in memory that records every write, and one that calls a hook before each access.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use kvdepot_core::Result;
use parking_lot::Mutex;

use super::copy::within;
use super::{Medium, Piece};
use crate::checksum::crc64;

/// A recorded operation on a medium in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// Bytes were written.
    Write {
        /// Where.
        at: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Everything written before is persistent.
    Persist,
}

#[derive(Debug, Default)]
struct Memory {
    bytes: Vec<u8>,
    log: Vec<Recorded>,
}

/// A medium in this process's memory. Clones share its content.
#[derive(Clone, Debug)]
pub struct MemoryMedium {
    memory: Arc<Mutex<Memory>>,
    size: u64,
}

impl MemoryMedium {
    /// Makes a medium with these bytes and an empty record.
    pub fn new(bytes: Vec<u8>) -> Self {
        let size = bytes.len() as u64;
        Self { memory: Arc::new(Mutex::new(Memory { bytes, log: Vec::new() })), size }
    }

    /// Returns all recorded operations.
    pub fn log(&self) -> Vec<Recorded> {
        self.memory.lock().log.clone()
    }

    /// Returns the number of recorded operations.
    pub fn recorded(&self) -> usize {
        self.memory.lock().log.len()
    }

    /// Returns the current bytes.
    pub fn content(&self) -> Vec<u8> {
        self.memory.lock().bytes.clone()
    }

    /// Changes bytes without recording it, as damage does.
    pub fn damage(&self, at: u64, change: impl FnOnce(&mut [u8])) {
        change(&mut self.memory.lock().bytes[at as usize..]);
    }
}

impl Medium for MemoryMedium {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn bytes(&self) -> u64 {
        self.size
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        within(self.size, at, out.len())?;
        let at = at as usize;
        out.copy_from_slice(&self.memory.lock().bytes[at..at + out.len()]);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        within(self.size, at, bytes.len())?;
        let mut memory = self.memory.lock();
        memory.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        memory.log.push(Recorded::Write { at, bytes: bytes.to_vec() });
        Ok(())
    }

    fn read_pieces(
        &self,
        mut at: u64,
        pieces: &[Piece<'_>],
        mut checksums: Option<&mut Vec<u64>>,
    ) -> Result<()> {
        for piece in pieces {
            let mut bytes = vec![0; piece.bytes];
            self.read(at, &mut bytes)?;
            piece.slot.write_at(piece.from, &bytes);
            if let Some(checksums) = &mut checksums {
                checksums.push(crc64(&bytes));
            }
            at += piece.bytes as u64;
        }
        Ok(())
    }

    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64> {
        let mut bytes = vec![0; piece.bytes];
        piece.slot.read_at(piece.from, &mut bytes);
        self.write(at, &bytes)?;
        Ok(crc64(&bytes))
    }

    fn persist(&self) -> Result<()> {
        self.memory.lock().log.push(Recorded::Persist);
        Ok(())
    }
}

/// A call passed to a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumCall {
    /// `read` and `read_pieces`.
    Read {
        /// First byte.
        at: u64,
        /// Length.
        bytes: usize,
    },
    /// `write` and `write_piece`.
    Write {
        /// First byte.
        at: u64,
        /// Length.
        bytes: usize,
    },
    /// `persist`.
    Persist,
    /// `map_ahead`; if the hook fails, nothing is mapped.
    MapAhead {
        /// First byte.
        at: u64,
        /// Length.
        bytes: usize,
    },
}

/// A test's callback for each call: it may block, and then lets the call continue or fail.
pub type Hook = Box<dyn Fn(MediumCall) -> Result<()> + Send + Sync>;

/// A medium that calls a hook before each access.
pub struct HookMedium {
    inner: Arc<dyn Medium>,
    hook: Hook,
}

impl HookMedium {
    /// Wraps `inner` and calls `hook` before each of its calls.
    pub fn new(inner: Arc<dyn Medium>, hook: Hook) -> Self {
        Self { inner, hook }
    }
}

impl fmt::Debug for HookMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HookMedium({:?})", self.inner.path())
    }
}

impl Medium for HookMedium {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn is_memory(&self) -> bool {
        self.inner.is_memory()
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        (self.hook)(MediumCall::Read { at, bytes: out.len() })?;
        self.inner.read(at, out)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        (self.hook)(MediumCall::Write { at, bytes: bytes.len() })?;
        self.inner.write(at, bytes)
    }

    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], checksums: Option<&mut Vec<u64>>) -> Result<()> {
        (self.hook)(MediumCall::Read { at, bytes: pieces.iter().map(|piece| piece.bytes).sum() })?;
        self.inner.read_pieces(at, pieces, checksums)
    }

    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64> {
        (self.hook)(MediumCall::Write { at, bytes: piece.bytes })?;
        self.inner.write_piece(at, piece)
    }

    fn persist(&self) -> Result<()> {
        (self.hook)(MediumCall::Persist)?;
        self.inner.persist()
    }

    fn checksum(&self, at: u64, bytes: usize) -> Result<u64> {
        (self.hook)(MediumCall::Read { at, bytes })?;
        self.inner.checksum(at, bytes)
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn is_read_from_memory(&self) -> bool {
        self.inner.is_read_from_memory()
    }

    fn map_ahead(&self, at: u64, bytes: usize) -> bool {
        (self.hook)(MediumCall::MapAhead { at, bytes }).is_err() || self.inner.map_ahead(at, bytes)
    }

    fn lend(&self) -> Result<Option<OwnedFd>> {
        self.inner.lend()
    }
}
