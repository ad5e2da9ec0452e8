//! Random numbers of the operating system, for names, ids, seeds and nonces.

use std::hash::{BuildHasher, Hasher, RandomState};

use kvdepot_core::{Error, Result};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Returns unpredictable bytes. Blocks only in the first moments after boot.
///
/// # Errors
/// `Io` if the system has none.
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    let (mut out, mut filled) = ([0; N], 0);
    while filled < N {
        match getrandom(&mut out[filled..], GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::io("the system has no random numbers", error.into())),
        }
    }
    Ok(out)
}

/// Returns an unpredictable number, for what only has to differ from others. Never fails.
pub fn number() -> u64 {
    // The standard library draws its keys once a thread, and a forked process has those of its parent.
    bytes().map_or_else(|_| RandomState::new().build_hasher().finish(), u64::from_le_bytes)
}

/// Returns an unpredictable id, like [`number`].
pub fn id() -> [u8; 16] {
    (u128::from(number()) << 64 | u128::from(number())).to_le_bytes()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use super::*;

    #[test]
    fn all_bytes_are_drawn_and_no_two_draws_are_equal() {
        // More than the kernel returns at once before it is seeded, and more than a page.
        let draws: Vec<[u8; 5000]> = (0..3).map(|_| bytes().unwrap()).collect();
        assert!(draws.iter().all(|draw| draw[4984..] != [0; 16]), "the end is drawn, too");
        assert!(draws[0] != draws[1] && draws[1] != draws[2]);
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| id()).collect();
        assert_eq!(ids.len(), 1000);
        assert_eq!(bytes::<0>().unwrap(), [0; 0]);
    }
}
