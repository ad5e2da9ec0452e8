//! The tiers of this build. A new tier is a folder with a [`TierEntry`] and a line in [`TIERS`]: pipelines, the depot's
//! configuration and its placements know it by that.

use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

use crate::{GuardConfig, Guarded, Tier, empty, fake, posix, remote};

/// How a tier describes itself.
#[derive(Debug)]
pub struct TierEntry {
    /// As a pipeline names it. Its settings stand in a depot's configuration under this name in lower case.
    pub name: &'static str,
    /// From its settings to a tier; all keys are to be known (P10).
    pub open: fn(&Value) -> Result<Arc<dyn Tier>>,
    /// Whether it has circuit breakers of its own, as one with several servers has: one dead server must not switch off
    /// the others.
    pub guards_itself: bool,
}

/// All tiers, in the order of the documentation.
pub const TIERS: [&TierEntry; 4] = [&posix::ENTRY, &remote::ENTRY, &fake::ENTRY, &empty::ENTRY];

/// Their names.
pub const NAMES: [&str; TIERS.len()] = {
    let mut names = [""; TIERS.len()];
    let mut index = 0;
    while index < TIERS.len() {
        names[index] = TIERS[index].name;
        index += 1;
    }
    names
};

impl TierEntry {
    /// The key of its settings.
    pub fn key(&self) -> String {
        self.name.to_ascii_lowercase()
    }
}

/// Builds a tier by its name in a pipeline, from a JSON object of settings.
pub fn build(name: &str, config: &Value) -> Result<Arc<dyn Tier>> {
    (find(name)?.open)(config)
}

/// Builds a tier behind circuit breakers (P2).
pub fn build_guarded(name: &str, config: &Value) -> Result<Arc<dyn Tier>> {
    let tier = build(name, config)?;
    if find(name)?.guards_itself {
        return Ok(tier);
    }
    Ok(Arc::new(Guarded::new(tier, GuardConfig::default())))
}

fn find(name: &str) -> Result<&'static TierEntry> {
    TIERS.into_iter().find(|entry| entry.name == name).ok_or_else(|| {
        Error::new(ErrorKind::Config, "no such tier")
            .with("tier", name)
            .with("nearest", nearest(name, &NAMES))
            .with("known", NAMES.join(" "))
    })
}

/// A setting that is on, off, or for the code to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    On,
    Off,
    Auto,
}

/// A tier's settings, with every key known (P10).
pub(crate) struct Fields<'a> {
    tier: &'a str,
    map: Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Takes an object (or null for no settings) all of whose keys are in `known`.
    pub(crate) fn new(tier: &'a str, value: &Value, known: &[&str]) -> Result<Self> {
        let map = match value {
            Value::Null => Map::new(),
            Value::Object(map) => map.clone(),
            _ => {
                return Err(
                    Error::new(ErrorKind::Config, "a tier's settings are an object").with("tier", tier)
                );
            }
        };
        if let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(Error::new(ErrorKind::Config, "a tier has no such setting")
                .with("tier", tier)
                .with("key", key)
                .with("nearest", nearest(key, known)));
        }
        Ok(Self { tier, map })
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::new(ErrorKind::Config, format!("a tier's setting must be {expected}"))
            .with("tier", self.tier)
            .with("key", key)
            .with("value", self.map.get(key).unwrap_or(&Value::Null))
    }

    pub(crate) fn bool(&self, key: &str, out: &mut bool) -> Result<()> {
        if let Some(value) = self.map.get(key) {
            *out = value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))?;
        }
        Ok(())
    }

    /// `true`, `false` or `"auto"`.
    pub(crate) fn switch(&self, key: &str) -> Result<Option<Switch>> {
        match self.map.get(key) {
            None => Ok(None),
            Some(Value::Bool(true)) => Ok(Some(Switch::On)),
            Some(Value::Bool(false)) => Ok(Some(Switch::Off)),
            Some(Value::String(text)) if text == "auto" => Ok(Some(Switch::Auto)),
            Some(_) => Err(self.wrong(key, "true, false or auto")),
        }
    }

    pub(crate) fn u64(&self, key: &str, out: &mut u64) -> Result<()> {
        if let Some(value) = self.map.get(key) {
            *out = value.as_u64().ok_or_else(|| self.wrong(key, "a whole number, 0 or more"))?;
        }
        Ok(())
    }

    pub(crate) fn usize(&self, key: &str, out: &mut usize) -> Result<()> {
        let mut wide = *out as u64;
        self.u64(key, &mut wide)?;
        *out = usize::try_from(wide).map_err(|_| self.wrong(key, "a smaller number"))?;
        Ok(())
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let wrong = || self.wrong(key, "a list of texts");
        let items = self.map.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
    }

    pub(crate) fn paths(&self, key: &str) -> Result<Vec<PathBuf>> {
        let wrong = || self.wrong(key, "a list of paths");
        let items = self.map.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(PathBuf::from).ok_or_else(wrong)).collect()
    }
}

/// The known name with the fewest single-letter edits to `name`; empty if none is known.
fn nearest<'a>(name: &str, known: &[&'a str]) -> &'a str {
    known.iter().min_by_key(|candidate| edits(name, candidate)).copied().unwrap_or_default()
}

fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(!from.eq_ignore_ascii_case(to));
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_name_the_nearest_known_one() {
        let error =
            build("Posix", &serde_json::json!({"directories": ["/tmp"], "io_dircet": true})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("nearest=io_direct"), "{error}");
        let error = build("posix", &Value::Null).unwrap_err();
        assert!(error.to_string().contains("nearest=Posix"), "{error}");
        for config in [
            serde_json::json!({}),
            serde_json::json!({"directories": []}),
            serde_json::json!({"directories": ["/tmp"], "read_threads": 0}),
            serde_json::json!({"directories": ["/tmp"], "engine": "aio"}),
            serde_json::json!({"directories": ["/tmp"], "capacity_bytes": -1}),
            serde_json::json!({"directories": ["/tmp"], "faults": "x"}),
        ] {
            assert_eq!(build("Posix", &config).unwrap_err().kind(), ErrorKind::Config, "{config}");
        }
        assert_eq!(build("Fake", &Value::Null).unwrap().name(), "fake");
        assert_eq!(build("Empty", &Value::Null).unwrap().name(), "empty");
    }
}
