//! Settings of an Object tier, and their parser.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::limits::{OBJECT_PACK_LINGER_MS, OBJECT_PACK_LIST_MS, OBJECT_REQUESTS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use serde_json::Value;

use super::address::{Account, Address};
use super::cloud::Cloud;
use super::settings::SETTINGS;
use crate::Compression;
use crate::settings::Fields;

const MIB: usize = 1 << 20;

/// Settings of an Object tier. Access keys are not part of them: they are read when the tier is opened, and kept by the
/// client.
#[derive(Clone, Debug)]
pub struct ObjectConfig {
    /// The store's protocol.
    pub cloud: Cloud,
    /// The bucket; at Azure the container.
    pub bucket: String,
    /// Storage account of Azure; `None` for the environment's.
    pub account: Option<Account>,
    /// Prefix of all object names, without slashes at its ends; empty for none.
    pub prefix: String,
    /// URL of the store; `None` for the environment's, or the provider's.
    pub endpoint: Option<String>,
    /// Region of S3; `None` for the environment's.
    pub region: Option<String>,
    /// File with credentials in the provider's format; `None` for the usual places.
    pub credentials_file: Option<PathBuf>,
    /// Profile in that file of S3's; `None` for the environment's, or `default`.
    pub profile: Option<String>,
    /// PEM file with certificates to trust in addition to the system's.
    pub tls_ca_file: Option<PathBuf>,
    /// Maximum silence of the store while it owes an answer.
    pub timeout: Duration,
    /// Maximum number of concurrent requests.
    pub requests: usize,
    /// Size of parts in bytes. Larger blocks are written in parts.
    pub part_bytes: usize,
    /// Size in bytes at which a pack of small blocks is complete; 0: every block has an object of its own.
    pub pack_bytes: u64,
    /// Minimum number of blocks in a pack; fewer are written to objects of their own. Not read from JSON.
    pub pack_blocks_min: usize,
    /// How long a block waits for others of its pack. Not read from JSON.
    pub pack_linger: Duration,
    /// Pause between two lists of a namespace's packs. Not read from JSON.
    pub pack_list_pause: Duration,
    /// Time for which a block is assumed to be present without asking.
    pub present_ttl: Duration,
    /// Time for which a block is assumed to be absent without asking.
    pub absent_ttl: Duration,
    /// Whether blocks are compressed. Blocks of either form are read.
    pub compression: Compression,
    /// Whether objects of past epochs are deleted.
    pub sweep: bool,
}

impl ObjectConfig {
    /// Returns the defaults for a bucket: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or
    /// `abfss://container@account.dfs.core.windows.net/prefix`.
    pub fn new(url: &str) -> Result<Self> {
        let Address { cloud, bucket, prefix, account } = Address::parse(url)?;
        Ok(Self {
            cloud,
            bucket,
            account,
            prefix,
            endpoint: None,
            region: None,
            credentials_file: None,
            profile: None,
            tls_ca_file: None,
            timeout: Duration::from_secs(5),
            requests: 64,
            part_bytes: 16 * MIB,
            pack_bytes: 8 * MIB as u64,
            pack_blocks_min: 2,
            pack_linger: Duration::from_millis(OBJECT_PACK_LINGER_MS),
            pack_list_pause: Duration::from_millis(OBJECT_PACK_LIST_MS),
            present_ttl: Duration::from_secs(600),
            absent_ttl: Duration::from_secs(5),
            compression: Compression::Off,
            sweep: true,
        })
    }

    /// Parses an object of the tier's settings.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Object", value, &SETTINGS)?;
        let url = fields.text("url")?.ok_or_else(|| {
            let what = "an Object tier needs a bucket: url is s3://bucket/prefix, gs://bucket/prefix or az://container/prefix";
            Error::new(ErrorKind::Config, what)
        })?;
        let mut config = Self::new(&url)?;
        config.endpoint = fields.text("endpoint")?;
        config.region = fields.text("region")?;
        config.credentials_file = fields.text("credentials_file")?.map(PathBuf::from);
        config.profile = fields.text("profile")?;
        config.tls_ca_file = fields.text("tls_ca_file")?.map(PathBuf::from);
        for (name, out) in [
            ("timeout_ms", &mut config.timeout),
            ("present_ttl_ms", &mut config.present_ttl),
            ("absent_ttl_ms", &mut config.absent_ttl),
        ] {
            let mut ms = u64::try_from(out.as_millis()).unwrap_or(u64::MAX);
            fields.u64(name, &mut ms)?;
            *out = Duration::from_millis(ms);
        }
        fields.usize("requests", &mut config.requests)?;
        let mut part_mb = config.part_bytes / MIB;
        fields.usize("part_mb", &mut part_mb)?;
        config.part_bytes = part_mb * MIB;
        let mut pack_mb = config.pack_bytes / MIB as u64;
        fields.u64("pack_mb", &mut pack_mb)?;
        config.pack_bytes = pack_mb * MIB as u64;
        if let Some(switch) = fields.switch("compression")? {
            config.compression = Compression::of(switch);
        }
        fields.bool("sweep", &mut config.sweep)?;
        config.check()?;
        Ok(config)
    }

    /// Rejects values that cannot work (P10).
    pub fn check(&self) -> Result<()> {
        if !(4..=OBJECT_REQUESTS_MAX).contains(&self.requests) {
            return Err(Error::new(ErrorKind::Config, "an Object tier makes 4 to 1024 requests at a time")
                .with("requests", self.requests));
        }
        if self.timeout.is_zero() || self.part_bytes == 0 {
            return Err(Error::new(ErrorKind::Config, "an Object tier needs a timeout and parts above 0"));
        }
        let of_aws = [("region", self.region.is_some()), ("profile", self.profile.is_some())];
        if let Some((setting, _)) = of_aws.iter().find(|(_, is_set)| *is_set && self.cloud != Cloud::Aws) {
            return Err(Error::new(ErrorKind::Config, "only stores at s3:// have such a setting")
                .with("tier", "Object")
                .with("key", setting));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_are_read() {
        let config = ObjectConfig::from_json(&json!({
            "url": "s3://b/p", "endpoint": "http://h:1", "timeout_ms": 7, "part_mb": 5, "sweep": false,
            "present_ttl_ms": 8, "absent_ttl_ms": 9, "requests": 4, "region": "r", "profile": "q",
        }))
        .unwrap();
        assert_eq!((config.timeout.as_millis(), config.part_bytes, config.sweep), (7, 5 << 20, false));
        assert_eq!((config.present_ttl.as_millis(), config.absent_ttl.as_millis()), (8, 9));
        assert_eq!(
            (config.requests, config.region.as_deref(), config.profile.as_deref()),
            (4, Some("r"), Some("q"))
        );
        let error = ObjectConfig::from_json(&json!({})).unwrap_err();
        assert!(error.to_string().contains("s3://bucket/prefix"), "{error}");
        for key in ["region", "profile"] {
            let error = ObjectConfig::from_json(&json!({"url": "gs://b", key: "x"})).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
    }
}
