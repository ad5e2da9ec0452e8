//! The configuration of a GPUDirect RDMA engine.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::RcAttributes;
use serde::Deserialize;

use crate::cuda::DeviceSelector;

/// Names the adapter for each device, by the device's number in the process: `mlx5_0,mlx5_1`.
pub const NICS_VARIABLE: &str = "DEVICE_GDR_NICS";
/// Largest number of queue pairs of one lane.
const QUEUE_PAIRS_MAX: usize = 64;

/// Whether to copy through an RDMA adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UseGdr {
    /// No (`use_gdr: false`).
    #[default]
    No,
    /// If everything that it needs is available.
    Auto,
    /// Yes (`use_gdr: true`); anything missing is an error.
    Yes,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct GdrConfig {
    /// The device whose memory is copied.
    pub device: DeviceSelector,
    /// Adapters by the number of the device. If empty, the nearest to the device is used.
    pub nics: Vec<String>,
    /// The adapter's port; `None` for its first active one.
    pub port: Option<u8>,
    /// Index of the port's address in its GID table; `None` to choose one.
    pub gid_index: Option<u8>,
    /// Queue pairs of each direction.
    pub queue_pairs: usize,
    /// How long to wait for a completion before the adapter counts as hung (P2).
    pub timeout: Duration,
    /// Size of one registration of pool memory.
    pub registration_piece_bytes: usize,
    /// How many bytes the process may lock, which bounds the pool; `None` for no limit.
    pub locked_bytes_max: Option<u64>,
    /// The kernel's page size, a power of two. The driver exports whole pages.
    pub page_bytes: u64,
    /// Parameters of the connections.
    pub connection: RcAttributes,
    /// Path of sysfs, which tests replace.
    pub sysfs: PathBuf,
}

impl GdrConfig {
    /// The default configuration, with the adapters that the environment names.
    pub fn new(device: DeviceSelector) -> Self {
        Self {
            device,
            nics: parse_nics(&std::env::var(NICS_VARIABLE).unwrap_or_default()),
            port: None,
            gid_index: None,
            queue_pairs: 4,
            timeout: Duration::from_secs(10),
            registration_piece_bytes: 256 << 20,
            locked_bytes_max: kvdepot_verbs::locked_bytes_max(),
            page_bytes: kvdepot_io::aligned::page_bytes() as u64,
            connection: RcAttributes::default(),
            sysfs: PathBuf::from("/sys"),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=QUEUE_PAIRS_MAX).contains(&self.queue_pairs) {
            return Err(Error::new(ErrorKind::Config, "a wrong number of queue pairs for GPUDirect RDMA")
                .with("queue_pairs", self.queue_pairs)
                .with("queue_pairs_max", QUEUE_PAIRS_MAX));
        }
        if self.registration_piece_bytes == 0 {
            return Err(Error::new(ErrorKind::Config, "memory cannot be registered in pieces of no bytes"));
        }
        if !self.page_bytes.is_power_of_two() {
            return Err(Error::new(ErrorKind::Config, "the bytes of a page are not a power of two")
                .with("page_bytes", self.page_bytes));
        }
        Ok(())
    }
}

/// Parses the list of adapters in the environment.
pub(crate) fn parse_nics(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
