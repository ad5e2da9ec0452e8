//! The process at the other end of a connection: whose it is, and whether it has exited, so that the kernel has released
//! everything that it had.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::seqpacket::SeqPacket;
use kvdepot_io::socket::{peer_pidfd, peer_process};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// `PF_EXITING` of the kernel's `include/linux/sched.h`: the task has begun to exit.
const PF_EXITING: u32 = 0x4;

/// The state of a process that has not been seen to exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// At least one of its threads runs or can run.
    Running,
    /// All of its threads are exiting: the kernel is releasing its resources.
    Exiting,
    /// Not visible from here, for example a process in another container.
    Unknown,
}

/// The process at the other end of a connection. A trait for the sake of tests.
pub(crate) trait Peer: Send + Debug {
    /// Returns a descriptor that becomes readable when the process has exited; `None` if its exit cannot be watched.
    /// The kernel reports an exit after it has closed the process's files and run their `release`, so a device's driver
    /// has stopped its copies by then.
    fn exit(&self) -> Option<BorrowedFd<'_>>;

    /// Returns the state of the process while `exit` is not readable.
    fn activity(&self) -> Activity;

    /// Returns whether the process has said that none of its copies concerns the session any more.
    fn copies_ended(&self) -> bool {
        false
    }
}

/// A process of this machine.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Option<Pid>,
    pidfd: Option<OwnedFd>,
}

impl Process {
    /// Makes a process that another depot watched. Only its exit is known.
    pub(crate) const fn watched(pidfd: Option<OwnedFd>) -> Self {
        Self { pid: None, pidfd }
    }

    /// Returns its pid, if it is visible from here.
    pub(crate) const fn pid(&self) -> Option<Pid> {
        self.pid
    }

    /// Returns the pid of its pidfd, unless it has exited.
    pub(crate) fn pid_of_pidfd(&self) -> Option<Pid> {
        let fd = rustix::fd::AsRawFd::as_raw_fd(self.pidfd.as_ref()?);
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        Pid::from_raw(line.trim().parse().ok().filter(|&pid| pid > 0)?)
    }

    /// Returns whether its exit has been reported.
    pub(crate) fn has_exited(&self) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        self.exit().is_some_and(|exit| {
            let mut polled = [PollFd::from_borrowed_fd(exit, PollFlags::IN)];
            matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1..))
        })
    }

    /// Returns whether it is the calling process.
    pub(crate) fn is_this(&self) -> bool {
        self.pid == Some(rustix::process::getpid())
    }

    /// Returns the peer of a connection that was just accepted.
    pub(crate) fn of(socket: &SeqPacket) -> Self {
        let pid = peer_process(socket.as_fd());
        let pidfd = match peer_pidfd(socket.as_fd()) {
            Ok(pidfd) => Some(pidfd),
            Err(_) => pid.and_then(|pid| opened_by_pid(socket, pid)),
        };
        Self { pid, pidfd }
    }
}

/// Fails unless the peer belongs to this process's user. A pool is only handed over within one user, because its
/// content is trusted and the socket stays that user's.
pub(crate) fn ensure_own_user(connection: BorrowedFd<'_>, what: &str) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(connection)
        .map_err(|e| Error::io("cannot tell whose process the other one is", e.into()))?
        .uid;
    let own = rustix::process::geteuid();
    if peer == own {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Permission, what.to_owned())
        .with("uid", own.as_raw())
        .with("other_uid", peer.as_raw()))
}

/// Opens a pidfd by number. A process that has exited may have left its pid to another one, but then its connection was
/// closed before.
fn opened_by_pid(socket: &SeqPacket, pid: Pid) -> Option<OwnedFd> {
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    (!socket.hung_up()).then_some(pidfd)
}

impl Peer for Process {
    fn exit(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    fn activity(&self) -> Activity {
        self.pid.and_then(threads).map_or(Activity::Unknown, |threads| {
            if threads.iter().all(|flags| flags & PF_EXITING != 0) {
                Activity::Exiting
            } else {
                Activity::Running
            }
        })
    }
}

/// Returns the kernel's flags of each thread of a process; `None` if it has none or is not visible.
fn threads(process: Pid) -> Option<Vec<u32>> {
    let tasks = PathBuf::from(format!("/proc/{}/task", process.as_raw_nonzero()));
    let stats = std::fs::read_dir(tasks).ok()?.flatten();
    // A thread that has ended meanwhile has no line any more.
    let lines = stats.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    let flags: Vec<u32> = lines.filter_map(|line| flags(&line)).collect();
    (!flags.is_empty()).then_some(flags)
}

/// Returns the ninth field of a line of `/proc/*/stat`, counted from the end of the name, which can contain anything.
fn flags(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::event::{Timespec, poll};

    use super::*;

    #[test]
    fn flags_stand_behind_a_name_that_may_hold_anything() {
        assert_eq!(flags("7 (a) S 1 (b) R 1 2 3 4 5 4194308 6"), Some(4_194_308));
        assert_eq!(flags("7 (kvdepot) S 1 2"), None);
    }

    /// A child that has not been waited for is a zombie: all of it is exiting, and its pidfd is readable.
    #[test]
    fn a_process_is_running_then_exiting_then_gone() {
        let mut child = Command::new("sh").args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let process = Process { pid: Some(pid), pidfd: Some(pidfd_open(pid, PidfdFlags::empty()).unwrap()) };
        assert_eq!(process.activity(), Activity::Running);
        child.kill().unwrap();
        let long = Timespec { tv_sec: 60, tv_nsec: 0 };
        let exit = process.exit().unwrap();
        assert_eq!(poll(&mut [PollFd::from_borrowed_fd(exit, PollFlags::IN)], Some(&long)), Ok(1));
        assert_eq!(process.activity(), Activity::Exiting);
        child.wait().unwrap();
        assert_eq!(process.activity(), Activity::Unknown);
    }
}
