//! Settings of a Mooncake tier, and their parser.

use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use serde_json::Value;

use super::settings::SETTINGS;
use crate::settings::Fields;

/// Largest size of a prefix.
const PREFIX_BYTES_MAX: usize = 64;

/// Settings of a Mooncake tier.
#[derive(Clone, Debug)]
pub struct MooncakeConfig {
    /// Mooncake's own configuration file; `None` for its environment variables.
    pub config_path: Option<String>,
    /// Python interpreter that has Mooncake's package.
    pub python: String,
    /// Beginning of all names in Mooncake.
    pub prefix: String,
    /// Replicas of each block.
    pub replicas: usize,
    /// How long a call may take.
    pub timeout: Duration,
    /// Concurrent calls for reads and lookups, and for writes.
    pub calls: usize,
    /// Size of the staging memory.
    pub staging_bytes: usize,
    /// Time for which a block is assumed to be present without asking.
    pub present_ttl: Duration,
    /// Time for which a block is assumed to be absent without asking.
    pub absent_ttl: Duration,
}

impl Default for MooncakeConfig {
    fn default() -> Self {
        Self {
            config_path: None,
            python: "python3".to_owned(),
            prefix: "kvdepot".to_owned(),
            replicas: 1,
            timeout: Duration::from_secs(5),
            calls: 4,
            staging_bytes: 256 << 20,
            present_ttl: Duration::from_secs(60),
            absent_ttl: Duration::from_millis(100),
        }
    }
}

impl MooncakeConfig {
    /// Parses an object of the tier's settings.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Mooncake", value, &SETTINGS)?;
        let mut config = Self { config_path: fields.text("config_path")?, ..Self::default() };
        if let Some(python) = fields.text("python")? {
            config.python = python;
        }
        if let Some(prefix) = fields.text("prefix")? {
            config.prefix = prefix;
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if config.prefix.is_empty()
            || config.prefix.len() > PREFIX_BYTES_MAX
            || !config.prefix.chars().all(is_plain)
        {
            let what = "mooncake_prefix is 1 to 64 letters, digits, hyphens, underscores and dots";
            return Err(Error::new(ErrorKind::Config, what).with("prefix", &config.prefix));
        }
        fields.usize("replicas", &mut config.replicas)?;
        fields.usize("calls", &mut config.calls)?;
        let mut staging_mb = config.staging_bytes >> 20;
        fields.usize("staging_mb", &mut staging_mb)?;
        config.staging_bytes = staging_mb << 20;
        for (key, time) in [
            ("timeout_ms", &mut config.timeout),
            ("present_ttl_ms", &mut config.present_ttl),
            ("absent_ttl_ms", &mut config.absent_ttl),
        ] {
            let mut ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            fields.u64(key, &mut ms)?;
            *time = Duration::from_millis(ms);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_settings_say_what_is_right() {
        for (value, wants) in [
            (json!({"prefix": ""}), "1 to 64"),
            (json!({"prefix": "a/b"}), "prefix=a/b"),
            (json!({"timeout_ms": 45_001}), "between 1 and 45000"),
            (json!({"staging_mb": 0}), "between 1 and"),
            (json!({"master": "x"}), "a tier has no such setting"),
        ] {
            let error = MooncakeConfig::from_json(&value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{value}");
            assert!(error.to_string().contains(wants), "{value}: {error}");
        }
    }
}
