//! Socket options that no library in use offers.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::Pid;

/// Makes a socket readable only when this number of bytes has arrived or its peer has closed (SO_RCVLOWAT). The default
/// is 1.
///
/// Linux enlarges the receive buffer accordingly, within its limits, and wakes the reader earlier if the buffer is
/// full. A read takes whatever has arrived in any case.
pub fn set_low_water(socket: BorrowedFd<'_>, bytes: usize) -> Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed, and the kernel reads `length` bytes of a value that
    // lives during the call.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            length,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// The socket option of the same name, Linux 6.5 and later, as most architectures number it.
const SO_PEERPIDFD: libc::c_int = 77;

/// Returns a pidfd of the process at the other end of a unix socket: the one that connected or that listened. It refers
/// to that very process even if the pid is reused, and works across containers.
pub fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut pidfd: libc::c_int = -1;
    let mut length = size_of_val(&pidfd) as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed, and the kernel writes at most `length` bytes into a
    // plain number that lives during the call.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 || pidfd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel made this descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Returns the process at the other end of a unix socket: the one that listened or that connected. `None` if it is not
/// visible from here, for example in another container.
pub fn peer_process(socket: BorrowedFd<'_>) -> Option<Pid> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed, and the kernel writes at most `length` bytes into a
    // value of plain numbers that lives during the call.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if outcome == 0 { Pid::from_raw(peer.pid) } else { None }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, there)
    }

    fn is_readable(socket: &TcpStream, wait_ms: i64) -> bool {
        let wait = Timespec { tv_sec: wait_ms / 1000, tv_nsec: wait_ms % 1000 * 1_000_000 };
        poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait)).unwrap() > 0
    }

    #[test]
    fn a_reader_is_woken_by_enough_or_by_the_end() {
        let (mut here, mut there) = pair();
        set_low_water(here.as_fd(), 1000).unwrap();
        there.write_all(&[7; 999]).unwrap();
        assert!(!is_readable(&here, 20), "999 bytes are not enough");
        there.write_all(&[7; 1]).unwrap();
        assert!(is_readable(&here, 60_000));
        let mut room = [0; 600];
        here.read_exact(&mut room).unwrap();
        assert!(!is_readable(&here, 0), "400 bytes are left");
        drop(there);
        assert!(is_readable(&here, 60_000), "more will not come");
        let mut rest = Vec::new();
        here.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), 400);
    }

    #[test]
    fn a_peer_is_the_process_that_listened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peer.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let here = UnixStream::connect(&path).unwrap();
        assert_eq!(peer_process(here.as_fd()), Some(rustix::process::getpid()));
        let (tcp, _there) = pair();
        assert_eq!(peer_process(tcp.as_fd()), None);
    }

    #[test]
    fn a_running_peer_s_pidfd_is_not_readable() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peer.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let _here = UnixStream::connect(&path).unwrap();
        let (there, _) = listener.accept().unwrap();
        // Kernels before 6.5 do not know the option; callers do without it then.
        let Ok(pidfd) = peer_pidfd(there.as_fd()) else { return };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)), Ok(0), "this process runs");
        let (tcp, _there) = pair();
        assert!(peer_pidfd(tcp.as_fd()).is_err());
    }

    #[test]
    fn a_lower_mark_wakes_for_what_has_come_before() {
        let (here, mut there) = pair();
        set_low_water(here.as_fd(), 1000).unwrap();
        there.write_all(&[7; 10]).unwrap();
        assert!(!is_readable(&here, 20));
        set_low_water(here.as_fd(), 1).unwrap();
        assert!(is_readable(&here, 60_000));
    }
}
