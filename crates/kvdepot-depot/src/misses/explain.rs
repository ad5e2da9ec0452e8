//! Answers about misses: the last ones, and why given blocks are absent.

use std::collections::BTreeMap;

use kvdepot_core::limits::CLAIM_LABEL_CHARS_MAX;
use kvdepot_core::machine::{Location, Opened, TierSet};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceSpec, Result};
use serde_json::{Map, Value, json};

use super::record::{Cause, LAST_MAX, Miss};
use crate::locate::Locator;
use crate::usage;

/// Blocks that one question may be about (P7).
const BLOCKS_ASKED_MAX: usize = 256;

/// Descriptions of namespaces, each once, by their names.
#[derive(Default)]
struct Named(BTreeMap<String, Value>);

impl Named {
    fn name(&mut self, spec: &NamespaceSpec) -> String {
        let name = hex(&spec.root().0);
        let described = || serde_json::from_str(spec.canonical()).unwrap_or(Value::Null);
        self.0.entry(name.clone()).or_insert_with(described);
        name
    }
}

impl Locator {
    /// The newest misses, newest first; those of a request whose label begins so, where one is named. Of longer texts than a
    /// label may have only the beginning is compared, as labels are cut.
    pub(crate) fn last_misses(&self, count: usize, request: Option<&str>) -> Value {
        let request: Option<String> = request.map(|text| text.chars().take(CLAIM_LABEL_CHARS_MAX).collect());
        let is_wanted = |miss: &Miss| {
            let label = miss.label.as_deref().unwrap_or_default();
            request.as_deref().is_none_or(|request| label.starts_with(request))
        };
        let misses = self.misses.last.lock().newest(count.min(LAST_MAX), is_wanted);
        let mut named = Named::default();
        let told: Vec<Value> = misses.iter().map(|miss| self.told(miss, &mut named)).collect();
        json!({"misses": told, "kept": LAST_MAX, "namespaces": named.0})
    }

    fn told(&self, miss: &Miss, named: &mut Named) -> Value {
        let mut told = json!({
            "at_unix_ms": miss.at_ms,
            "client_pid": miss.client,
            "request": miss.label,
            "by": miss.by,
            "namespace": miss.namespace.as_deref().map(|spec| named.name(spec)),
            "asked": miss.asked,
            "hit": miss.hit,
            "hash": hex(&miss.hash.0),
            "other_namespaces": miss.elsewhere.iter().map(|spec| named.name(spec)).collect::<Vec<_>>(),
        });
        self.tell_why(&mut told, miss.cause);
        told
    }

    fn tell_why(&self, told: &mut Value, Cause { reason, ghost, down }: Cause) {
        told["reason"] = reason.as_str().into();
        told["place"] = match down.or_else(|| ghost.and_then(|ghost| ghost.tier)) {
            Some(tier) => self.tiers.get(tier).map_or(Value::Null, |tier| tier.name().into()),
            None => ghost.map_or(Value::Null, |_| "pool".into()),
        };
        told["gone_s"] = ghost.map(|ghost| ghost.ago_s).into();
        told["kept_s"] = ghost.and_then(|ghost| ghost.kept_s).into();
    }

