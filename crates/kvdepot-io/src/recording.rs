//! Records requests as lines in rotated files. A separate thread writes them, so that no request waits for a disk.

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

/// Capacity of the queue in bytes of records. Further records are dropped and counted.
pub const QUEUED_BYTES_MAX: usize = 32 << 20;
/// Bytes collected before they are written.
const BATCH_BYTES: usize = 1 << 18;
const PREFIX: &str = "trace-";
/// Number of names tried for a file when earlier ones are taken.
const NAMES_TRIED: u64 = 1000;
const SUFFIX: &str = ".jsonl";
const NUMBER_DIGITS: usize = 6;

/// Where the files go, and how many are kept.
#[derive(Clone, Debug)]
pub struct RecordingConfig {
    /// Directory of the files; created if missing.
    pub directory: PathBuf,
    /// Distinguishes this recording's files from those of others: `TIME-PROCESS`, two whole numbers.
    pub name: String,
    /// Size at which a new file is begun.
    pub file_bytes: u64,
    /// Number of recordings' files that the directory keeps: the newest ones.
    pub files_max: usize,
}

/// Counters of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordingCounters {
    /// Records written to files.
    pub written: u64,
    /// Records dropped because the queue was full.
    pub dropped: u64,
    /// Records that could not be written.
    pub failed: u64,
}

#[derive(Debug, Default)]
struct Shared {
    queued_bytes: AtomicUsize,
    written: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// A recording that runs until it is dropped.
#[derive(Debug)]
pub struct Recording {
    queue: Sender<Record>,
    ended: Receiver<()>,
    shared: Arc<Shared>,
}

impl Recording {
    /// Creates the directory and the first file, and starts the writing thread.
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

    /// Queues a record to be written later. Never waits: a record that finds the queue full is dropped and counted.
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

    /// Returns the counters so far.
    pub fn counters(&self) -> RecordingCounters {
        let shared = &self.shared;
        RecordingCounters {
            written: shared.written.load(Ordering::Relaxed),
            dropped: shared.dropped.load(Ordering::Relaxed),
            failed: shared.failed.load(Ordering::Relaxed),
        }
    }

    /// Stops the recording. Waits up to `wait` for queued records to be written (P2) and returns whether they were.
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
            // The written part may end within a line. If it cannot be truncated, the next line begins a new file.
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
        // Another recording of this process may have begun in the same millisecond, with the same name.
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

/// Returns whether a file was removed, by another recording or by a user, so that its records are lost.
fn is_gone(file: &File) -> bool {
    file.metadata().is_ok_and(|facts| facts.nlink() == 0)
}

/// Returns whether a name has the form `TIME-PROCESS`.
fn is_own_name(name: &str) -> bool {
    name.split_once('-').is_some_and(|(time, process)| is_number(time) && is_number(process))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Returns whether a file name is that of a recording. Others may keep traces in the same directory.
fn is_recorded(file: &str) -> bool {
    file.strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(SUFFIX))
        .and_then(|rest| rest.split_once('.'))
        .is_some_and(|(name, number)| is_own_name(name) && number.len() >= NUMBER_DIGITS && is_number(number))
}

/// Removes recordings' files, least recently written first. Files that cannot be removed stay.
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
