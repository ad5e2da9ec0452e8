//! A log file of bounded size. When it is full it is renamed to `NAME.1`, `NAME.1` to `NAME.2`, and so on; the oldest
//! is deleted. A path that is not a regular file (`/dev/null`, `/dev/stderr`, a pipe, a link) is only appended to and
//! never replaced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvdepot_core::{Error, Result};

/// The current file and its limits.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    max_bytes: u64,
    max_files: u32,
    file: File,
    bytes: u64,
}

impl LogFile {
    /// Opens a file to append to. There is no limit if `max_bytes` is 0 or it is not a regular file.
    pub(super) fn open(path: &Path, max_bytes: u64, max_files: u32) -> Result<Self> {
        let opened = open(path, 0).and_then(|file| {
            let is_file = file.metadata()?.is_file() && fs::symlink_metadata(path)?.is_file();
            Ok((file.metadata()?.len(), if is_file { max_bytes } else { 0 }, file))
        });
        let (bytes, max_bytes, file) =
            opened.map_err(|e| Error::io("cannot open the log file", e).with("path", path.display()))?;
        Ok(Self { path: path.to_owned(), max_bytes, max_files: max_files.max(1), file, bytes })
    }

    /// Rotates the files. A depot that finds another one serving writes to the same file; the later of the two finds it
    /// renamed already.
    fn begin_next(&mut self) -> io::Result<()> {
        let own = self.file.metadata()?;
        let is_renamed = fs::symlink_metadata(&self.path)
            .map_or(true, |there| (there.dev(), there.ino()) != (own.dev(), own.ino()));
        if !is_renamed {
            self.bytes = own.len();
            if self.max_files == 1 {
                self.bytes = 0;
                return self.file.set_len(0);
            }
            for number in (1..self.max_files - 1).rev() {
                // Gaps are harmless.
                let _ = fs::rename(numbered(&self.path, number), numbered(&self.path, number + 1));
            }
            if let Err(error) = fs::rename(&self.path, numbered(&self.path, 1)) {
                // The limit still holds.
                self.file.set_len(0)?;
                self.bytes = 0;
                return Err(error);
            }
        }
        // Opened carefully, because another file may be there by now: links are not followed, and a pipe without a
        // reader does not block.
        let next = open(&self.path, libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
        let facts = next.metadata()?;
        if !facts.is_file() {
            return Err(io::Error::other("the log's path is not a file"));
        }
        self.bytes = facts.len();
        self.file = next;
        Ok(())
    }
}

impl Write for LogFile {
    /// Writes a complete line, so that a file ends with one.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.max_bytes > 0 && self.bytes > 0 && self.bytes + line.len() as u64 > self.max_bytes {
            // If no new file can be begun, the line goes to the old one.
            let _ = self.begin_next();
        }
        self.file.write_all(line)?;
        self.bytes += line.len() as u64;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).custom_flags(flags).open(path)
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(directory: &Path) -> Vec<(String, String)> {
        let mut files: Vec<_> = fs::read_dir(directory)
            .expect("directory")
            .map(|entry| entry.expect("entry"))
            .map(|entry| {
                let name = entry.file_name().into_string().expect("name");
                (name, fs::read_to_string(entry.path()).expect("text"))
            })
            .collect();
        files.sort();
        files
    }

    fn write(log: &mut LogFile, lines: std::ops::Range<u32>) {
        for line in lines {
            log.write_all(format!("line {line:02}\n").as_bytes()).expect("written");
        }
    }

    fn file(name: &str, lines: &[u32]) -> (String, String) {
        (name.to_owned(), lines.iter().map(|line| format!("line {line:02}\n")).collect())
    }

    #[test]
    fn files_are_bounded_in_size_and_number_and_lines_are_never_cut() {
        let directory = tempfile::tempdir().expect("directory");
        let mut log = LogFile::open(&directory.path().join("log"), 17, 3).expect("open");
        write(&mut log, 0..9);
        let whole = [file("log", &[8]), file("log.1", &[6, 7]), file("log.2", &[4, 5])];
        assert_eq!(read(directory.path()), whole);
    }

    #[test]
    fn a_file_that_is_there_is_appended_to_and_counts() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("log");
        write(&mut LogFile::open(&path, 17, 2).expect("open"), 0..2);
        write(&mut LogFile::open(&path, 17, 2).expect("open"), 2..3);
        assert_eq!(read(directory.path()), [file("log", &[2]), file("log.1", &[0, 1])]);
    }

    #[test]
    fn one_file_alone_begins_again() {
        let directory = tempfile::tempdir().expect("directory");
        write(&mut LogFile::open(&directory.path().join("log"), 17, 1).expect("open"), 0..3);
        assert_eq!(read(directory.path()), [file("log", &[2])]);
    }

    #[test]
    fn two_writers_of_one_file_rename_it_once() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("log");
        let mut first = LogFile::open(&path, 17, 3).expect("open");
        let mut second = LogFile::open(&path, 17, 3).expect("open");
        write(&mut second, 0..2);
        write(&mut first, 2..5);
        // Full by its own count, but its file has been renamed by now.
        write(&mut second, 5..6);
        let names: Vec<_> = read(directory.path()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["log", "log.1"]);
        assert_eq!(read(directory.path())[0], file("log", &[4, 5]));
    }

    #[test]
    fn a_file_that_cannot_be_renamed_stays_bounded() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("log");
        // A directory with content cannot be replaced by a file.
        fs::create_dir_all(numbered(&path, 1).join("x")).expect("directory");
        let mut log = LogFile::open(&path, 17, 2).expect("open");
        write(&mut log, 0..40);
        assert!(fs::metadata(&path).expect("log").len() <= 17);
    }

    #[test]
    fn what_is_no_regular_file_is_never_renamed() {
        let directory = tempfile::tempdir().expect("directory");
        let at = |name: &str| directory.path().join(name);
        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo");
        assert!(made.success());
        let _reader = OpenOptions::new().read(true).write(true).open(at("pipe")).expect("reader");
        fs::write(at("plain"), "").expect("file");
        std::os::unix::fs::symlink("/dev/null", at("null")).expect("link");
        std::os::unix::fs::symlink(at("plain"), at("link")).expect("link");
        for name in ["pipe", "null", "link"] {
            let before = fs::symlink_metadata(at(name)).expect("there");
            write(&mut LogFile::open(&at(name), 17, 3).expect("open"), 0..40);
            let after = fs::symlink_metadata(at(name)).expect("there");
            assert_eq!((after.ino(), after.mode()), (before.ino(), before.mode()), "{name}");
        }
        assert_eq!(fs::read_dir(directory.path()).expect("directory").count(), 4);
        assert_eq!(fs::metadata(at("plain")).expect("there").len(), 40 * 8, "all lines are there");
    }

    #[test]
    fn a_link_that_was_put_in_the_place_of_the_file_is_not_followed() {
        let directory = tempfile::tempdir().expect("directory");
        let (path, victim) = (directory.path().join("log"), directory.path().join("victim"));
        let mut log = LogFile::open(&path, 17, 3).expect("open");
        write(&mut log, 0..2);
        fs::rename(&path, directory.path().join("moved")).expect("renamed");
        fs::write(&victim, "").expect("file");
        std::os::unix::fs::symlink(&victim, &path).expect("link");
        write(&mut log, 2..5);
        assert_eq!(fs::read_to_string(&victim).expect("victim"), "");
        assert!(fs::symlink_metadata(&path).expect("there").is_symlink());
    }

    #[test]
    fn without_a_bound_it_grows() {
        let directory = tempfile::tempdir().expect("directory");
        let mut log = LogFile::open(&directory.path().join("log"), 0, 3).expect("open");
        write(&mut log, 0..99);
        assert_eq!(read(directory.path()).len(), 1);
    }
}
