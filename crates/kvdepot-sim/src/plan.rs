//! Plans: a seed determines the sizes of the world, the faults that may happen, and the operations of the run.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Placement, WriteWhen};

use crate::rng::Rng;

/// Maximum number of regions of a simulated pool.
pub(crate) const REGIONS_MAX: usize = 3;

/// Something that may happen in a run. Shrinking disables features one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
#[repr(u32)]
pub enum Feature {
    FullDisk,
    LostBlocks,
    CorruptReads,
    Hangs,
    ReadErrors,
    WriteErrors,
    StoredErrors,
    ProbeErrors,
    StaleAnswers,
    InlineEnds,
    Crashes,
    TakeOvers,
    Kills,
    Resets,
    Removals,
    Values,
    Claims,
    Loads,
    Prefetches,
    Evictions,
    Drains,
    Expiries,
    ShyTiers,
    SmallSteps,
    Nonsense,
    Forgetting,
    KeptPools,
    RemovalErrors,
    Wishes,
    /// Dumps have priorities.
    Priorities,
    Crowds,
    Leases,
    Choices,
}

/// All features, in the order in which shrinking tries to disable them.
pub const FEATURES: [Feature; 33] = [
    Feature::Choices,
    Feature::Leases,
    Feature::Crowds,
    Feature::Wishes,
    Feature::Priorities,
    Feature::KeptPools,
    Feature::RemovalErrors,
    Feature::Forgetting,
    Feature::Crashes,
    Feature::TakeOvers,
    Feature::FullDisk,
    Feature::LostBlocks,
    Feature::CorruptReads,
    Feature::Hangs,
    Feature::ReadErrors,
    Feature::WriteErrors,
    Feature::StoredErrors,
    Feature::ProbeErrors,
    Feature::StaleAnswers,
    Feature::InlineEnds,
    Feature::Kills,
    Feature::Resets,
    Feature::Removals,
    Feature::Values,
    Feature::Claims,
    Feature::Loads,
    Feature::Prefetches,
    Feature::Evictions,
    Feature::Drains,
    Feature::Expiries,
    Feature::ShyTiers,
    Feature::SmallSteps,
    Feature::Nonsense,
];

/// A set of features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// Returns whether a feature is enabled.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u32) != 0
    }

    /// Returns the set without a feature.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(1 << feature as u32))
    }

    /// Returns the names of the enabled features.
    pub fn names(self) -> Vec<String> {
        FEATURES.iter().filter(|&&f| self.has(f)).map(|f| format!("{f:?}")).collect()
    }
}

/// A tier's properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierShape {
    /// Its capacity in pages.
    pub pages: usize,
    /// Whether it usually needs I/O to tell which blocks it has.
    pub shy: bool,
    /// Which blocks it gets, and when.
    pub placement: Placement,
    /// Bytes that it is given a day at most; 0 = no limit.
    pub write_bytes_per_day: u64,
}

/// A tier that leases blocks in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lender {
    /// Its place among the tiers.
    pub tier: usize,
    /// Size of its memory in pages.
    pub pages: usize,
    /// Pages of the unit in which it allocates that.
    pub unit_pages: usize,
}

/// Properties that do not change in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tiers, fastest first.
    pub tiers: Vec<TierShape>,
    /// The tier that leases blocks in its memory, if one does.
    pub lender: Option<Lender>,
    /// Pages of the pool.
    pub pool_pages: usize,
    /// Pages that it may grow to.
    pub pool_pages_max: usize,
    /// Pages of each of its regions.
    pub regions: Vec<usize>,
    /// Name of the eviction policy.
    pub policy: &'static str,
    /// Whether blocks stay in the pool.
    pub keeps: bool,
    /// Number of clients at a time.
    pub clients: usize,
    /// Number of prompts.
    pub prompts: usize,
    /// Number of hash units of a prompt.
    pub prompt_units: usize,
    /// Number of namespaces that the depot may know, in runs that forget any.
    pub namespaces_max: usize,
}

/// A run's plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed that it was made from.
    pub seed: u64,
    /// Sizes of the world.
    pub shape: Shape,
    /// Enabled features.
    pub features: Features,
    /// One random seed for each operation.
    pub ops: Vec<u64>,
}

/// Maximum number of operations of a plan.
pub const OPS_MAX: usize = 900;

/// Draws a tier's budget of written bytes: mostly none, else an hour's bytes are a few blocks.
fn budget(rng: &mut Rng, more: &mut Rng) -> u64 {
    let pages_per_hour = rng.between(4, 60) as u64;
    if rng.chance(8) | more.chance(12) { pages_per_hour * BLOCK_ALIGN_BYTES * 24 } else { 0 }
}

