//! A depot and its tiers.

#[path = "../common/blocks.rs"]
mod blocks;
#[path = "../../../kvdepot-tier/tests/object/bucket_server/mod.rs"]
mod bucket_server;
#[path = "../common/held_reads.rs"]
mod held_reads;

mod batches;
mod bucket;
mod demotion;
mod epochs;
mod flows;
mod fragments;
mod hot_blocks;
mod misses;
mod namespaces;
mod placement;
mod questions;
mod removals;
mod rows;
mod settling;
mod values;
