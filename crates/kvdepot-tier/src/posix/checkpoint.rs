//! The checkpoint of the index: what lay in a directory and when it was used, so that a start need not wait for a scan.
//!
//! Only a hint: the scan that follows forgets what is not there and finds what the checkpoint lacks, and reads verify
//! every block. `docs/format.md` shows the layout.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use hashbrown::HashMap;
use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, NAMESPACES_STORED_MAX};
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::checksum::crc64;
use kvdepot_io::{Device, DeviceFile, IoBuf, SlotBuf};

use super::identity::temporary_name;
use super::index::{Listed, seconds, time_of};
use super::shared::Shared;
use super::space::Space;
use super::state::{Adopt, PIECE, PIECE_SLOTS};

/// The checkpoint's name in each directory.
pub(super) const CHECKPOINT_NAME: &str = ".kvdepot-index";
const MAGIC: &[u8; 8] = b"KVDINDEX";
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 40;
const NAMESPACE_BYTES: usize = 24;
const PIECE_HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 28;
const END_BYTES: usize = PIECE_HEAD_BYTES + 8;
/// Entries of one piece; each piece has its own checksum.
const PIECE_ENTRIES_MAX: usize = 8192;
/// Bytes read or written at a time: the longest header and the longest piece fit.
const WINDOW_BYTES: usize = 1 << 20;
const _: () = assert!(HEADER_BYTES + NAMESPACES_STORED_MAX * NAMESPACE_BYTES <= WINDOW_BYTES);
/// Share of all blocks that must have been indexed or evicted since the last checkpoint to make a new one worthwhile
/// (one in this many).
const CHANGED_PART: u64 = 64;

/// A file that is written from front to back.
struct Output {
    file: Box<dyn DeviceFile>,
    window: SlotBuf,
    offset: u64,
    entries: u64,
    piece: Vec<u8>,
}

impl Output {
    fn create(device: &dyn Device, path: &Path) -> Result<Self> {
        let file = device.create(path, false)?;
        let (window, piece) = (SlotBuf::anonymous(WINDOW_BYTES), Vec::new());
        Ok(Self { file, window, offset: 0, entries: 0, piece })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for bytes in bytes.chunks(WINDOW_BYTES) {
            self.window.write_at(0, bytes);
            let buf = IoBuf::payload(self.window.clone(), bytes.len()).expect("no longer than the window");
            let mut done = 0;
            while done < bytes.len() {
                let went = self.file.write_at(&buf, done, self.offset + done as u64)?;
                if went == 0 {
                    return Err(Error::new(ErrorKind::Io, "the system took no more of a checkpoint"));
                }
                done += went;
            }
            self.offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn add(&mut self, listed: &Listed) -> Result<()> {
        self.piece.extend_from_slice(&listed.hash.0);
        self.piece.extend_from_slice(&listed.number.to_le_bytes());
        self.piece.extend_from_slice(&listed.used_s.to_le_bytes());
        let pages = u32::try_from(listed.bytes / BLOCK_ALIGN_BYTES).unwrap_or(u32::MAX);
        self.piece.extend_from_slice(&pages.to_le_bytes());
        self.entries += 1;
        if self.piece.len() == PIECE_ENTRIES_MAX * ENTRY_BYTES { self.end_piece() } else { Ok(()) }
    }

    fn end_piece(&mut self) -> Result<()> {
        let entries = std::mem::take(&mut self.piece);
        if entries.is_empty() {
            return Ok(());
        }
        self.write(&piece(entries.len() / ENTRY_BYTES, &entries))
    }

    fn end(&mut self) -> Result<()> {
        self.end_piece()?;
        let count = self.entries.to_le_bytes();
        self.write(&piece(0, &count))
    }
}

fn piece(entries: usize, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PIECE_HEAD_BYTES + bytes.len());
    out.extend_from_slice(&(entries as u32).to_le_bytes());
    out.extend_from_slice(&[0; 12]);
    out.extend_from_slice(bytes);
    let crc = crc64(&out);
    out[8..16].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Returns whether the eight bytes at `at` are the checksum of all bytes with these eight zeroed.
fn is_intact(bytes: &[u8], at: usize) -> bool {
    let mut copy = bytes.to_vec();
    copy[at..at + 8].fill(0);
    u64_at(bytes, at) == crc64(&copy)
}

fn header(namespaces: &[(u32, Arc<Space>)], now_s: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + namespaces.len() * NAMESPACE_BYTES);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(namespaces.len() as u32).to_le_bytes());
    out.extend_from_slice(&u64::from(now_s).to_le_bytes());
    out.extend_from_slice(&[0; 16]);
    for (number, space) in namespaces {
        out.extend_from_slice(&space.root.0);
        out.extend_from_slice(&space.epoch.to_le_bytes());
        out.extend_from_slice(&number.to_le_bytes());
    }
    let crc = crc64(&out);
    out[32..40].copy_from_slice(&crc.to_le_bytes());
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A checkpoint that is read from front to back.
struct Input {
    file: Box<dyn DeviceFile>,
    slot: SlotBuf,
    bytes: u64,
    offset: u64,
}

impl Input {
    /// Opens a complete checkpoint; `None` if there is none.
    fn open(device: &dyn Device) -> Result<Option<Self>> {
        let path = Path::new(CHECKPOINT_NAME);
        let Some(stat) = device.stat(path)? else { return Ok(None) };
        let (file, slot) = (device.open(path, false)?, SlotBuf::anonymous(WINDOW_BYTES));
        let mut input = Self { file, slot, bytes: stat.bytes, offset: 0 };
        let end_at = stat.bytes.checked_sub(END_BYTES as u64).ok_or_else(torn)?;
        let end = input.read(end_at, END_BYTES)?;
        if u32_at(&end, 0) != 0 || !is_intact(&end, 8) {
            return Err(torn());
        }
        Ok(Some(input))
    }

