//! What a tier tells the registry about itself.

use std::sync::Arc;

use kvdepot_core::Result;
use serde_json::Value;

use crate::Tier;
use crate::settings::Setting;

/// Description of a tier.
#[derive(Debug)]
pub struct TierEntry {
    /// Its name in a pipeline. In a depot's configuration, its settings are under this name in lower case.
    pub name: &'static str,
    /// Makes a tier from its settings. All keys must be known (P10).
    pub open: fn(&Value) -> Result<Arc<dyn Tier>>,
    /// Whether it has its own circuit breakers, like a tier with several servers: one dead server must not disable the
    /// others.
    pub guards_itself: bool,
    /// Its settings, in the order of the documentation.
    pub settings: &'static [Setting],
    /// Whether users have keys for it, including those of its placement. False for tiers that only measure or test.
    pub for_users: bool,
}

impl TierEntry {
    /// Returns the key of its settings.
    pub fn key(&self) -> String {
        self.name.to_ascii_lowercase()
    }
}
