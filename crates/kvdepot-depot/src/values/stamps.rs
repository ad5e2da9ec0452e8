//! Stamps: if a crash leaves two values under one key, the one with the larger stamp is the later one.
//!
//! A stamp consists of 32 bits that no earlier process used, above a counter. The tiers store these 32 bits as the
//! epoch of a separate namespace. They follow the clock, in steps of 2^32 ns, and still increase when the clock goes
//! back.

use std::time::Duration;

use kvdepot_core::{BlockLayout, NamespaceSpec, Result};

use crate::direct::Direct;

const COUNTER_BITS: u32 = 32;

/// The namespace whose epoch gives the high bits of the stamps. It has no blocks.
fn spec() -> Result<NamespaceSpec> {
    let facts = serde_json::json!({"kind": "kvdepot value stamps", "format": 1});
    NamespaceSpec::new(&facts.to_string(), BlockLayout::uniform(1, &[1])?)
}

/// Returns the first stamp of a process. Without tiers nothing outlives a process, and the clock is enough.
pub(super) fn first(direct: &Direct, since_1970: Duration) -> u64 {
    let now = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
    if !direct.has_tiers() {
        return now;
    }
    stored(direct, now).unwrap_or_else(|error| {
        tracing::warn!(
            %error,
            "no tier could store this process's start number: if the clock was set back and the previous process was \
             killed while it replaced a value, the old value may be found again"
        );
        now
    })
}

fn stored(direct: &Direct, now: u64) -> Result<u64> {
    let open = direct.open_namespace(spec()?.canonical())?;
    let clock = u32::try_from(now >> COUNTER_BITS).unwrap_or(u32::MAX);
    if open.epoch < clock {
        direct.set_epoch(open.handle, clock)?;
    }
    // Unique among all processes, even those that start at the same moment.
    let epoch = direct.advance(open.handle)?.epoch;
    Ok(u64::from(epoch) << COUNTER_BITS)
}
