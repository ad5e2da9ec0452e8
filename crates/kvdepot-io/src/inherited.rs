//! Descriptors that whoever started this process left for it, as systemd does: the environment says which
//! (`sd_listen_fds(3)`).

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};

/// The number of the first one.
const FIRST_FD: RawFd = 3;

/// Whether they were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes those whose names begin so, with their names, so that children do not get them any more. None where the environment
/// tells of one that is not there. The first call takes them; later ones get none.
pub fn take(prefix: &str) -> Vec<(String, OwnedFd)> {
    let get = |name: &str| std::env::var(name).unwrap_or_default();
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    let left = left(&get("LISTEN_PID"), &get("LISTEN_FDS"), &get("LISTEN_FDNAMES"), prefix);
    take_all(left)
}

fn take_all(left: Vec<(String, RawFd)>) -> Vec<(String, OwnedFd)> {
    if !left.iter().all(|(_, number)| is_left(*number)) {
        return Vec::new();
    }
    let taken = left.into_iter().map(|(name, number)| {
        // SAFETY: it is open and was so before this program began, which its environment says was left it for its own. It is
        // taken once: a number stands in the environment once, and `TAKEN` lets the first caller read it.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        // One that children inherit is shared with them, and does no other harm.
        let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
        (name, fd)
    });
    taken.collect()
}

/// Names and numbers of the descriptors that an environment tells of.
fn left(pid: &str, count: &str, names: &str, prefix: &str) -> Vec<(String, RawFd)> {
    if pid.parse() != Ok(std::process::id()) {
        return Vec::new();
    }
    let count: usize = count.parse().unwrap_or(0);
    let named = names.split(':').take(count).zip(FIRST_FD..);
    named.filter(|(name, _)| name.starts_with(prefix)).map(|(name, fd)| (name.to_owned(), fd)).collect()
}

/// Whether a descriptor is open that this program did not open: its own ones are all closed by an `exec`, so one that is not
/// came through the one that began it. An environment that is wrong can thus name none that somebody here owns.
fn is_left(number: RawFd) -> bool {
    // SAFETY: a system call that looks at a number.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::{AsRawFd, IntoRawFd};

    use super::*;

    #[test]
    fn only_what_is_named_so_and_meant_for_this_process_is_left_for_it() {
        let own = std::process::id().to_string();
        let names = "web:kvdepot-pool:kvdepot-client-7:stored";
        assert_eq!(
            left(&own, "4", names, "kvdepot-"),
            [("kvdepot-pool".to_owned(), 4), ("kvdepot-client-7".to_owned(), 5)]
        );
        assert_eq!(left(&own, "2", names, "kvdepot-").len(), 1, "the rest is none");
        assert_eq!(left("1", "4", names, "kvdepot-"), [], "another process's");
        assert_eq!(left(&own, "", "", "kvdepot-"), []);
    }

    #[test]
    fn what_was_left_is_taken_and_what_is_somebody_s_here_is_not() {
        let named = |number| vec![("a".to_owned(), number)];
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"left").unwrap();
        assert!(take_all(named(file.as_raw_fd())).is_empty(), "it is this test's");
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        // As if it had come through an exec.
        let number = file.into_raw_fd();
        let both = [named(number), named(1 << 20)].concat();
        assert!(take_all(both).is_empty(), "one is not open, so nothing of it is to be believed");
        let (name, fd) = take_all(named(number)).pop().unwrap();
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        let mut file = std::fs::File::from(fd);
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!((name.as_str(), text.as_str(), flags), ("a", "left", FdFlags::CLOEXEC));
    }
}
