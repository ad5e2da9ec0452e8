//! Stamps: of two values under one key, which only a crash can leave, the larger stamp is the later value.
//!
//! A stamp is 32 bits that no earlier process used, and a counter below them. The tiers store these 32 bits as the epoch
//! of a namespace of its own. They follow the clock, in steps of 2^32 ns, and move on when the clock went back.

use std::time::Duration;

use kvdepot_core::{BlockLayout, NamespaceSpec, Result};

use crate::direct::Direct;

const COUNTER_BITS: u32 = 32;

/// The namespace whose epoch the stamps begin with. It has no blocks.
fn spec() -> Result<NamespaceSpec> {
    let facts = serde_json::json!({"kind": "kvdepot value stamps", "format": 1});
    NamespaceSpec::new(&facts.to_string(), BlockLayout::uniform(1, &[1])?)
}

/// The first stamp of a process. Without tiers nothing outlives a process, and the clock will do.
pub(super) fn first(direct: &Direct, since_1970: Duration) -> u64 {
    let now = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
    if !direct.has_tiers() {
        return now;
    }
    stored(direct, now).unwrap_or_else(|error| {
        tracing::warn!(
            %error,
            "no tier stores that this process began: if the clock went back since the last one, and that one was killed \
             while it replaced a value, the value before may be found"
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
    // One that no other process has, also of those that begin at this moment.
    let epoch = direct.advance(open.handle)?.epoch;
    Ok(u64::from(epoch) << COUNTER_BITS)
}