    /// Reads up to `bytes` at `offset`; fewer at the end of the file.
    fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>> {
        let bytes = bytes.min(usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX));
        let mut buf = IoBuf::payload(self.slot.clone(), bytes).expect("no longer than the window");
        let mut done = 0;
        while done < bytes {
            match self.file.read_at(&mut buf, done, offset + done as u64)? {
                0 => return Err(torn()),
                came => done += came,
            }
        }
        let mut out = vec![0; bytes];
        self.slot.read_at(0, &mut out);
        Ok(out)
    }

    /// Returns root, epoch and number of each namespace.
    fn header(&mut self) -> Result<Vec<(NamespaceId, u32, u32)>> {
        let window = self.read(0, WINDOW_BYTES)?;
        if window.len() < HEADER_BYTES || &window[..8] != MAGIC || u32_at(&window, 8) != VERSION {
            return Err(Error::new(ErrorKind::Version, "a checkpoint is not one of this version"));
        }
        let count = u32_at(&window, 12) as usize;
        let bytes = HEADER_BYTES + count.min(NAMESPACES_STORED_MAX) * NAMESPACE_BYTES;
        if count > NAMESPACES_STORED_MAX || window.len() < bytes || !is_intact(&window[..bytes], 32) {
            return Err(torn());
        }
        self.offset = bytes as u64;
        let namespaces = window[HEADER_BYTES..bytes].chunks_exact(NAMESPACE_BYTES).map(|entry| {
            let root: [u8; 16] = entry[..16].try_into().expect("16 bytes");
            (NamespaceId(root), u32_at(entry, 16), u32_at(entry, 20))
        });
        Ok(namespaces.collect())
    }

    /// Returns the entries of the next piece; `None` after the last.
    fn piece(&mut self) -> Result<Option<Vec<u8>>> {
        let head = self.read(self.offset, PIECE_HEAD_BYTES)?;
        if head.len() < PIECE_HEAD_BYTES {
            return Err(torn());
        }
        let count = u32_at(&head, 0) as usize;
        if count == 0 {
            return Ok(None);
        }
        let bytes = PIECE_HEAD_BYTES + count.min(PIECE_ENTRIES_MAX) * ENTRY_BYTES;
        let mut whole = self.read(self.offset, bytes)?;
        if count > PIECE_ENTRIES_MAX || whole.len() < bytes || !is_intact(&whole, 8) {
            return Err(torn());
        }
        self.offset += bytes as u64;
        Ok(Some(whole.split_off(PIECE_HEAD_BYTES)))
    }
}

fn torn() -> Error {
    Error::new(ErrorKind::Corrupt, "a checkpoint is damaged")
}

impl Shared {
    /// Takes into the index what the checkpoints list.
    pub(super) fn replay(&self) {
        let began = Instant::now();
        let mut any = false;
        for directory in 0..self.devices.len() {
            match self.replay_one(directory) {
                Ok(there) => any |= there,
                Err(error) => {
                    let path = self.device(directory).root().join(CHECKPOINT_NAME);
                    tracing::warn!(%error, path = %path.display(), "a checkpoint is ignored; the scan takes longer");
                }
            }
        }
        let mut state = self.lock();
        state.replayed |= any && state.chores.replay;
        state.chores.replay = false;
        state.removed_early = None;
        let blocks = state.index.len();
        drop(state);
        let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::debug!(blocks, millis, "checkpoints were read");
        self.changed.notify_all();
    }

