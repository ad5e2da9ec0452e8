//! The ledger as files: each version has its own name, and is never changed.
//!
//! The next version is written by giving a complete file the next name, which fails if another member was first. That
//! is all the exclusion there is: no lock that a network file system might not keep, and nothing that a dead writer
//! could hold.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvdepot_core::limits::FOREIGN_TEMPORARY_AGE_S;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::Device;

use super::book::Book;
use super::codec::{LEDGER_BYTES_MAX, decode, encode, later_version};
use crate::posix::identity::{Identity, temporary_name};

/// The directory of the ledger.
pub(super) const LEDGER_DIR: &str = ".kvdepot-ledger";
/// Versions that stay, besides the first one. A member that reads an outdated listing finds the next name taken, and not
/// free again.
const VERSIONS_KEPT: u64 = 16;
/// Never removed: a depot that finds no ledger, because it reads an outdated listing, does not begin a second one.
const FIRST: u64 = 1;
/// The last version.
const NUMBER_MAX: u64 = 1 << 53;
/// Listings until a version is found that is not removed meanwhile.
const ATTEMPTS_MAX: usize = 16;

/// The newest version.
#[derive(Debug)]
pub(super) enum Found {
    /// There is no ledger yet.
    Nothing,
    Book(u64, Book),
    /// The file with this number is not a ledger.
    Damaged(u64),
}

/// What came of writing a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrote {
    Yes,
    /// Another member was first.
    Lost,
    /// It was written, perhaps after versions that are gone: the next reading tells.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Chain {
    device: Arc<dyn Device>,
}

impl Chain {
    pub(super) const fn new(device: Arc<dyn Device>) -> Self {
        Self { device }
    }

    /// Returns the directory, for messages.
    pub(super) fn path(&self) -> PathBuf {
        self.device.root().join(LEDGER_DIR)
    }

    fn numbers(&self) -> Result<(Vec<u64>, Vec<String>)> {
        let (mut numbers, mut others) = (Vec::new(), Vec::new());
        self.device.list(Path::new(LEDGER_DIR), &mut |entry| match number_of(&entry.name) {
            Some(number) => numbers.push(number),
            None => others.push(entry.name),
        })?;
        numbers.sort_unstable();
        Ok((numbers, others))
    }

    /// Returns the newest version.
    pub(super) fn read(&self) -> Result<Found> {
        for _ in 0..ATTEMPTS_MAX {
            let Some(number) = self.numbers()?.0.pop() else { return Ok(Found::Nothing) };
            match self.device.read_small(&path_of(number), LEDGER_BYTES_MAX) {
                Ok(Some(bytes)) => {
                    if let Some(version) = later_version(&bytes) {
                        return Err(self.later(version));
                    }
                    return Ok(decode(&bytes, number)
                        .map_or(Found::Damaged(number), |book| Found::Book(number, book)));
                }
                // Removed meanwhile, because there are later ones.
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(Found::Damaged(number)),
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::Busy, "the ledger changes faster than it can be read")
            .with("path", self.path().display()))
    }

    fn later(&self, version: u32) -> Error {
        let what = "a later kvdepot keeps the ledger of this directory: use that version for all depots of it, or stop \
                    them all and remove the ledger";
        Error::new(ErrorKind::Unsupported, what).with("path", self.path().display()).with("version", version)
    }

    /// Checks that a ledger can be kept here. Only what no later attempt can mend is an error.
    pub(super) fn check(&self) -> Result<()> {
        let directory = Path::new(LEDGER_DIR);
        let [one, two, other] = std::array::from_fn(|_| directory.join(temporary_name()));
        let made = self.device.make_dir(directory);
        let linked = made
            .and_then(|()| self.device.write_small(&one, &other, b"can this file have a second name?\n"))
            .and_then(|()| self.device.link_new(&one, &two));
        for path in [&one, &two] {
            let _ = self.device.unlink(path);
        }
        match linked {
            Err(error) if error.kind() == ErrorKind::Unsupported => Err(Error::new(
                ErrorKind::Config,
                "posix_capacity_shared needs a file system with hard links: choose another one for the first of the \
                 directories, or set posix_capacity_shared to false",
            )
            .with("path", self.path().display())
            .with_source(error)),
            // A directory that is full, read-only or out of reach for now.
            _ => Ok(()),
        }
    }

