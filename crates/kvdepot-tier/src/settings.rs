//! What a tier can be told. Each tier declares its settings once, in its own folder: the object that it is opened with is
//! checked against them here, and the keys of a user's configuration are made from them in Python.

use std::path::PathBuf;

use kvdepot_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// The setting by which a depot tells a tier that its pool's memory outlives the process; of those tiers that ask.
pub(crate) const MEMORY_OUTLIVES: &str = "memory_outlives";

/// A setting of a tier.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Setting {
    /// As the tier reads it.
    pub name: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// The key that says it in a user's configuration; none for what only programs and tests say.
    pub key: Option<Key>,
}

/// What a setting may be.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Kind {
    /// On or off.
    Bool,
    /// On, off, or `auto`: for the code to decide.
    Switch,
    /// A whole number.
    Whole {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// A size in bytes. A key says it in GiB, which may be a fraction.
    Bytes {
        /// The most.
        max: u64,
    },
    /// One of a few words.
    Choice {
        /// The words.
        of: &'static [&'static str],
    },
    /// A text, or null for none.
    Text,
    /// The absolute path of a file, or null for none.
    Path,
    /// A URL of one of a few schemes, or null for none.
    Url {
        /// The schemes, without `://`.
        of: &'static [&'static str],
    },
    /// Absolute paths, each once. A key may say them as one text, separated by `:`.
    Paths {
        /// The most.
        max: usize,
    },
    /// Servers, each `host:port` and each once. A key may say them as one text, separated by `,`.
    Servers {
        /// The most.
        max: usize,
    },
}

/// A key of a user's configuration, as its documentation has it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Key {
    /// Its name, which is no other key's of any tier.
    pub name: &'static str,
    /// One or two sentences for the table of keys.
    pub meaning: &'static str,
    /// Unit of the value; empty for names and switches.
    pub unit: &'static str,
    /// Its value when it is left out.
    pub default: Preset,
    /// Without a `default`: what holds then, in words.
    pub by_default: &'static str,
    /// Without a `default`: how the machine decides it.
    pub by_machine: Option<ByMachine>,
    /// A value for the example of a configuration, as YAML; empty = the example is without it.
    pub example: &'static str,
    /// Its names in files with `ucm_connectors`.
    pub seeds: &'static [&'static str],
    /// The name of what it is half of there, rounded up; empty = of nothing.
    pub half_of_seed: &'static str,
    /// What this build accepts of its words; empty = all of them.
    pub only: &'static [&'static str],
    /// What to do instead of asking for others.
    pub instead: &'static str,
    /// Why a pipeline with this tier needs it; empty = it may be left out.
    pub required: &'static str,
    /// How it depends on another key.
    pub rule: Option<Rule>,
}

impl Key {
    /// A key without name or default, to be filled in by those who declare one.
    pub const BLANK: Self = Self {
        name: "",
        meaning: "",
        unit: "",
        default: Preset::Nothing,
        by_default: "",
        by_machine: None,
        example: "",
        seeds: &[],
        half_of_seed: "",
        only: &[],
        instead: "",
        required: "",
        rule: None,
    };
}

/// The value of a key that is left out.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum Preset {
    /// On or off.
    Bool(bool),
    /// A number.
    Whole(u64),
    /// A word.
    Word(&'static str),
    /// None: the tier is not told, or the machine decides.
    Nothing,
}

/// How the machine decides the value of a key that is left out.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ByMachine {
    /// `kvdepot` in the user's cache directory.
    CacheDirectory {
        /// A setting that is true then and false otherwise: that the directory is to be made.
        tell: &'static str,
    },
    /// A share of the disks under the tier's paths.
    DiskShare {
        /// Of the size of the disks under paths that were configured.
        percent: u64,
        /// Of the free space, where the paths were left to the machine too.
        free_percent: u64,
    },
}

/// How a key depends on another one of its tier.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Rule {
    /// It has no use while the other is left out.
    Needs {
        /// The other key.
        key: &'static str,
        /// What is wrong then, and what to do.
        text: &'static str,
    },
    /// It cannot be said while the other has a certain value.
    Not {
        /// The other key.
        key: &'static str,
        /// Its value.
        value: &'static str,
        /// What is wrong then, and what to do.
        text: &'static str,
    },
}

