//! The Slab tier passes the conformance suite of all tiers, on files or on a block device: see [`super::media`].
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;

use kvdepot_tier::{SlabConfig, SlabTier, Tier, conformance};

use crate::media::{MIB, Media};

fn open(config: SlabConfig) -> Arc<dyn Tier> {
    Arc::new(SlabTier::open(config).unwrap())
}

#[test]
fn slab() {
    let media = Media::new();
    conformance::check(&|| open(media.next(128 * MIB)));
}

#[test]
fn slab_that_does_not_wait_for_syncs_with_one_thread_of_each_kind() {
    let media = Media::new();
    conformance::check(&|| {
        open(SlabConfig { durable: false, read_threads: 1, write_threads: 1, ..media.next(128 * MIB) })
    });
}

#[test]
fn slab_is_persistent() {
    for durable in [true, false] {
        let media = Media::new();
        let medium = media.next(128 * MIB);
        conformance::check_persistent_alone(&|| open(SlabConfig { durable, ..medium.clone() }));
    }
}

#[test]
fn slab_reports_what_it_will_evict() {
    let media = Media::new();
    conformance::check_cooling(&|blocks| {
        open(SlabConfig { segment_bytes: MIB, ..media.next(blocks * (16 << 10)) })
    });
}