/// Draws when a tier is given a block: mostly at once.
fn drawn_write(rng: &mut Rng) -> WriteWhen {
    let all = [WriteWhen::Through, WriteWhen::OnSecondUse, WriteWhen::WhenCold, WriteWhen::OnDemotion];
    all[rng.below(5).saturating_sub(1)]
}

impl Plan {
    /// Makes the plan of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5EED_0F0A_11DE_907A);
        rng.next();
        let mut placements = Rng::new(seed ^ 0x91AC_E3E7);
        let (mut budgets, mut more) = (Rng::new(seed ^ 0xB0D6_E75F), Rng::new(seed ^ 0xB0D_6E20));
        let tiers: Vec<TierShape> = (0..[1, 1, 2, 2, 3, 0, 1, 2][rng.below(8)])
            .map(|_| TierShape {
                pages: rng.between(6, 60),
                shy: rng.chance(35),
                placement: Placement { write: drawn_write(&mut placements), promote: placements.chance(40) },
                write_bytes_per_day: budget(&mut budgets, &mut more),
            })
            .collect();
        let mut lending = Rng::new(seed ^ 0x1E_4DE6);
        let lender = (!tiers.is_empty()).then(|| Lender {
            tier: if lending.chance(70) { 0 } else { lending.below(tiers.len()) },
            pages: lending.between(4, 80),
            unit_pages: lending.between(1, 4),
        });
        let pool_pages = rng.between(4, 40);
        let pool_pages_max = if rng.chance(15) { pool_pages + rng.between(1, 16) } else { pool_pages };
        let shape = Shape {
            tiers,
            lender,
            pool_pages,
            pool_pages_max,
            regions: drawn_regions(seed, pool_pages_max),
            policy: match (rng.chance(50), Rng::new(seed ^ 0x1EA5_7D17).chance(33)) {
                (_, true) => "lhd",
                (true, false) => "lru",
                (false, false) => "s3fifo",
            },
            keeps: !rng.chance(12),
            clients: rng.between(1, 5),
            prompts: rng.between(1, 3),
            prompt_units: rng.between(3, 12),
            namespaces_max: 3 + (seed % 5) as usize,
        };
        // Swarm testing: each feature is enabled in most runs, but hardly ever are all.
        let mut features = Features((1 << FEATURES.len()) - 1);
        let mut forgetting = Rng::new(seed ^ 0xF0_46E7);
        if forgetting.chance(60) {
            features = features.without(Feature::Forgetting);
        }
        if Rng::new(seed ^ 0xCEE9_7001).chance(60) {
            features = features.without(Feature::KeptPools);
        }
        if Rng::new(seed ^ 0x4E30_7A15).chance(25) {
            features = features.without(Feature::RemovalErrors);
        }
        if Rng::new(seed ^ 0x3157_ED00).chance(25) {
            features = features.without(Feature::Wishes);
        }
        if Rng::new(seed ^ 0x9817_0033).chance(60) {
            features = features.without(Feature::Priorities);
        }
        if Rng::new(seed ^ 0xC40_3D72).chance(50) {
            features = features.without(Feature::Crowds);
        }
        if Rng::new(seed ^ 0x1EA5_E500).chance(50) {
            features = features.without(Feature::Leases);
        }
        if Rng::new(seed ^ 0xC401_CE50).chance(50) {
            features = features.without(Feature::Choices);
        }
        let drawn_above = [
            Feature::Forgetting,
            Feature::KeptPools,
            Feature::RemovalErrors,
            Feature::Wishes,
            Feature::Priorities,
            Feature::Crowds,
            Feature::Leases,
            Feature::Choices,
        ];
        for feature in FEATURES.into_iter().filter(|feature| !drawn_above.contains(feature)) {
            let off = if feature == Feature::Crashes { 50 } else { 25 };
            if rng.chance(off) {
                features = features.without(feature);
            }
        }
        if Rng::new(seed ^ 0x0A11_A70C).chance(20) {
            // Without these a claim must find the room that it was promised.
            features = features.without(Feature::SmallSteps).without(Feature::StaleAnswers);
        }
        let ops = (0..rng.between(OPS_MAX / 4, OPS_MAX)).map(|_| rng.next()).collect();
        Self { seed, shape, features, ops }
    }
}

/// Returns the pages of each region of a pool. It uses its own random numbers, so the plan's do not change.
fn drawn_regions(seed: u64, pages: usize) -> Vec<usize> {
    let mut rng = Rng::new(seed ^ 0x4E61_0935);
    let mut left = pages;
    let mut regions = Vec::new();
    for others in (0..rng.between(1, REGIONS_MAX)).rev() {
        let region = if others == 0 { left } else { rng.between(1, left - others) };
        left -= region;
        regions.push(region);
    }
    regions
}

/// Returns the sizes of the regions in bytes.
pub(crate) fn region_bytes(regions: &[usize]) -> Vec<u64> {
    regions.iter().map(|&pages| pages as u64 * BLOCK_ALIGN_BYTES).collect()
}