    /// Writes the version after `number`.
    pub(super) fn write(&self, number: u64, book: &Book) -> Result<Wrote> {
        let next = number + 1;
        if next > NUMBER_MAX {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "a ledger has no next number: end all depots, and remove its directory",
            )
            .with("path", self.path().display()));
        }
        let directory = Path::new(LEDGER_DIR);
        let [temporary, other] = std::array::from_fn(|_| directory.join(temporary_name()));
        self.device.make_dir(directory)?;
        self.device.write_small(&temporary, &other, &encode(book, next))?;
        let linked = self.device.link_new(&temporary, &path_of(next));
        // Best effort: the name says whose it is.
        let _ = self.device.unlink(&temporary);
        if !linked? {
            return Ok(Wrote::Lost);
        }
        // What it grants must not outlive it.
        self.device.sync_dir(directory)?;
        // Versions are removed in their order. So if the one before is still there, the next name was free because nobody
        // had used it. Opening the file asks the server, where a listing may be an old one.
        if number >= FIRST && matches!(self.device.read_small(&path_of(number), LEDGER_BYTES_MAX), Ok(None)) {
            return Ok(Wrote::Unknown);
        }
        let (numbers, others) = self.numbers()?;
        self.clear(&numbers, &others);
        Ok(if numbers.last() == Some(&next) { Wrote::Yes } else { Wrote::Unknown })
    }

    /// Removes what nobody needs any more; what cannot be removed stays until the next time.
    fn clear(&self, numbers: &[u64], others: &[String]) {
        let last = numbers.last().copied().unwrap_or(0);
        for number in numbers.iter().filter(|number| **number > FIRST && **number + VERSIONS_KEPT <= last) {
            if self.device.unlink(&path_of(*number)).is_err() {
                break;
            }
        }
        for name in others {
            let Some(writer) = Identity::of_temporary(name) else { continue };
            let path = Path::new(LEDGER_DIR).join(name);
            let is_old = || {
                let stat = self.device.stat(&path).ok().flatten();
                let age = stat.and_then(|stat| SystemTime::now().duration_since(stat.modified).ok());
                age.is_some_and(|age| age >= Duration::from_secs(FOREIGN_TEMPORARY_AGE_S))
            };
            if writer.is_alive().map_or_else(is_old, |is_alive| !is_alive) {
                let _ = self.device.unlink(&path);
            }
        }
    }
}

fn path_of(number: u64) -> PathBuf {
    Path::new(LEDGER_DIR).join(format!("{number:020}"))
}

/// The number in a name; accepts only the spelling that `path_of` writes. Names that kvdepot cannot have written are
/// ignored.
fn number_of(name: &str) -> Option<u64> {
    let number: u64 = name.parse().ok()?;
    (name == format!("{number:020}") && number <= NUMBER_MAX).then_some(number)
}

#[cfg(test)]
mod tests {
    use kvdepot_io::faults::MemoryDevice;

    use super::*;

    #[test]
    fn one_of_two_writers_is_first() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::default());
        let chain = Chain::new(Arc::clone(&device));
        assert!(matches!(chain.read(), Ok(Found::Nothing)));
        let (one, two) = (Book::new(1, 1), Book::new(2, 1));
        assert_eq!(chain.write(0, &one).unwrap(), Wrote::Yes);
        assert_eq!(chain.write(0, &two).unwrap(), Wrote::Lost);
        assert!(matches!(chain.read(), Ok(Found::Book(1, book)) if book == one));
        for number in 1..40 {
            assert_eq!(chain.write(number, &two).unwrap(), Wrote::Yes);
        }
        let (numbers, others) = chain.numbers().unwrap();
        assert_eq!((numbers.len() as u64, others.len(), numbers[0]), (VERSIONS_KEPT + 1, 0, FIRST));
        // Far behind, where the names are free again: the version is no one's successor, and does not count.
        assert_eq!(chain.write(3, &one).unwrap(), Wrote::Unknown);
        assert_eq!(chain.write(0, &one).unwrap(), Wrote::Lost, "a second first ledger");
        assert!(matches!(chain.read(), Ok(Found::Book(40, book)) if book == two));
    }

    #[test]
    fn what_is_no_ledger_is_noticed() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::default());
        let chain = Chain::new(Arc::clone(&device));
        chain.write(0, &Book::new(1, 1)).unwrap();
        device.create_dir(&path_of(2)).unwrap();
        assert!(matches!(chain.read(), Ok(Found::Damaged(2))));
        assert_eq!(chain.write(2, &Book::new(3, 1)).unwrap(), Wrote::Yes);
        for name in ["7", "+0000000000000000007", "99999999999999999999", "000000000000000007x"] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }
}