    /// Where blocks of a namespace are, and why those that are nowhere are not there. Waits for tiers that cannot tell without
    /// I/O, within bounds.
    ///
    /// # Errors
    /// `NotFound` where no namespace that is known has a name that begins so; `Config` where several do, or a hash is none;
    /// `Busy` where as many are explained to as may be.
    pub(crate) fn explain(&self, namespace: &str, hashes: &[&str]) -> Result<Value> {
        let _explaining = self.misses.begin_to_explain()?;
        if hashes.len() > BLOCKS_ASKED_MAX {
            return Err(Error::new(ErrorKind::Config, "one question may be about so many blocks")
                .with("blocks", hashes.len())
                .with("blocks_max", BLOCKS_ASKED_MAX));
        }
        let hashes = hashes.iter().map(|text| parsed(text)).collect::<Result<Vec<_>>>()?;
        let opened = self.named(namespace)?;
        let keys: Vec<BlockKey> =
            hashes.into_iter().map(|hash| BlockKey { namespace: opened.id, hash }).collect();
        let mut named = Named::default();
        let name = named.name(&opened.spec);
        let in_pool: Vec<bool> = self.presence.contain(&keys).collect();
        let mut locations = self.locate(&keys);
        let unknown: Vec<usize> =
            (0..keys.len()).filter(|&i| !in_pool[i] && locations[i] == Location::Unknown).collect();
        let probed = self.probe_each(&keys, &unknown, None);
        for (&i, tier) in unknown.iter().zip(&probed.tiers) {
            locations[i] = tier.map_or(Location::Absent, Location::Tier);
        }
        let untold = probed.untold;
        let places = in_pool.into_iter().zip(locations);
        let blocks = keys.iter().zip(places).enumerate().map(|(i, (key, (in_pool, location)))| {
            let mut told = json!({"hash": hex(&key.hash.0)});
            match (in_pool, location) {
                (true, _) => told["at"] = "pool".into(),
                (false, Location::Tier(tier)) => told["at"] = self.tiers[tier].name().into(),
                (false, Location::Unknown | Location::Absent) => {
                    told["at"] = Value::Null;
                    let why = self.why(key, &[opened.id], TierSet::ALL, untold.contains(&i));
                    let others = self.elsewhere(key.hash, &[opened.id]);
                    let specs = others.iter().filter_map(|&id| self.directory.by_id(id));
                    told["other_namespaces"] = specs.map(|other| named.name(&other.spec)).collect();
                    self.tell_why(&mut told, why.cause);
                }
            }
            told
        });
        let blocks: Vec<Value> = blocks.collect();
        Ok(json!({"namespace": name, "epoch": opened.epoch, "blocks": blocks, "namespaces": named.0}))
    }

    /// The one namespace whose name begins with `prefix`.
    fn named(&self, prefix: &str) -> Result<Opened> {
        let wanted = prefix.to_lowercase();
        let mut found = self.directory.all();
        found.retain(|opened| hex(&opened.spec.root().0).starts_with(&wanted));
        match found.len() {
            0 => Err(Error::new(
                ErrorKind::NotFound,
                "no namespace with this prefix was opened since the depot started",
            )
            .with("namespace", prefix)),
            1 => Ok(found.swap_remove(0)),
            count => Err(Error::new(ErrorKind::Config, "the prefix is ambiguous: give more digits")
                .with("namespace", prefix)
                .with("namespaces", count)),
        }
    }

    /// The namespaces that were read most in the last hour, with what they hold: `blocks` tells that.
    pub(crate) fn top_namespaces(&self, held: impl FnOnce(&[u64]) -> Vec<(u64, u64)>) -> Value {
        let top = usage::top(self.directory.tallies());
        let handles: Vec<u64> = top.iter().map(|(handle, _)| *handle).collect();
        let held = held(&handles);
        let told = top.iter().zip(held).filter_map(|((handle, used), (blocks, bytes))| {
            let opened = self.directory.get(*handle).ok()?;
            Some(json!({
                "namespace": hex(&opened.spec.root().0),
                "epoch": opened.epoch,
                "facts": summary(&opened.spec),
                "pool_blocks": blocks,
                "pool_bytes": bytes,
                "load_blocks": used.load_blocks,
                "load_blocks_missed": used.load_blocks_missed,
                "load_bytes": used.load_bytes,
                "load_bytes_hour": used.load_bytes_hour,
                "lookup_blocks": used.lookup_blocks,
                "lookup_hit_blocks": used.lookup_hit_blocks,
                "misses": used.misses,
                "used_s": used.used_s,
            }))
        });
        told.collect()
    }
}

/// Facts on one line: those that people tell models apart by. Others may be secret, such as a salt: a scrape shows none of them.
fn summary(spec: &NamespaceSpec) -> String {
    const KNOWN: [&str; 7] = ["kind", "model", "dtype", "cache_dtype", "kv_shard", "rank", "group"];
    let described: Value = serde_json::from_str(spec.canonical()).unwrap_or(Value::Null);
    let none = Map::new();
    let facts = described["facts"].as_object().unwrap_or(&none);
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let words = KNOWN.into_iter().filter_map(|name| {
        let value: String = text(facts.get(name)?).chars().take(40).collect();
        Some(format!("{name}={value}"))
    });
    words.collect::<Vec<_>>().join(" ")
}

pub(super) fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

fn parsed(text: &str) -> Result<BlockHash> {
    let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = digits.then(|| u128::from_str_radix(text, 16).ok()).flatten();
    number.map(|number| BlockHash(number.to_be_bytes())).ok_or_else(|| {
        Error::new(ErrorKind::Config, "a block hash is 32 hexadecimal digits").with("hash", text)
    })
}
