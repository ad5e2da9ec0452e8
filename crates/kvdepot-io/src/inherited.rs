//! Descriptors inherited from the process that started this one, such as systemd, and named in the environment
//! (`sd_listen_fds(3)`).

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};

/// The number of the first descriptor.
const FIRST_FD: RawFd = 3;

/// Whether the descriptors were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the descriptors whose names have this prefix, and marks them close-on-exec. Returns them with their names, or
/// nothing if the environment names one that is not open. Only the first call returns any.
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
        // SAFETY: it was open before this program began, and the environment passes it to this process. It is taken
        // once: a number occurs once in the environment, and only the first caller gets past `TAKEN`.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        // A failure only means that children inherit the descriptor.
        let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
        (name, fd)
    });
    taken.collect()
}

/// Returns the names and numbers of the descriptors in an environment.
fn left(pid: &str, count: &str, names: &str, prefix: &str) -> Vec<(String, RawFd)> {
    if pid.parse() != Ok(std::process::id()) {
        return Vec::new();
    }
    let count: usize = count.parse().unwrap_or(0);
    let named = names.split(':').take(count).zip(FIRST_FD..);
    named.filter(|(name, _)| name.starts_with(prefix)).map(|(name, fd)| (name.to_owned(), fd)).collect()
}

/// Returns whether a descriptor is open and was inherited. This program's own descriptors are all close-on-exec, so one
/// that is not was passed by the parent. A wrong environment can therefore not name a descriptor with an owner in this
/// process.
fn is_left(number: RawFd) -> bool {
    // SAFETY: a system call that only examines a number.
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
        // As if it had been passed through an exec.
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
