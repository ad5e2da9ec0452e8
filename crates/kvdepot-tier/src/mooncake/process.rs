//! The helper's process: started, listened to, killed when it hangs, started again.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{MOONCAKE_PENDING_MAX, MOONCAKE_RESTART_MS, MOONCAKE_SETUP_MS, MOONCAKE_TICK_MS};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::SharedMemory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::config::MooncakeConfig;
use super::link::Link;
use super::protocol::{Frames, MooncakeAnswer, PROTOCOL, Setup, encode};

/// Source of the helper, which runs in the interpreter that has Mooncake; kvdepot need not be installed there.
const SOURCE: &str = include_str!("../../../../python/kvdepot/mooncake_helper.py");
/// Reads the source from standard input and runs it. The directory that the depot runs in is no place for modules.
const LOADER: &str = "import os, sys\n\
    sys.path[:] = [path for path in sys.path if path]\n\
    def read(count, got=b''):\n\
    \x20   while len(got) < count:\n\
    \x20       some = os.read(0, count - len(got))\n\
    \x20       if not some: os._exit(0)\n\
    \x20       got += some\n\
    \x20   return got\n\
    source = read(int.from_bytes(read(4), 'little'))\n\
    exec(compile(source, 'kvdepot-mooncake-helper', 'exec'))";
/// Longest wait of a send: the helper reads all the time.
const SEND_PATIENCE: Duration = Duration::from_secs(2);
const READ_BYTES: usize = 64 << 10;

/// A running helper.
#[derive(Debug)]
pub struct MooncakeHelper {
    /// The tier's end of the connection.
    pub socket: UnixStream,
    /// Its process.
    pub process: Box<dyn HelperProcess>,
}

/// The process of a helper.
pub trait HelperProcess: Send + std::fmt::Debug {
    /// Ends it, and returns when it can no longer touch the staging memory.
    fn end(&mut self);
}

/// Starts a helper with this staging memory.
pub type HelperStarter = Arc<dyn Fn(&Arc<SharedMemory>) -> Result<MooncakeHelper> + Send + Sync>;

#[derive(Debug)]
struct Python {
    child: Child,
}

impl HelperProcess for Python {
    fn end(&mut self) {
        // The kernel reports the end when the last thread is gone, and with it the mapping.
        let _ = self.child.kill();
        if let Err(error) = self.child.wait() {
            tracing::warn!(%error, pid = self.child.id(), "cannot wait for the Mooncake tier's helper");
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the starter of the helper that users have.
pub(super) fn starter(config: &MooncakeConfig) -> HelperStarter {
    let config = config.clone();
    Arc::new(move |memory| start(&config, memory))
}

fn start(config: &MooncakeConfig, memory: &Arc<SharedMemory>) -> Result<MooncakeHelper> {
    let (ours, theirs) = UnixStream::pair()
        .map_err(|e| Error::io("cannot make a socket for the Mooncake tier's helper", e))?;
    let mut command = Command::new(&config.python);
    command.args(["-c", LOADER, "kvdepot-mooncake-helper"]);
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::piped());
    for name in ["NOTIFY_SOCKET", "FDSTORE", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        command.env_remove(name);
    }
    if std::env::var_os("GLOG_minloglevel").is_none() {
        command.env("GLOG_minloglevel", "1");
    }
    // A signal to the engine's group must not end it.
    let mut child = command.process_group(0).spawn().map_err(|e| {
        Error::io("cannot start the Mooncake tier's helper: mooncake_python names no interpreter", e)
            .with("python", &config.python)
    })?;
    if let Some(errors) = child.stderr.take() {
        let listener = std::thread::Builder::new().name("kvdepot-moon-log".to_owned());
        if let Err(error) = listener.spawn(move || relay(errors)) {
            tracing::debug!(%error, "the messages of the Mooncake tier's helper are not read");
        }
    }
    tracing::debug!(pid = child.id(), python = %config.python, "started the Mooncake tier's helper");
    let helper = MooncakeHelper { socket: ours, process: Box::new(Python { child }) };
    let source = [&(SOURCE.len() as u32).to_le_bytes()[..], SOURCE.as_bytes()].concat();
    let setup = encode(&Setup {
        protocol: PROTOCOL,
        bytes: memory.bytes(),
        config_path: config.config_path.as_deref(),
        replicas: config.replicas,
        threads: MOONCAKE_PENDING_MAX,
    })?;
    let failed = |e| Error::io("cannot talk to the Mooncake tier's helper", e);
    bound(&helper.socket, SEND_PATIENCE).map_err(failed)?;
    std::io::Write::write_all(&mut &helper.socket, &source).map_err(failed)?;
    send_with(&helper.socket, &setup, memory).map_err(failed)?;
    Ok(helper)
}

fn bound(socket: &UnixStream, patience: Duration) -> std::io::Result<()> {
    socket.set_write_timeout(Some(patience))?;
    socket.set_read_timeout(Some(Duration::from_millis(MOONCAKE_TICK_MS)))
}

/// Sends a frame with the memory's descriptor.
fn send_with(socket: &UnixStream, frame: &[u8], memory: &SharedMemory) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [memory.fd()];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(std::io::Error::other("no room for a descriptor beside the frame"));
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut ancillary, SendFlags::NOSIGNAL)?;
    std::io::Write::write_all(&mut &*socket, &frame[sent..])
}

