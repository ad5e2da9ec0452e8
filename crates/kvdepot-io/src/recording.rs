//! A recording of requests: lines in rotated files, written by a thread of its own so that nobody waits for a disk.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use kvdepot_core::replay::Record;
use kvdepot_core::{Error, ErrorKind, Result};

/// Bytes of records that may wait to be written; what comes beyond is dropped and counted.
pub const QUEUED_BYTES_MAX: usize = 32 << 20;
/// Bytes that are put together before they are written.
const BATCH_BYTES: usize = 1 << 18;
const PREFIX: &str = "trace-";
/// Names that are tried for a file while others have them.
const NAMES_TRIED: u64 = 1000;
const SUFFIX: &str = ".jsonl";
const NUMBER_DIGITS: usize = 6;

/// Where lines go, and how many are kept.
#[derive(Clone, Debug)]
pub struct RecordingConfig {
    /// Directory of the files; it is made when it is not there.
    pub directory: PathBuf,
    /// What tells this recording's files from those of others: `TIME-PROCESS`, two whole numbers.
    pub name: String,
    /// A file that has so many bytes is followed by another one.
    pub file_bytes: u64,
    /// Files of recordings that the directory keeps: the newest ones.
    pub files_max: usize,
}

/// What came of a recording so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordingCounters {
    /// Records that are in files.
    pub written: u64,
    /// Records that found the queue full.
    pub dropped: u64,
    /// Records that the disk refused.
    pub failed: u64,
}

#[derive(Debug, Default)]
struct Shared {
    queued_bytes: AtomicUsize,
    written: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// A recording that goes on until it is dropped.
#[derive(Debug)]
pub struct Recording {
    queue: Sender<Record>,
    ended: Receiver<()>,
    shared: Arc<Shared>,
}

impl Recording {
    /// Makes the directory and the first file, and starts the thread that writes.
    pub fn start(config: RecordingConfig) -> Result<Self> {
        if !is_own_name(&config.name) {
            let what = "a recording is named TIME-PROCESS, two whole numbers";
            return Err(Error::new(ErrorKind::Config, what).with("name", &config.name));
        }
        let mut files = Files { config, number: 0, file: None };
        files.open()?;
        // Bounded by bytes: see `offer`.
        let (queue, records) = unbounded();
        let (end, ended) = bounded(1);
        let shared = Arc::new(Shared::default());
        let counts = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kvdepot-trace".to_owned())
            .spawn(move || {
                write_all(&records, &mut files, &counts);
                let _ = end.send(());
            })
            .map_err(|e| Error::io("cannot start the thread that records requests", e))?;
        Ok(Self { queue, ended, shared })
    }

    /// Takes a record, to be written later. Never waits: a record that finds the queue full is dropped and counted.
    pub fn offer(&self, record: Record) -> bool {
        let bytes = record.bytes();
        let queued = self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        if queued + bytes > QUEUED_BYTES_MAX || self.queue.send(record).is_err() {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// What came of the recording so far.
    pub fn counters(&self) -> RecordingCounters {
        let shared = &self.shared;
        RecordingCounters {
            written: shared.written.load(Ordering::Relaxed),
            dropped: shared.dropped.load(Ordering::Relaxed),
            failed: shared.failed.load(Ordering::Relaxed),
        }
    }

    /// Ends the recording. Waits so long for what is queued to be written (P2), and says whether it was.
    pub fn close(self, wait: Duration) -> bool {
        drop(self.queue);
        self.ended.recv_timeout(wait).is_ok()
    }
}

fn write_all(records: &Receiver<Record>, files: &mut Files, shared: &Shared) {
    let mut lines = Vec::new();
    while let Ok(first) = records.recv() {
        let (mut count, mut bytes, mut next) = (0, 0, Some(first));
        lines.clear();
        while let Some(record) = next {
            record.write_line(&mut lines);
            count += 1;
            bytes += record.bytes();
            next = if lines.len() < BATCH_BYTES { records.try_recv().ok() } else { None };
        }
        let outcome = files.write(&lines);
        shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        match outcome {
            Ok(()) => shared.written.fetch_add(count, Ordering::Relaxed),
            Err(error) => {
                if shared.failed.fetch_add(count, Ordering::Relaxed) == 0 {
                    tracing::warn!("requests are not recorded for now: {error}");
                }
                0
            }
        };
    }
}

struct Files {
    config: RecordingConfig,
    number: u64,
    file: Option<(File, u64)>,
}

impl Files {
    fn write(&mut self, lines: &[u8]) -> Result<()> {
        if self.file.as_ref().is_none_or(|(file, bytes)| *bytes >= self.config.file_bytes || is_gone(file)) {
            self.open()?;
        }
        let Some((file, bytes)) = &mut self.file else {
            return Err(Error::new(ErrorKind::Io, "a recording has no file"));
        };
        if let Err(error) = file.write_all(lines) {
            // What was written may end within a line. Where that cannot be cut off, the next line begins a file.
            if file.set_len(*bytes).is_err() {
                self.file = None;
            }
            return Err(Error::io("cannot write a trace", error).with("path", self.path().display()));
        }
        *bytes += lines.len() as u64;
        Ok(())
    }

    fn path(&self) -> PathBuf {
        let (name, number) = (&self.config.name, self.number);
        self.config.directory.join(format!("{PREFIX}{name}.{number:0NUMBER_DIGITS$}{SUFFIX}"))
    }

    fn open(&mut self) -> Result<()> {
        let directory = &self.config.directory;
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.map_err(|e| {
            Error::io("cannot make the directory of traces", e).with("path", directory.display())
        })?;
        remove_oldest(directory, self.config.files_max.max(1) - 1);
        // Another recording of this process may have begun in the same millisecond, and have the same name.
        let (path, file) = loop {
            self.number += 1;
            let path = self.path();
            let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path);
            let is_taken =
                file.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists);
            if !is_taken || self.number.is_multiple_of(NAMES_TRIED) {
                break (path, file);
            }
        };
        let file =
            file.map_err(|e| Error::io("cannot make a file for traces", e).with("path", path.display()))?;
        self.file = Some((file, 0));
        Ok(())
    }
}

/// Whether nobody can read what is written: another recording, or somebody, has removed the file.
fn is_gone(file: &File) -> bool {
    file.metadata().is_ok_and(|facts| facts.nlink() == 0)
}

/// Whether a name is `TIME-PROCESS`.
fn is_own_name(name: &str) -> bool {
    name.split_once('-').is_some_and(|(time, process)| is_number(time) && is_number(process))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Whether a file is a recording's, by its name: others may keep traces beside it.
fn is_recorded(file: &str) -> bool {
    file.strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(SUFFIX))
        .and_then(|rest| rest.split_once('.'))
        .is_some_and(|(name, number)| is_own_name(name) && number.len() >= NUMBER_DIGITS && is_number(number))
}

/// Removes recordings' files, those first that were written to the longest ago. What cannot be removed stays.
fn remove_oldest(directory: &Path, keep: usize) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut files: Vec<_> = entries
        .filter_map(std::result::Result::ok)
        .filter(|entry| entry.file_name().to_str().is_some_and(is_recorded))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.file_name(), entry.path())))
        .collect();
    files.sort();
    let too_many = files.len().saturating_sub(keep);
    for (_, _, path) in &files[..too_many] {
        let _ = fs::remove_file(path);
    }
}
