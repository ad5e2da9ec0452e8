//! How many bytes a tier may take, and how many its directories may already hold.

use std::path::Path;
use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockHash, Result};
use kvdepot_io::{Device, DeviceSpace};

use super::checkpoint::CHECKPOINT_NAME;
use super::config::PosixConfig;
use super::state::Prior;
use super::total;

/// The cap in bytes, 0 = none: as configured, or a share of the file systems on which the directories lie.
pub(super) fn cap(config: &PosixConfig, devices: &[Arc<dyn Device>]) -> Result<u64> {
    if config.capacity_bytes > 0 || config.capacity_percent == 0 {
        return Ok(config.capacity_bytes);
    }
    let bytes = file_systems(devices)?.values().map(|space| space.total_bytes).sum::<u64>();
    let share = bytes / 100 * config.capacity_percent;
    Ok((share / BLOCK_ALIGN_BYTES * BLOCK_ALIGN_BYTES).max(BLOCK_ALIGN_BYTES))
}

/// Returns what bounds the bytes in the directories before they have been counted.
pub(super) fn prior(config: &PosixConfig, devices: &[Arc<dyn Device>], cap: u64) -> Prior {
    let own = cap > 0 && !config.shared;
    let recorded = if own { total::read(devices) } else { None };
    let set = recorded.map_or_else(|| BlockHash(kvdepot_io::random::id()), |(_, set)| set);
    if !own && let Err(error) = total::remove(devices) {
        tracing::warn!(%error, "a recorded total that is not kept true any more cannot be removed");
    }
    if cap == 0 {
        return Prior { bound: None, total: None, set };
    }
    // Everything in use there, which is at least what is ours.
    let used = used_bytes(devices);
    let bound = match recorded {
        Some((total, _)) => Some(used.map_or(total, |used| used.min(total))),
        // Other nodes may have filled the directories, but only up to the cap.
        None if config.shared && has_checkpoint(devices) => Some(used.map_or(cap, |used| used.min(cap))),
        None => used,
    };
    let total = own.then(|| recorded.map_or(0, |(total, _)| total));
    Prior { bound: bound.map(|bound| bound.min(cap)), total, set }
}

/// Returns what is in use on the file systems of the directories, by anyone.
pub(super) fn used_bytes(devices: &[Arc<dyn Device>]) -> Option<u64> {
    file_systems(devices).ok().map(|found| found.values().map(|space| space.used_bytes).sum())
}

fn has_checkpoint(devices: &[Arc<dyn Device>]) -> bool {
    devices.iter().any(|device| device.stat(Path::new(CHECKPOINT_NAME)).is_ok_and(|stat| stat.is_some()))
}

fn file_systems(devices: &[Arc<dyn Device>]) -> Result<HashMap<u64, DeviceSpace>> {
    devices.iter().map(|device| device.space().map(|space| (space.file_system, space))).collect()
}
