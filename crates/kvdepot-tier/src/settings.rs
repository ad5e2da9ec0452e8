//! Settings of tiers. Each tier declares its settings once, in its own folder. The object that it is opened with is
//! checked against them here, and the keys of a user's configuration are made from them in Python.

use std::path::PathBuf;

use kvdepot_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// The setting by which a depot tells a tier that its pool's memory outlives the process; only for tiers that declare
/// it.
pub(crate) const MEMORY_OUTLIVES: &str = "memory_outlives";

/// A setting of a tier.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Setting {
    /// Its name in the tier's object.
    pub name: &'static str,
    /// Its kind of value.
    pub kind: Kind,
    /// The key of a user's configuration for it; `None` for settings that only programs and tests use.
    pub key: Option<Key>,
}

/// Kind of a setting's value.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Kind {
    /// On or off.
    Bool,
    /// On, off, or `auto`: decided by the code.
    Switch,
    /// An integer.
    Whole {
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
    },
    /// A size in bytes. Its key is in GiB, which may be a fraction.
    Bytes {
        /// The maximum.
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
        /// Those whose address may have a name before `@`, as in `abfss://container@account.dfs.core.windows.net`.
        with_name: &'static [&'static str],
    },
    /// Absolute paths without duplicates. A key may have them as one text, separated by `:`.
    Paths {
        /// Maximum number of paths.
        max: usize,
    },
    /// Servers, each `host:port`, without duplicates. A key may have them as one text, separated by `,`.
    Servers {
        /// Maximum number of servers.
        max: usize,
    },
}

/// A key of a user's configuration, with its documentation.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Key {
    /// Its name, which is unique over all tiers.
    pub name: &'static str,
    /// One or two sentences for the table of keys.
    pub meaning: &'static str,
    /// Unit of the value; empty for names and switches.
    pub unit: &'static str,
    /// Its default value.
    pub default: Preset,
    /// Without a `default`: a description of the value.
    pub by_default: &'static str,
    /// Without a `default`: how the machine determines it.
    pub by_machine: Option<ByMachine>,
    /// Its value in the example of a configuration, as YAML; empty = not in the example.
    pub example: &'static str,
    /// Its names in files with `ucm_connectors`.
    pub seeds: &'static [&'static str],
    /// The name of the key there of which it is half, rounded up; empty = none.
    pub half_of_seed: &'static str,
    /// The words that this build accepts; empty = all.
    pub only: &'static [&'static str],
    /// What to do instead of using others.
    pub instead: &'static str,
    /// Why a pipeline with this tier needs it; empty = it is optional.
    pub required: &'static str,
    /// Its dependency on another key.
    pub rule: Option<Rule>,
    /// Whether it came after a release that had its tier, and its default means how that release behaved. At its default
    /// it is no part of a depot's identity: an upgraded depot takes over from the one before at the same socket.
    pub came_later: bool,
}

impl Key {
    /// A key without name or default, as a base for declarations.
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
        came_later: false,
    };
}

/// Default value of a key.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum Preset {
    /// On or off.
    Bool(bool),
    /// A number.
    Whole(u64),
    /// A word.
    Word(&'static str),
    /// None: the tier does not get it, or the machine determines it.
    Nothing,
}

/// How the machine determines a key's default.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ByMachine {
    /// `kvdepot` in the user's cache directory.
    CacheDirectory {
        /// A setting that is true in this case, and false otherwise: the directory must be created.
        tell: &'static str,
    },
    /// The Python interpreter that the depot's configuration is read by.
    Interpreter,
    /// A share of the disks under the tier's paths.
    DiskShare {
        /// Percentage of the size of the disks under configured paths.
        percent: u64,
        /// Percentage of the free space, if the paths are defaults, too.
        free_percent: u64,
    },
}

/// Dependency of a key on another one of its tier.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Rule {
    /// It has no effect without the other.
    Needs {
        /// The other key.
        key: &'static str,
        /// Description of the mistake, and what to do.
        text: &'static str,
    },
    /// It has no effect unless the other, a URL, has one of a few schemes.
    Scheme {
        /// The other key.
        key: &'static str,
        /// The schemes, without `://`.
        of: &'static [&'static str],
        /// Description of the mistake, and what to do.
        text: &'static str,
    },
    /// It must not be set if the other has a certain value.
    Not {
        /// The other key.
        key: &'static str,
        /// Its value.
        value: &'static str,
        /// Description of the mistake, and what to do.
        text: &'static str,
    },
}

