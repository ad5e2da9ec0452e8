//! Descriptors that a process was started with, by whoever started it.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};

/// Whether they were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes open descriptors by their numbers, so that children do not get them any more. The caller knows that whoever started
/// this process left them for it, as the environment of a service says. The first call takes them; later ones get none.
pub fn take(numbers: &[RawFd]) -> Vec<OwnedFd> {
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    numbers.iter().filter_map(|&number| take_one(number)).collect()
}

fn take_one(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: a system call that looks at a number.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, was left for this process, and is taken once: nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // One that children inherit is shared with them, and does no other harm.
    let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
    Some(fd)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn what_is_open_is_taken_once() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"left").unwrap();
        let number = file.into_raw_fd();
        let taken = take(&[number, -1, 1 << 20]);
        assert_eq!(taken.len(), 1);
        assert!(take(&[number]).is_empty());
        let mut file = std::fs::File::from(taken.into_iter().next().unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "left");
    }
}
