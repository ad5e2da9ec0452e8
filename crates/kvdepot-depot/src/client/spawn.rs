//! Starts the node's depot when none answers. A lock file settles races: one starter starts a depot, and a depot that
//! finds another one serving terminates immediately.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags};

/// How long a started depot may take to answer before another one is started.
const START_PATIENCE: Duration = Duration::from_secs(15);
/// Pauses before a depot is started again, doubled each time: one that cannot start would only waste processor time.
const RESTART_MIN: Duration = Duration::from_millis(250);
const RESTART_MAX: Duration = Duration::from_secs(60);

/// Starts depots for one socket.
#[derive(Debug)]
pub(crate) struct Spawner {
    socket: PathBuf,
    command: Vec<String>,
    started: Mutex<Option<Started>>,
}

#[derive(Debug)]
struct Started {
    at: Instant,
    child: Child,
    /// How long to wait before the next start, counted from this one.
    pause: Duration,
}

/// Returns the path of a file next to the socket: `suffix` is `.log` or `.starting`.
fn beside(socket: &Path, suffix: &str) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Removes from a command's environment the service manager's variables for this process. A depot started by an
/// engine's service would speak for that service: its end would look like the engine's end to the manager.
fn of_no_service(command: &mut Command) -> &mut Command {
    for name in ["NOTIFY_SOCKET", "FDSTORE", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        command.env_remove(name);
    }
    command
}

impl Spawner {
    pub(crate) const fn new(socket: PathBuf, command: Vec<String>) -> Self {
        Self { socket, command, started: Mutex::new(None) }
    }

    /// Starts a depot unless this or another process has just started one.
    pub(crate) fn start(&self) {
        let mut started = self.started.lock();
        let mut pause = RESTART_MIN;
        if let Some(last) = started.as_mut() {
            let running = matches!(last.child.try_wait(), Ok(None));
            if last.at.elapsed() < if running { START_PATIENCE } else { last.pause } {
                return;
            }
            pause = (last.pause * 2).min(RESTART_MAX);
        }
        match self.try_start() {
            Ok(Some(child)) => *started = Some(Started { at: Instant::now(), child, pause }),
            Ok(None) => {}
            Err(error) => tracing::warn!("cannot start a depot with {:?}: {error}", self.command),
        }
    }

    /// Notes that a depot answered: if it dies, the next start is immediate.
    pub(crate) fn answered(&self) {
        if let Some(last) = self.started.lock().as_mut() {
            last.pause = RESTART_MIN / 2;
            // Reaps a starter that lost its race.
            let _ = last.child.try_wait();
        }
    }

    fn try_start(&self) -> std::io::Result<Option<Child>> {
        // Does not follow links, and does not wait for the other end of a FIFO.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let open = |path: PathBuf| -> std::io::Result<File> {
            let file =
                OpenOptions::new().create(true).append(true).mode(0o600).custom_flags(flags).open(&path)?;
            if !file.metadata()?.is_file() {
                return Err(std::io::Error::other(format!(
                    "{} is not a regular file: remove it",
                    path.display()
                )));
            }
            Ok(file)
        };
        let lock = open(beside(&self.socket, ".starting"))?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let log = open(beside(&self.socket, ".log"))?;
        let Some((program, arguments)) = self.command.split_first() else { return Ok(None) };
        // A separate process group: a signal that ends the engine's group must not end the node's depot. The child
        // inherits the lock, and so keeps other starters away until it serves or ends. With `--detach` it forks and its
        // child holds the lock; then the process started here ends immediately.
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::from(lock)).stdout(Stdio::from(log.try_clone()?)).stderr(log);
        let child = of_no_service(&mut command).process_group(0).spawn()?;
        tracing::info!("started a depot (pid {}) at {}", child.id(), self.socket.display());
        Ok(Some(child))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_depot_that_an_engine_starts_does_not_speak_for_the_engine_s_service() {
        let mut command = Command::new("env");
        command.env("NOTIFY_SOCKET", "/run/notify").env("LISTEN_FDS", "1").env("KEPT", "yes");
        let said = of_no_service(&mut command).output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("KEPT=yes"));
        assert!(!said.contains("NOTIFY_SOCKET") && !said.contains("LISTEN_FDS"), "{said}");
    }

    #[test]
    fn a_fifo_beside_the_socket_is_an_error_and_does_not_hang() {
        let directory = tempfile::tempdir().unwrap();
        for suffix in [".starting", ".log"] {
            let socket = directory.path().join(suffix);
            let fifo = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, beside(&socket, suffix), fifo, 0o600.into(), 0).unwrap();
            let spawner = Spawner::new(socket, vec!["true".to_owned()]);
            assert!(spawner.try_start().is_err(), "{suffix}");
        }
    }
}
