//! Random numbers for names and seeds.

/// A number that nobody can guess.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's random keys: no crate is worth this.
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