/// Relays what the helper and Mooncake print.
fn relay(mut errors: impl Read) {
    let (mut buffer, mut line) = ([0; 4096], Vec::new());
    while let Ok(count) = errors.read(&mut buffer) {
        if count == 0 {
            break;
        }
        for &byte in &buffer[..count] {
            if byte == b'\n' || line.len() >= buffer.len() {
                tracing::debug!(target: "kvdepot_tier::mooncake", "{}", String::from_utf8_lossy(&line));
                line.clear();
            } else {
                line.push(byte);
            }
        }
    }
}

/// Returns the pause before the next start, from the last one and how long the helper was up since.
fn next_pause(last: Option<Duration>, up: Duration) -> Duration {
    let (shortest, longest) = MOONCAKE_RESTART_MS;
    let (shortest, longest) = (Duration::from_millis(shortest), Duration::from_millis(longest));
    match last {
        // A helper that ends soon after each start is a failure like one that does not start.
        Some(last) if up < longest => (last * 2).min(longest),
        _ => shortest,
    }
}

/// Keeps a helper running until the tier ends.
pub(super) fn supervise(link: &Link, memory: &Arc<SharedMemory>, starter: &HelperStarter) {
    let mut last_pause = None;
    while !link.is_stopping() {
        let (error, up) = match starter(memory) {
            Ok(mut helper) => {
                let (error, up) = listen(link, &helper.socket);
                link.went_down(&error);
                helper.process.end();
                (error, up)
            }
            Err(error) => {
                link.went_down(&error);
                (error, Duration::ZERO)
            }
        };
        link.died();
        if link.is_stopping() {
            break;
        }
        let pause = next_pause(last_pause, up);
        last_pause = Some(pause);
        tracing::warn!(%error, pause_ms = pause.as_millis() as u64, "the Mooncake tier gives misses until its helper is up again");
        if link.stops_within(pause) {
            break;
        }
    }
    link.died();
}

/// Receives answers until the helper must be ended. Returns the reason, and how long it was up.
fn listen(link: &Link, socket: &UnixStream) -> (Error, Duration) {
    let mut up_since = None;
    let ended = receive(link, socket, &mut up_since);
    let up = up_since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
    (ended.unwrap_or_else(|| Error::new(ErrorKind::Closed, "the tier is closing")), up)
}

fn receive(link: &Link, socket: &UnixStream, up_since: &mut Option<Instant>) -> Option<Error> {
    let io = |e| Some(Error::io("cannot read from the Mooncake tier's helper", e));
    if let Err(error) = bound(socket, SEND_PATIENCE) {
        return io(error);
    }
    let callers = match socket.try_clone() {
        Ok(stream) => Arc::new(stream),
        Err(error) => return io(error),
    };
    let until = Instant::now() + Duration::from_millis(MOONCAKE_SETUP_MS);
    let (mut frames, mut buffer) = (Frames::default(), vec![0; READ_BYTES]);
    loop {
        if link.is_stopping() {
            return None;
        }
        let now = Instant::now();
        if up_since.is_none() && now > until {
            let what = "the Mooncake tier's helper did not connect to Mooncake in time";
            return Some(Error::new(ErrorKind::Timeout, what).with("timeout_ms", MOONCAKE_SETUP_MS));
        }
        if link.is_hung(now) {
            let what = "a call of Mooncake hangs: its process is ended and started again";
            return Some(Error::new(ErrorKind::Timeout, what));
        }
        match Read::read(&mut &*socket, &mut buffer) {
            Ok(0) => {
                return Some(Error::new(
                    ErrorKind::Unavailable,
                    "the Mooncake tier's helper ended by itself",
                ));
            }
            Ok(count) => frames.push(&buffer[..count]),
            Err(e) if is_nothing(&e) => continue,
            Err(e) => return io(e),
        }
        loop {
            let answer = match frames.next() {
                Ok(Some(answer)) => answer,
                Ok(None) => break,
                Err(error) => return Some(error),
            };
            let heard =
                if up_since.is_some() { link.answered(answer) } else { begin(link, &callers, answer) };
            if let Err(error) = heard {
                return Some(error);
            }
            up_since.get_or_insert(now);
        }
    }
}

/// Takes the answer to the setup.
fn begin(link: &Link, callers: &Arc<UnixStream>, answer: MooncakeAnswer) -> Result<()> {
    if let Some(text) = answer.error {
        return Err(Error::new(ErrorKind::Unavailable, "the Mooncake tier's helper cannot start")
            .with("because", text));
    }
    if answer.id != 0 {
        return Err(Error::new(ErrorKind::Protocol, "the Mooncake tier's helper answered before its setup"));
    }
    tracing::info!(master = %answer.master, mooncake = %answer.version, "the Mooncake tier is connected");
    link.came_up(Arc::clone(callers), answer.master);
    Ok(())
}

fn is_nothing(e: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(e.kind(), Interrupted | TimedOut | WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_starts_grow_until_a_helper_stays_up() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        let mut pauses = Vec::new();
        for up in [Duration::ZERO, second, second, second, second, second, second, hour, second] {
            pauses.push(next_pause(pauses.last().copied(), up));
        }
        let pauses: Vec<_> = pauses.iter().map(Duration::as_millis).collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 10_000, 200, 400]);
    }
}
