//! A test of the complete path through the pool, for administrators.

use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::values::Values;

/// Stores, finds and removes a value. Fails if any part of the path through the pool does not work.
pub(super) fn self_test(values: &Values) -> Result<()> {
    let bad = |what: &str| Error::new(ErrorKind::Corrupt, what.to_owned());
    let key = kvdepot_io::random::bytes::<16>()?;
    let hash = Values::hash(&key);
    let mut slot = values.reserve(hash, key.len() as u64)?;
    let mut at = 0;
    for mut piece in slot.io_slices_mut(0, key.len()) {
        let len = piece.len();
        piece.copy_from_slice(&key[at..at + len]);
        at += len;
    }
    slot.publish()?;
    let value =
        values.get(hash, Duration::from_secs(5))?.ok_or_else(|| bad("a value was not found again"))?;
    let same = value.io_slices(0, value.len()).iter().flat_map(|piece| piece.to_vec()).eq(key);
    drop(value);
    values.remove(&[hash]);
    if same { Ok(()) } else { Err(bad("a value came back changed")) }
}
