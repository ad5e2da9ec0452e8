//! The configuration of RDMA at the wire door.

use std::path::PathBuf;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{LinkLayer, PortChoice};
use serde::Deserialize;

/// Largest number of threads that serve RDMA.
const THREADS_MAX: usize = 16;
/// Smallest receive: fits a request with one key of any usual length.
const RECEIVE_BYTES_MIN: usize = 1 << 10;
/// Smallest limit of a connection's outstanding work requests.
const WORK_REQUESTS_MIN: u32 = 4;
/// Range of the wait for an acknowledgement, as powers of two.
const ACK_TIMEOUTS: std::ops::RangeInclusive<u8> = 1..=31;
/// Memory is registered in whole pages.
const PAGE_BYTES: u64 = 4096;

/// RDMA at a wire door. Unknown keys are errors (P10).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RdmaConfig {
    /// Name of the device. Default: the first one with a suitable port.
    #[serde(default)]
    pub device: Option<String>,
    /// Number of the port, from 1.
    #[serde(default)]
    pub port: Option<u8>,
    /// The required link layer of the port.
    #[serde(default)]
    pub link: Option<Link>,
    /// Index of the port's address in its table.
    #[serde(default)]
    pub gid_index: Option<u8>,
    /// The libibverbs to use. Default: the system's.
    #[serde(default)]
    pub library: Option<PathBuf>,
    /// Number of threads that serve all connections; each has its own queues and receives.
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// Number of receives shared by the connections of one thread.
    #[serde(default = "default_receives")]
    pub receives: u32,
    /// Longest request. A longer one ends its connection.
    #[serde(default = "default_receive_bytes")]
    pub receive_bytes: usize,
    /// Limit of outstanding work requests of one connection.
    #[serde(default = "default_work_requests_max")]
    pub work_requests_max: u32,
    /// How long the device waits for a client's acknowledgement before it retransmits: 4.096 us times two to this
    /// power. Slow or lossy networks need more than the protocol's 14.
    #[serde(default = "default_ack_timeout")]
    pub ack_timeout: u8,
    /// Bytes of the pool in one registration.
    #[serde(default = "default_region_bytes")]
    pub region_bytes: u64,
}

/// The link layer of a port, as InfiniStore spells it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum Link {
    /// InfiniBand.
    #[serde(rename = "IB")]
    InfiniBand,
    /// RoCE.
    Ethernet,
}

const fn default_threads() -> usize {
    1
}
const fn default_receives() -> u32 {
    64
}
const fn default_receive_bytes() -> usize {
    kvdepot_wire::limits::INFINI_BODY_BYTES_MAX
}
const fn default_work_requests_max() -> u32 {
    256
}
const fn default_ack_timeout() -> u8 {
    14
}
const fn default_region_bytes() -> u64 {
    1 << 30
}

impl RdmaConfig {
    pub(in crate::wire) fn check(&self) -> Result<()> {
        let whole_pages = self.region_bytes > 0 && self.region_bytes.is_multiple_of(PAGE_BYTES);
        let fits = (1..=THREADS_MAX).contains(&self.threads)
            && self.receives > 0
            && self.receive_bytes >= RECEIVE_BYTES_MIN
            && self.work_requests_max >= WORK_REQUESTS_MIN
            && ACK_TIMEOUTS.contains(&self.ack_timeout)
            && self.port != Some(0);
        if whole_pages && fits {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Config,
            "RDMA needs 1 to 16 threads, receives of at least 1024 bytes, at least 4 work requests, an ack_timeout of 1 \
             to 31, regions of whole pages, and ports count from 1",
        )
        .with("threads", self.threads)
        .with("receives", self.receives)
        .with("receive_bytes", self.receive_bytes)
        .with("work_requests_max", self.work_requests_max)
        .with("ack_timeout", self.ack_timeout)
        .with("region_bytes", self.region_bytes))
    }

    pub(super) fn choice(&self) -> PortChoice {
        PortChoice {
            device: self.device.clone(),
            port: self.port,
            gid_index: self.gid_index,
            link: self.link.map(|link| match link {
                Link::InfiniBand => LinkLayer::InfiniBand,
                Link::Ethernet => LinkLayer::Ethernet,
            }),
        }
    }
}
