//! The configuration of a depot. The Python face parses and checks the user's files and passes the result as JSON.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, POOL_BYTES_MIN};
use kvdepot_core::machine::{Placement, WriteWhen};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_tier::registry::TIERS;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::pool::{NumaPlacement, POPULATE_THREADS_MAX};

/// Configuration of one depot. Unknown keys are errors (P10).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepotConfig {
    /// Pool and tiers in order: `Cache|Posix`.
    pub pipeline: String,
    /// Size of the pool in bytes (P5).
    pub pool_bytes: u64,
    /// Size that the pool may grow to; 0 = it does not grow.
    #[serde(default)]
    pub pool_bytes_max: u64,
    /// Size of one step of growth.
    #[serde(default = "default_pool_grow_bytes")]
    pub pool_grow_bytes: u64,
    /// Eviction policy of the pool: `s3fifo`, `lru` or `lhd`.
    #[serde(default = "default_eviction")]
    pub eviction: String,
    /// Number of tasks that may be queued in a client before new ones are refused.
    #[serde(default = "default_waiting_queue_depth")]
    pub waiting_queue_depth: usize,
    /// Number of shards that may be in flight in a client.
    #[serde(default = "default_running_queue_depth")]
    pub running_queue_depth: usize,
    /// Longest wait of any operation before it is a miss (P2).
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// How long a terminating depot writes dirty blocks. Blocks left after that are lost.
    #[serde(default = "default_drain_timeout_ms")]
    pub drain_timeout_ms: u64,
    /// Whether the pool's memory is touched in the background at start.
    #[serde(default = "default_populate")]
    pub populate: bool,
    /// Number of threads that touch it; 0 = half of the processors, 8 at most.
    #[serde(default)]
    pub pool_populate_threads: usize,
    /// Whether the pool's memory is locked: never swapped out.
    #[serde(default)]
    pub pool_mlock: bool,
    /// How long the pool's memory waits for a next depot after a crash of this one; 0 = it is not kept.
    #[serde(default)]
    pub pool_keep_ms: u64,
    /// Command of the process that keeps the pool.
    #[serde(default)]
    pub pool_keeper: Vec<String>,
    /// NUMA nodes of the pool's memory: `auto` or a list such as `0,2-3`, with a region on each, or `interleave`.
    #[serde(default = "default_pool_numa")]
    pub pool_numa: String,
    /// Number of lost blocks whose fate is remembered, in 16 bytes each; 0 = none.
    #[serde(default = "default_evicted_blocks_remembered")]
    pub evicted_blocks_remembered: usize,
    /// Port of HTTP for metrics; 0 = any free port. Without it there is none.
    #[serde(default)]
    pub metrics_port: Option<u16>,
    /// Listening address of that port.
    #[serde(default = "default_metrics_host")]
    pub metrics_host: IpAddr,
    /// File with the secret for what that port tells of the depot's state.
    #[serde(default)]
    pub metrics_token_file: Option<PathBuf>,
    /// For tests: NUMA nodes that the machine is assumed to have. Their memory is that of its first node.
    #[serde(default)]
    pub numa_nodes: Option<Vec<u32>>,
    /// Which blocks a tier gets and when, by the tier's name in the pipeline. Other tiers are written through.
    #[serde(default)]
    pub placement: BTreeMap<String, PlacementConfig>,
    /// Settings of tiers by their names in the pipeline, parsed by their registry entries. In the JSON text they are
    /// next to the other keys, each under its tier's name in lower case.
    #[serde(skip)]
    pub tiers: BTreeMap<&'static str, Value>,
}

/// Which blocks a tier gets, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementConfig {
    /// When it gets dumped blocks.
    pub write: WriteConfig,
    /// Whether it also gets blocks that were read from a tier below it.
    pub promote: bool,
    /// Bytes that it is given a day at most; 0 = no limit.
    pub write_bytes_per_day: u64,
}

/// When a tier gets dumped blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteConfig {
    /// Immediately.
    #[default]
    Through,
    /// When they are used a second time.
    OnSecondUse,
    /// Before the pool evicts them.
    WhenCold,
    /// Before a tier above it evicts them.
    OnDemotion,
}

impl PlacementConfig {
    fn placement(self) -> Placement {
        let write = match self.write {
            WriteConfig::Through => WriteWhen::Through,
            WriteConfig::OnSecondUse => WriteWhen::OnSecondUse,
            WriteConfig::WhenCold => WriteWhen::WhenCold,
            WriteConfig::OnDemotion => WriteWhen::OnDemotion,
        };
        Placement { write, promote: self.promote }
    }
}

