//! Depots and clients in separate processes: the test binary itself, started again in a role that its `role_main`
//! carries out.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use kvdepot_depot::client::Attachment;
use kvdepot_depot::seqpacket::SeqPacket;

use super::LONG;

pub(crate) const ROLE: &str = "KVDEPOT_TEST_ROLE";
pub(crate) const DIRECTORY: &str = "KVDEPOT_TEST_DIRECTORY";
/// The arguments that make the test binary run only `role_main`.
pub(crate) const ROLE_MAIN: [&str; 4] = ["--exact", "role_main", "--nocapture", "--test-threads=1"];

/// Returns the role of this process, and its directory.
pub(crate) fn own_role() -> Option<(String, PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, PathBuf::from(std::env::var(DIRECTORY).unwrap())))
}

/// A process in a role; killed when dropped.
pub(crate) struct Role(pub(crate) Child);

impl Role {
    pub(crate) fn start(role: &str, directory: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::spawn(command.args(ROLE_MAIN), role, directory)
    }

    /// Starts it through a command that runs this binary in the end.
    pub(crate) fn spawn(command: &mut Command, role: &str, directory: &Path) -> Self {
        command.env(ROLE, role).env(DIRECTORY, directory).stdin(Stdio::null()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Waits for a line with this word.
    pub(crate) fn says(&mut self, word: &str) {
        let mut lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(word)), "the process ends without a {word}");
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits for its end. Returns whether it succeeded.
    pub(crate) fn ends(&mut self) -> bool {
        until("the process ends", || self.has_ended());
        self.0.wait().unwrap().success()
    }

    /// Kills it by SIGKILL and waits for its end.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Stops a depot that checks for this file, and waits for its end.
    pub(crate) fn end(mut self, directory: &Path) {
        std::fs::write(directory.join("end"), "").unwrap();
        assert!(self.ends(), "{}", log(directory));
        std::fs::remove_file(directory.join("end")).unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::yield_now();
    }
}

pub(crate) fn socket(directory: &Path) -> PathBuf {
    directory.join("d.sock")
}

/// Returns the log of the depots of a directory.
pub(crate) fn log(directory: &Path) -> String {
    std::fs::read_to_string(directory.join("log")).unwrap_or_default()
}

/// Attaches to the depot that is started there.
pub(crate) fn attach(directory: &Path) -> Arc<Attachment> {
    let socket = socket(directory);
    until("a depot answers", || SeqPacket::connect(&socket).is_ok());
    let attachment = Attachment::connect(socket, None, LONG, LONG).unwrap();
    assert!(attachment.attached(), "no depot answers: {}", log(directory));
    attachment
}

/// Returns a number of the depot's statistics.
pub(crate) fn stat(attachment: &Arc<Attachment>, name: &str) -> u64 {
    let mut value = None;
    until("the depot says how it is", || {
        value = attachment.stats()["depot"][name].as_u64();
        value.is_some()
    });
    value.unwrap()
}

/// Waits until every block has a record in the ledger.
pub(crate) fn proven(attachment: &Arc<Attachment>) {
    until("every block has a record", || stat(attachment, "ledger_unproven_blocks") == 0);
}
