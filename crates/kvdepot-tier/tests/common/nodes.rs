//! Two nodes that share a directory: two mounts of one NFS server, or the same local directory.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::path::{Path, PathBuf};
use std::process::Command;

use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::{Bench, until};

/// Two nodes as `DIRECTORY:COMMAND,DIRECTORY:COMMAND`: where a node has mounted the shared directory, and what runs a
/// program there.
const NODES: &str = "KVDEPOT_TEST_NODES";
/// The same directory at the server, where nothing is cached.
const SERVER: &str = "KVDEPOT_TEST_SERVER_DIR";

/// A directory as both nodes see it.
pub(crate) struct Shared {
    _local: tempfile::TempDir,
    pub(crate) dirs: [PathBuf; 2],
    runners: [Option<PathBuf>; 2],
    server: Option<PathBuf>,
}

impl Shared {
    pub(crate) fn new() -> Self {
        let Ok(nodes) = std::env::var(NODES) else {
            let local = tempfile::tempdir().unwrap();
            let dir = local.path().to_owned();
            return Self { _local: local, dirs: [dir.clone(), dir], runners: [None, None], server: None };
        };
        let node = |text: &str| {
            let (dir, run) = text.split_once(':').unwrap();
            (PathBuf::from(dir), Some(PathBuf::from(run)))
        };
        let (one, two) = nodes.split_once(',').unwrap();
        let ((one, run_one), (two, run_two)) = (node(one), node(two));
        let local = tempfile::tempdir_in(&one).unwrap();
        let name = local.path().file_name().unwrap().to_owned();
        let server = std::env::var_os(SERVER).map(|server| PathBuf::from(server).join(&name));
        let dirs = [one.join(&name), two.join(&name)];
        let shared = Self { _local: local, dirs, runners: [run_one, run_two], server };
        until("the other node sees a new directory", || shared.dirs[1].is_dir());
        shared
    }

    pub(crate) fn is_mounted_twice(&self) -> bool {
        self.dirs[0] != self.dirs[1]
    }

    /// Whether the nodes share a server, whose disk nothing else uses.
    pub(crate) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    /// Where the directory is seen as it is on the disk.
    pub(crate) fn on_disk(&self) -> &Path {
        self.server.as_ref().unwrap_or(&self.dirs[0])
    }

    /// A command that runs this program on a node.
    pub(crate) fn command(&self, node: usize) -> Command {
        let exe = std::env::current_exe().unwrap();
        self.runners[node].as_ref().map_or_else(
            || Command::new(&exe),
            |run| {
                let mut command = Command::new(run);
                command.arg(&exe);
                command
            },
        )
    }
}

/// A read of either node is the block or a miss.
pub(crate) fn hits(bench: &Bench, n: u64) -> bool {
    match bench.read(n) {
        Ok(bytes) => {
            assert_eq!(bytes, bench.bytes(n), "block {n} came back with other bytes (P1)");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound, "block {n}: {error:?}");
            false
        }
    }
}
