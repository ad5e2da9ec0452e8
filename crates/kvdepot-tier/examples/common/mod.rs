//! What the measurements of the Posix tier share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{BlockLayout, Result};
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{PosixConfig, PosixTier};

/// A block file's header.
pub(crate) const HEADER_BYTES: u64 = 4096;
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

/// Returns a new directory's path in the one that the first argument names, and the numbers of the others.
pub(crate) fn arguments<const N: usize>(name: &str, defaults: [u64; N]) -> (PathBuf, [u64; N]) {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let parent = given.first().map_or_else(std::env::temp_dir, PathBuf::from);
    let mut numbers = defaults;
    for (number, text) in numbers.iter_mut().zip(given.iter().skip(1)) {
        *number = text.parse().unwrap_or(*number);
    }
    (parent.join(format!("{name}-{}", std::process::id())), numbers)
}

pub(crate) fn open(config: PosixConfig, block_bytes: u64) -> Result<(Arc<PosixTier>, Bench)> {
    let tier = Arc::new(PosixTier::open(config)?);
    let spec = spec("example", BlockLayout::uniform(1, &[block_bytes])?);
    let bench = Bench::with(Arc::clone(&tier) as _, spec);
    Ok((tier, bench))
}
