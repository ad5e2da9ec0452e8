//! The configuration of a wire door.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_wire::own::Token;
use serde::Deserialize;

use super::rdma::config::RdmaConfig;
use crate::http::token;

/// The longest wait for a value from a tier.
pub(super) const GET_WAIT: Duration = Duration::from_secs(10);

/// Configuration of a wire door. Unknown keys are errors (P10).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireConfig {
    /// Listening address, for both ports.
    #[serde(default = "default_host")]
    pub host: IpAddr,
    /// Port of the wire door; 0 = any free port.
    pub service_port: u16,
    /// Port of the HTTP management; 0 = any free port. Without it there is none.
    #[serde(default)]
    pub manage_port: Option<u16>,
    /// File with the secret shared by clients.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// PEM files of the certificate chain and the private key. If set, both ports speak only TLS.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Minimum number of bytes that a value takes in the pool.
    #[serde(default = "default_value_bytes_min")]
    pub value_bytes_min: u64,
    /// Background eviction.
    #[serde(default)]
    pub evict: EvictConfig,
    /// Limit of concurrent connections (P7).
    #[serde(default = "default_connections_max")]
    pub connections_max: usize,
    /// How long a peer may stall in the middle of a message (P2).
    #[serde(default = "default_stall_timeout_ms")]
    pub stall_timeout_ms: u64,
    /// How long a put waits for space before it is refused.
    #[serde(default = "default_put_wait_ms")]
    pub put_wait_ms: u64,
    /// How long a request waits for tiers before it is answered, except for a get, whose client says how long it waits.
    #[serde(default = "default_answer_wait_ms")]
    pub answer_wait_ms: u64,
    /// How long a closing door lets requests in flight continue.
    #[serde(default = "default_drain_ms")]
    pub drain_ms: u64,
    /// RDMA in addition to TCP, if set.
    #[serde(default)]
    pub rdma: Option<RdmaConfig>,
    /// Number of threads that serve connections; 0 = number of processors, up to eight.
    #[serde(default)]
    pub threads: usize,
}

/// Files for TLS.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// PEM file of the certificate chain, the server's own first.
    pub certificate_file: PathBuf,
    /// PEM file of its private key.
    pub key_file: PathBuf,
}

/// Background eviction: evicts down to `min_percent` whenever more than `max_percent` of the pool are in use.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictConfig {
    /// Whether it is enabled.
    pub periodic: bool,
    /// How often usage is checked.
    pub interval_ms: u64,
    /// Usage of the pool at which eviction stops.
    pub min_percent: f64,
    /// Usage of the pool above which eviction starts.
    pub max_percent: f64,
}

impl Default for EvictConfig {
    fn default() -> Self {
        Self { periodic: false, interval_ms: 5_000, min_percent: 60.0, max_percent: 80.0 }
    }
}

const fn default_host() -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)
}
const fn default_value_bytes_min() -> u64 {
    64 << 10
}
const fn default_connections_max() -> usize {
    4096
}
const fn default_stall_timeout_ms() -> u64 {
    10_000
}
const fn default_put_wait_ms() -> u64 {
    1_000
}
/// Half of the silence after which our clients take a server for lost by default: a tier that hangs must not take the pool
/// away from them (P2).
const fn default_answer_wait_ms() -> u64 {
    1_000
}
const fn default_drain_ms() -> u64 {
    5_000
}

impl WireConfig {
    /// Parses and checks the JSON text.
    pub fn from_json(text: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(text).map_err(|e| {
            Error::new(ErrorKind::Config, "the network listener's configuration cannot be read")
                .with_source(e)
        })?;
        let bad = |what: &str| Error::new(ErrorKind::Config, what.to_owned());
        let evict = &config.evict;
        let ordered = 0.0 <= evict.min_percent && evict.min_percent < evict.max_percent;
        if !ordered || evict.max_percent > 100.0 || evict.interval_ms == 0 {
            return Err(bad(
                "eviction goes from a larger share of the pool to a smaller one, at some interval",
            )
            .with("min_percent", evict.min_percent)
            .with("max_percent", evict.max_percent)
            .with("interval_ms", evict.interval_ms));
        }
        if config.connections_max == 0 || config.stall_timeout_ms == 0 {
            return Err(bad("the network listener needs at least one connection, and some patience"));
        }
        if let Some(rdma) = &config.rdma {
            rdma.check()?;
        }
        Ok(config)
    }

    /// Returns the secret from its file.
    pub(super) fn token(&self) -> Result<Option<Token>> {
        self.token_file.as_deref().map(token::read).transpose()
    }

    /// Returns how long a peer may stall in the middle of a message.
    pub(super) const fn stall(&self) -> Duration {
        Duration::from_millis(self.stall_timeout_ms)
    }

    /// Returns the number of serving threads.
    pub(super) fn worker_threads(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        if self.threads == 0 { processors.clamp(2, 8) } else { self.threads.min(64) }
    }
}