impl Kind {
    /// Checks that a tier accepts this value. The error describes the accepted values.
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
                format!("an integer between {min} and {max}"),
            ),
            Self::Bytes { max } => (
                value.as_u64().is_some_and(|value| value <= max),
                format!("an integer number of bytes, {max} at most"),
            ),
            Self::Choice { of } => (value.as_str().is_some_and(|value| of.contains(&value)), one_of(of)),
            Self::Text => (value.is_string() || value.is_null(), "a text".to_owned()),
            Self::Path => (value.is_string() || value.is_null(), "a path".to_owned()),
            Self::Url { of, with_name } => (
                value.is_null() || value.as_str().is_some_and(|text| is_url(text, of, with_name)),
                format!("a URL that begins with {}", one_of_schemes(of)),
            ),
            Self::Paths { max } => (list(max), format!("a list of 1 to {max} paths")),
            Self::Servers { max } => (list(max), format!("a list of 1 to {max} servers, each host:port")),
        };
        if good { Ok(()) } else { Err(expected) }
    }
}

/// Returns whether a text is `scheme://` followed by an address without user name, password, query or fragment. Some
/// schemes may have a name before `@`.
fn is_url(text: &str, schemes: &[&str], with_name: &[&str]) -> bool {
    let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| schemes.contains(scheme)) else {
        return false;
    };
    let rest = match rest.split_once('@').filter(|_| with_name.contains(&scheme)) {
        Some((name, _)) if name.is_empty() || name.contains([':', '/']) => return false,
        Some((_, rest)) => rest,
        None => rest,
    };
    !rest.is_empty()
        && !rest.starts_with('/')
        && text.chars().all(|c| c.is_ascii_graphic() && !"?#".contains(c))
        && !rest.contains('@')
}

/// Returns a URL as it may be shown: what stands before an `@` may hold a password, in which other separators may occur.
pub(crate) fn without_user(url: &str) -> String {
    let Some((before, host)) = url.rsplit_once('@') else { return url.to_owned() };
    let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
    if scheme.is_empty() { format!("…@{host}") } else { format!("{scheme}://…@{host}") }
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

/// A setting that is on, off, or decided by the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    On,
    Off,
    Auto,
}

/// The object that a tier is opened with. Every key is one of its settings, and every value is of its kind (P10).
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
        let error = Error::new(ErrorKind::Config, format!("a tier's setting must be {expected}"))
            .with("tier", self.tier)
            .with("key", key);
        match self.map.get(key) {
            Some(Value::String(text)) => error.with("value", Value::String(without_user(text))),
            Some(value) => error.with("value", value),
            None => error.with("value", Value::Null),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        debug_assert!(
            self.settings.iter().any(|setting| setting.name == key),
            "{key} is not a setting of {}",
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

    /// Returns `true`, `false` or `"auto"` as a switch.
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
            *out = value.as_u64().ok_or_else(|| self.wrong(key, "an integer, 0 or more"))?;
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

    /// Returns a list of texts, which is required.
    pub(crate) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let wrong = || self.wrong(key, "a list of texts");
        let items = self.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
    }

    /// Returns a list of paths, which is required.
    pub(crate) fn paths(&self, key: &str) -> Result<Vec<PathBuf>> {
        let wrong = || self.wrong(key, "a list of paths");
        let items = self.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        items.iter().map(|item| item.as_str().map(PathBuf::from).ok_or_else(wrong)).collect()
    }
}

/// Returns the known name with the fewest single-letter edits to `name`; empty if none is known.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_user() {
        for (url, shown) in [
            ("https://host:9000/p", "https://host:9000/p"),
            ("http://user:secret@host:9000", "http://…@host:9000"),
            ("http://user:se/cr@t://x@host", "http://…@host"),
            ("user:secret@host", "…@host"),
        ] {
            assert_eq!(without_user(url), shown);
        }
    }

    #[test]
    fn an_error_shows_no_password() {
        let kind = Kind::Url { of: &["http"], with_name: &[] };
        let settings = [Setting { name: "endpoint", kind, key: None }];
        let given = serde_json::json!({"endpoint": "http://user:secret@host"});
        let Err(error) = Fields::new("Object", &given, &settings) else { panic!("a user is refused") };
        let text = format!("{error} {error:?}");
        assert!(text.contains("http://…@host") && !text.contains("secret"), "{text}");
    }
}
