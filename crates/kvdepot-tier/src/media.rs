//! What a tier's medium is and holds, found without changing it: for `kvdepot doctor`. What a tier would refuse when it is
//! opened is the same error here.

use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::Value;

use crate::{DaxConfig, DaxTier, SlabConfig, SlabTier};

/// A medium that its tier would take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MediumFacts {
    /// Where it lies.
    pub kind: MediumKind,
    /// Bytes that the tier would use of it.
    pub bytes: u64,
    /// Bytes that it was formatted for; `None`: it is empty, and the tier formats it.
    pub formatted_bytes: Option<u64>,
}

/// Where a medium lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MediumKind {
    /// A DAX character device.
    DaxDevice,
    /// A block device.
    BlockDevice,
    /// A regular file.
    File,
    /// Nowhere yet: the tier creates the file.
    Missing,
}

/// How long a lock may be held by the threads of a tier that is being dropped, or by another look.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// Looks at the medium of the tier with this name and these settings. Takes its lock for a moment, so `Busy` means that
/// another process uses it.
pub fn inspect(tier: &str, config: &Value) -> Result<MediumFacts> {
    match tier {
        "Dax" => DaxTier::inspect(&DaxConfig { lock_wait: LOCK_WAIT, ..DaxConfig::from_json(config)? }),
        "Slab" => SlabTier::inspect(&SlabConfig { lock_wait: LOCK_WAIT, ..SlabConfig::from_json(config)? }),
        _ => Err(Error::new(ErrorKind::Unsupported, "a tier without a medium").with("tier", tier)),
    }
}
