//! Safe RDMA verbs over a libibverbs loaded at run time, so that builds and machines without RDMA need nothing.
//!
//! [`Verbs`] is the library, a [`Device`] one of its devices, a [`Context`] an open device. [`Pd`], [`Mr`], [`Cq`],
//! [`Srq`] and [`Qp`] are made on it and keep their dependencies alive, so they can be dropped in any order. Queue
//! pairs are reliable connections; callers exchange the [`Endpoint`] of both ends themselves. Requests are posted in
//! lists ([`SendList`], [`RecvList`]) and complete in a completion queue, which is polled or waited for.
//!
//! Registration decides which memory a device may access: [`Mr::register`] is the unsafe step and carries the contract.
//! Posting is safe, because the device checks every address of a request against the regions.

mod buffer;
mod completion;
mod connect;
mod context;
mod cq;
mod device;
mod failure;
mod port;
mod qp;
mod region;
pub mod sys;
mod table;
mod work;

pub use buffer::Buffer;
pub use completion::{Completion, Done, WcStatus};
pub use connect::{Endpoint, RcAttributes};
pub use context::{Context, DeviceLimits, Pd};
pub use cq::{CompletionChannel, Cq};
pub use device::{Device, Verbs};
pub use failure::{MemoryOf, check_locked, locked_bytes_max};
pub use port::{Gid, GidType, LinkLayer, Port, PortChoice};
pub use qp::{PostError, Qp, QpConfig, QpState, Srq};
pub use region::{Access, Mr};
pub use work::{Flags, Operation, Payload, RecvList, Remote, SendList, Sge};
