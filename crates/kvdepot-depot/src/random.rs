//! Random numbers for names and seeds.

/// Returns an unpredictable number.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's random keys: not worth another crate.
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
