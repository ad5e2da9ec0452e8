//! The client of a depot: attachment, claims, and stores that dump and load.

pub mod attach;
mod attached_pool;
mod attaching;
mod calls;
pub mod claim;
mod closing;
pub mod device;
mod devices;
mod dump;
mod executor;
pub mod follow;
mod generation;
mod lane;
mod lane_guard;
mod layer_dump;
mod load;
mod next_depot;
mod partial;
pub mod plan;
mod slots;
mod spawn;
mod starved;
pub mod store;
pub mod task;
mod tier_memory;
mod work;

pub use attach::{Attachment, QueueDepths};
pub use claim::{Claim, ClaimGroupSpec};
pub use device::DeviceEngine;
pub use follow::{Delta, Followed, Follower, FollowerState};
pub use plan::PageTable;
pub use store::{LayerDump, Store};
pub use task::TaskState;
pub use work::Kept;

pub use crate::task_line::Operation;
