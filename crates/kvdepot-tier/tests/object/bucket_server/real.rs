//! A real S3 server behind the stand-in's door: requests that no plan refuses are passed on, and so are its answers.
//!
//! It is versitygw, which keeps a bucket as a directory and an object as a file. KVDEPOT_TEST_S3 names its program.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use parking_lot::Mutex;

use super::http::{Request, Response};
use super::{BUCKET, KEY_ID, SECRET, until};

/// Where it keeps what is not yet an object.
const UNFINISHED: &str = ".sgwtmp";

/// The server's directory, and its process while it runs.
pub(super) struct Real {
    home: tempfile::TempDir,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    process: Option<Child>,
    /// A process has a socket of its own: one that was killed leaves its socket behind.
    socket: PathBuf,
    starts: u32,
}

impl Real {
    /// Starts a server with one empty bucket.
    ///
    /// # Panics
    ///
    /// If there is no such program, or it does not listen.
    pub(super) fn start() -> Self {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(home.path().join("buckets").join(BUCKET)).unwrap();
        let real = Self { home, running: Mutex::default() };
        real.come_back();
        real
    }

    /// Starts a process on what earlier ones have stored.
    pub(super) fn come_back(&self) {
        let program = std::env::var_os("KVDEPOT_TEST_S3")
            .expect("KVDEPOT_TEST_S3 names the program of a real S3 server: run make test-s3");
        let mut running = self.running.lock();
        running.starts += 1;
        running.socket = self.home.path().join(format!("{}.sock", running.starts));
        let log = std::fs::File::create(self.home.path().join("log")).unwrap();
        let process = Command::new(&program)
            .args(["--quiet".as_ref(), "--port".as_ref(), running.socket.as_os_str()])
            .args(["posix".as_ref(), self.home.path().join("buckets").as_os_str()])
            .env("ROOT_ACCESS_KEY", KEY_ID)
            .env("ROOT_SECRET_KEY", SECRET)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", Path::new(&program).display()));
        // It is killed with this one, also if it never listens.
        let running = &mut *running;
        let process = running.process.insert(process);
        until("the real server listens", || {
            if let Some(status) = process.try_wait().unwrap() {
                let log = std::fs::read_to_string(self.home.path().join("log")).unwrap_or_default();
                panic!("the real server ended with {status}: {log}");
            }
            UnixStream::connect(&running.socket).is_ok()
        });
    }

    /// Ends it as a crash does, with SIGKILL.
    pub(super) fn kill(&self) {
        if let Some(mut process) = self.running.lock().process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Returns the server's answer to a request, as far as it came; `None` if nothing did.
    pub(super) fn forward(&self, request: &Request) -> Option<Response> {
        let socket = self.running.lock().socket.clone();
        let mut connection = UnixStream::connect(socket).ok()?;
        // What a server that is killed has said before is passed on, too.
        let _ = connection.write_all(&request.head).and_then(|()| connection.write_all(&request.body));
        let mut said = Vec::new();
        let mut piece = vec![0; 64 << 10];
        while let Ok(bytes @ 1..) = connection.read(&mut piece) {
            said.extend_from_slice(&piece[..bytes]);
        }
        Response::passed_on(&said)
    }

    fn bucket(&self) -> PathBuf {
        self.home.path().join("buckets").join(BUCKET)
    }

    /// Returns the names of all objects.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        let mut directories = vec![self.bucket()];
        while let Some(directory) = directories.pop() {
            // Another request may remove it at this moment.
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if entry.file_name() == UNFINISHED {
                    continue;
                }
                if path.is_dir() {
                    directories.push(path);
                } else {
                    names.push(path.strip_prefix(self.bucket()).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        names.sort_unstable();
        names
    }

    /// Returns how many uploads in parts are neither completed nor aborted.
    pub(super) fn uploads(&self) -> usize {
        let of_objects = std::fs::read_dir(self.bucket().join(UNFINISHED).join("multipart"));
        let of_object = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.and_then(|entry| std::fs::read_dir(entry.path())).map_or(0, Iterator::count)
        };
        of_objects.map_or(0, |objects| objects.map(of_object).sum())
    }

    /// Changes the stored bytes of an object, as a failing disk does.
    pub(super) fn change(&self, name: &str, how: impl FnOnce(&mut Vec<u8>)) {
        let path = self.bucket().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        how(&mut bytes);
        // In place: the file keeps its attributes.
        std::fs::write(path, bytes).unwrap();
    }

    pub(super) fn rename(&self, name: &str, to: &str) {
        std::fs::rename(self.bucket().join(name), self.bucket().join(to)).unwrap();
    }

    /// Deletes an object, as a lifecycle rule does.
    pub(super) fn lose(&self, name: &str) {
        std::fs::remove_file(self.bucket().join(name)).unwrap();
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        self.kill();
    }
}