fn default_eviction() -> String {
    "lhd".to_owned()
}
const fn default_waiting_queue_depth() -> usize {
    8192
}
const fn default_running_queue_depth() -> usize {
    524_288
}
const fn default_pool_grow_bytes() -> u64 {
    10 << 30
}
const fn default_evicted_blocks_remembered() -> usize {
    1 << 18
}
const fn default_timeout_ms() -> u64 {
    30_000
}
const fn default_drain_timeout_ms() -> u64 {
    30_000
}
const fn default_metrics_host() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}
fn default_pool_numa() -> String {
    "auto".to_owned()
}
const fn default_populate() -> bool {
    true
}

impl DepotConfig {
    /// Parses and checks the JSON text.
    pub fn from_json(text: &str) -> Result<Self> {
        let unreadable = |e: serde_json::Error| {
            Error::new(ErrorKind::Config, "the depot's configuration cannot be read").with_source(e)
        };
        let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(unreadable)?;
        let settings = TIERS.into_iter().filter_map(|tier| Some((tier.name, keys.remove(&tier.key())?)));
        let tiers = settings.collect();
        let config: Self = serde_json::from_value(Value::Object(keys)).map_err(unreadable)?;
        let mut config = Self { tiers, ..config };
        if config.pool_bytes < POOL_BYTES_MIN {
            return Err(Error::new(ErrorKind::Config, "the pool is too small")
                .with("pool_bytes", config.pool_bytes)
                .with("pool_bytes_min", POOL_BYTES_MIN));
        }
        NumaPlacement::parse(&config.pool_numa)?;
        if config.pool_populate_threads > POPULATE_THREADS_MAX {
            return Err(Error::new(ErrorKind::Config, "too many threads to populate the pool")
                .with("pool_populate_threads", config.pool_populate_threads)
                .with("threads_max", POPULATE_THREADS_MAX));
        }
        config.pool_bytes -= config.pool_bytes % BLOCK_ALIGN_BYTES;
        config.pool_bytes_max -= config.pool_bytes_max % BLOCK_ALIGN_BYTES;
        config.pool_grow_bytes = config.pool_grow_bytes.next_multiple_of(BLOCK_ALIGN_BYTES);
        for (name, value) in [
            ("timeout_ms", config.timeout_ms),
            ("waiting_queue_depth", config.waiting_queue_depth as u64),
            ("running_queue_depth", config.running_queue_depth as u64),
        ] {
            if value == 0 {
                return Err(Error::new(ErrorKind::Config, "this value must be at least 1").with("key", name));
            }
        }
        Ok(config)
    }

    /// Returns the placements of the pipeline's tiers, in their order.
    pub fn placements(&self, pool: PoolKind, tiers: &[&str]) -> Result<Vec<Placement>> {
        let wrong = |what: &str, tier: &str| {
            Error::new(ErrorKind::Config, what.to_owned())
                .with("key", "placement")
                .with("tier", tier)
                .with("pipeline", &self.pipeline)
        };
        for (name, placement) in &self.placement {
            if !tiers.contains(&name.as_str()) {
                return Err(wrong("a placement names a tier that is not in the pipeline", name));
            }
            if pool == PoolKind::Staging && placement.write != WriteConfig::Through {
                return Err(wrong(
                    "a Staging pool keeps nothing that could be written later: write through, or use a Cache pool",
                    name,
                ));
            }
            if placement.write == WriteConfig::OnDemotion && tiers.first() == Some(&name.as_str()) {
                return Err(wrong(
                    "no tier is above this one that could evict blocks: write through, or when cold",
                    name,
                ));
            }
        }
        Ok(tiers
            .iter()
            .map(|&name| self.placement.get(name).copied().unwrap_or_default().placement())
            .collect())
    }

    /// Returns the bytes that each of the pipeline's tiers is given a day at most; 0 = no limit.
    pub fn write_budgets(&self, tiers: &[&str]) -> Vec<u64> {
        tiers
            .iter()
            .map(|&name| self.placement.get(name).map_or(0, |tier| tier.write_bytes_per_day))
            .collect()
    }

    /// Returns whether the pool only passes blocks on to its tiers.
    pub fn passes_through(&self) -> bool {
        self.pipeline.split('|').next().map(str::trim) != Some(PoolKind::Cache.as_str())
    }

    /// Returns the number of mapped bytes: the pool's initial size or its maximum.
    pub fn mapped_bytes(&self) -> u64 {
        self.pool_bytes.max(self.pool_bytes_max)
    }

    /// Returns the deadline of an operation that begins now.
    pub fn deadline(&self) -> std::time::Instant {
        std::time::Instant::now() + std::time::Duration::from_millis(self.timeout_ms)
    }
}