    fn replay_one(&self, directory: usize) -> Result<bool> {
        let Some(mut input) = Input::open(&**self.device(directory))? else { return Ok(false) };
        let named = input.header()?;
        let spaces: HashMap<u32, Arc<Space>> = {
            let state = self.lock();
            let current = |(root, epoch, number)| {
                let space = state.roots.get(&root).and_then(|id| state.spaces.get(id))?;
                (space.epoch == epoch).then(|| (number, Arc::clone(space)))
            };
            named.into_iter().filter_map(current).collect()
        };
        while let Some(entries) = input.piece()? {
            for entries in entries.chunks(PIECE * ENTRY_BYTES) {
                let mut state = self.lock();
                if state.chores.stop_at.is_some() || !state.chores.replay {
                    return Ok(false);
                }
                for entry in entries.chunks_exact(ENTRY_BYTES) {
                    let Some(space) = spaces.get(&u32_at(entry, 16)) else { continue };
                    let hash: [u8; 16] = entry[..16].try_into().expect("16 bytes");
                    let key = space.key(BlockHash(hash));
                    if state.removed_early.as_ref().is_some_and(|removed| removed.contains(&key)) {
                        continue;
                    }
                    let (used, bytes) =
                        (Some(time_of(u32_at(entry, 20))), u64::from(u32_at(entry, 24)) * BLOCK_ALIGN_BYTES);
                    if !space.is_usual(bytes) {
                        continue;
                    }
                    state.adopt(key, Adopt { space: Arc::clone(space), directory, bytes, used });
                }
            }
            // Callers that wait for the lock or for files to evict go first.
            self.changed.notify_all();
        }
        Ok(true)
    }

    /// Writes a checkpoint if much has changed since the last one.
    pub(super) fn save_if_changed(&self) {
        let worth_it = {
            let state = self.lock();
            state.counted && state.changes > state.index.len() as u64 / CHANGED_PART
        };
        if worth_it && let Err(error) = self.save(None) {
            tracing::warn!(%error, "no checkpoint was written; the next start scans");
        }
    }

    /// Writes a checkpoint into every directory; abandoned at the deadline. Each replaces its predecessor as a whole.
    pub(super) fn save(&self, deadline: Option<Instant>) -> Result<()> {
        let temporaries: Vec<String> = self.devices.iter().map(|_| temporary_name()).collect();
        let outcome = self.save_as(&temporaries, deadline);
        if outcome.is_err() {
            for (device, temporary) in self.devices.iter().zip(&temporaries) {
                // Best effort: the next sweep removes what stays.
                let _ = device.unlink(Path::new(temporary));
            }
        }
        outcome
    }

    fn save_as(&self, temporaries: &[String], deadline: Option<Instant>) -> Result<()> {
        let (namespaces, changes) = {
            let state = self.lock();
            (state.index.numbered(), state.changes)
        };
        let head = header(&namespaces, seconds(SystemTime::now()));
        let mut outputs = Vec::with_capacity(self.devices.len());
        for (device, temporary) in self.devices.iter().zip(temporaries) {
            let mut output = Output::create(&**device, Path::new(temporary))?;
            output.write(&head)?;
            outputs.push(output);
        }
        let spaces: HashMap<u32, Arc<Space>> = namespaces.into_iter().collect();
        let mut cursor = Some(0);
        while let Some(from) = cursor {
            let (listed, next) = self.lock().index.list(from, PIECE_SLOTS);
            for file in &listed {
                // Files of an unusual length are left to the scan; a number that has been reused by now is caught at
                // replay because the file is missing.
                if spaces.get(&file.number).is_some_and(|space| space.is_usual(file.bytes)) {
                    outputs[file.directory].add(file)?;
                }
            }
            let given_up = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if given_up || (deadline.is_none() && self.lock().chores.stop_at.is_some()) {
                return Err(Error::new(ErrorKind::Timeout, "a checkpoint took too long to write"));
            }
            cursor = next;
        }
        for ((output, device), temporary) in outputs.iter_mut().zip(&self.devices).zip(temporaries) {
            output.end()?;
            device.publish(Path::new(temporary), Path::new(CHECKPOINT_NAME))?;
        }
        self.lock().changes -= changes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_or_a_missing_byte_is_noticed() {
        let whole = piece(1, &[7; ENTRY_BYTES]);
        assert!(is_intact(&whole, 8));
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&bytes, 8), "bit {bit}");
        }
        assert!(!is_intact(&whole[..whole.len() - 1], 8));
    }
}
