//! What an engine sees of a depot: attachments, claims, dumps and loads.

#[path = "../common/held_reads.rs"]
mod held_reads;
#[path = "../common/scripted.rs"]
mod scripted;

mod attach;
mod claims;
mod device_memory;
mod ending;
mod engine_end;
mod hangs;
mod held_device;
mod in_place;
mod kept_engine;
mod layers;
mod load_ahead;
mod queue_depth;
mod reattach;
mod shards;
mod staging;