impl Kind {
    /// Whether a tier takes this value; otherwise what it must be.
    fn check(&self, value: &Value) -> std::result::Result<(), String> {
        let list = |max: usize| {
            let items = value.as_array().filter(|items| items.iter().all(Value::is_string));
            items.is_some_and(|items| (1..=max).contains(&items.len()))
        };
        let (good, expected) = match *self {
            Self::Bool => (value.is_boolean(), "true or false".to_owned()),
            Self::Switch => (value.is_boolean() || value == "auto", "true, false or auto".to_owned()),
            Self::Whole { min, max } => (
                value.as_u64().is_some_and(|value| (min..=max).contains(&value)),
                format!("a whole number between {min} and {max}"),
            ),
            Self::Bytes { max } => (
                value.as_u64().is_some_and(|value| value <= max),
                format!("a whole number of bytes, {max} at most"),
            ),
            Self::Choice { of } => (value.as_str().is_some_and(|value| of.contains(&value)), one_of(of)),
            Self::Text => (value.is_string() || value.is_null(), "a text".to_owned()),
            Self::Path => (value.is_string() || value.is_null(), "a path".to_owned()),
            Self::Url { of } => (
                value.is_null() || value.as_str().is_some_and(|text| is_url(text, of)),
                format!("a URL that begins with {}", one_of_schemes(of)),
            ),
            Self::Paths { max } => (list(max), format!("a list of 1 to {max} paths")),
            Self::Servers { max } => (list(max), format!("a list of 1 to {max} servers, each host:port")),
        };
        if good { Ok(()) } else { Err(expected) }
    }
}

/// Whether a text is `scheme://` and something behind it, without a name and a password in front of a host.
fn is_url(text: &str, schemes: &[&str]) -> bool {
    let rest = text.split_once("://").filter(|(scheme, _)| schemes.contains(scheme)).map(|(_, rest)| rest);
    rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && rest.chars().all(|c| c.is_ascii_graphic() && !"@?#".contains(c))
    })
}

fn one_of_schemes(schemes: &[&str]) -> String {
    let written: Vec<String> = schemes.iter().map(|scheme| format!("{scheme}://")).collect();
    let written: Vec<&str> = written.iter().map(String::as_str).collect();
    format!("{} and holds no user, query or fragment", one_of(&written))
}

fn one_of(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// A setting that is on, off, or for the code to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    On,
    Off,
    Auto,
}

/// The object that a tier is opened with: every key is one of its settings, and every value is of its kind (P10).
pub(crate) struct Fields<'a> {
    tier: &'a str,
    settings: &'a [Setting],
    map: Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Takes an object, or null for no settings.
    pub(crate) fn new(tier: &'a str, value: &Value, settings: &'a [Setting]) -> Result<Self> {
        let map = match value {
            Value::Null => Map::new(),
            Value::Object(map) => map.clone(),
            _ => {
                return Err(
                    Error::new(ErrorKind::Config, "a tier's settings are an object").with("tier", tier)
                );
            }
        };
        let fields = Self { tier, settings, map };
        for (key, value) in &fields.map {
            let Some(setting) = settings.iter().find(|setting| setting.name == key) else {
                let known: Vec<&str> = settings.iter().map(|setting| setting.name).collect();
                return Err(Error::new(ErrorKind::Config, "a tier has no such setting")
                    .with("tier", tier)
                    .with("key", key)
                    .with("nearest", nearest(key, &known)));
            };
            setting.kind.check(value).map_err(|expected| fields.wrong(key, &expected))?;
        }
        Ok(fields)
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::new(ErrorKind::Config, format!("a tier's setting must be {expected}"))
            .with("tier", self.tier)
            .with("key", key)
            .with("value", self.map.get(key).unwrap_or(&Value::Null))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        debug_assert!(
            self.settings.iter().any(|setting| setting.name == key),
            "{key} is no setting that {} declares",
            self.tier
        );
        self.map.get(key)
    }

    pub(crate) fn bool(&self, key: &str, out: &mut bool) -> Result<()> {
        if let Some(value) = self.get(key) {
            *out = value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))?;
        }
        Ok(())
    }

    /// `true`, `false` or `"auto"`.
    pub(crate) fn switch(&self, key: &str) -> Result<Option<Switch>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(true)) => Ok(Some(Switch::On)),
            Some(Value::Bool(false)) => Ok(Some(Switch::Off)),
            Some(Value::String(text)) if text == "auto" => Ok(Some(Switch::Auto)),
            Some(_) => Err(self.wrong(key, "true, false or auto")),
        }
    }

    pub(crate) fn u64(&self, key: &str, out: &mut u64) -> Result<()> {
        if let Some(value) = self.get(key) {
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
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    /// A list of texts, which must be there.
    pub(crate) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let wrong = || self.wrong(key, "a list of texts");
        let items = self.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
    }

    /// A list of paths, which must be there.
    pub(crate) fn paths(&self, key: &str) -> Result<Vec<PathBuf>> {
        let wrong = || self.wrong(key, "a list of paths");
        let items = self.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(PathBuf::from).ok_or_else(wrong)).collect()
    }
}

/// The known name with the fewest single-letter edits to `name`; empty if none is known.
pub(crate) fn nearest<'a>(name: &str, known: &[&'a str]) -> &'a str {
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
