//! The vocabulary and the pure decisions of kvdepot: no I/O, no clock, no threads, no unsafe.
#![forbid(unsafe_code)]

pub mod block;
pub mod error;
pub mod eviction;
pub mod hit;
mod ids;
pub mod key;
pub mod layout;
pub mod lease;
pub mod limits;
pub mod machine;
pub mod misses;
pub mod pipeline;
pub mod priority;
pub mod quota;
pub mod regions;
pub mod rendezvous;
pub mod replay;
pub mod runs;
mod split_table;

pub use block::{Block, Phase};
pub use error::{Error, ErrorKind, Result};
pub use eviction::{EvictionPolicy, SlotId};
pub use hit::{GroupShape, HitSearch, longest_hit, needed_blocks};
pub use key::{BlockHash, BlockKey, NamespaceId, NamespaceSpec, VALUES_KIND, epoch_moves, next_epoch};
pub use layout::BlockLayout;
pub use lease::{LeaseId, LeaseTable};
pub use pipeline::{PipelineSpec, PoolKind};
pub use priority::Priority;
pub use quota::Ledger;
pub use regions::{RegionGauge, RegionIndex};
pub use runs::{Run, RunAllocator, Runs};
