//! A pipeline as data: the pool and the tiers below it, in order, as in `Cache|Posix`.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::PIPELINE_TEXT_BYTES_MAX;

/// Purpose of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// Keeps blocks as long as it has space.
    Cache,
    /// Only passes blocks on: a block that the tiers have is dropped.
    Staging,
}

impl PoolKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Cache, Self::Staging];

    /// Returns its spelling in a pipeline.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cache => "Cache",
            Self::Staging => "Staging",
        }
    }
}

/// Names that a pipeline may have in a later release.
pub const LATER: [&str; 0] = [];

/// The pool and the tiers below it, nearest first. Each kind appears once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PipelineSpec {
    /// The purpose of the pool.
    pub pool: PoolKind,
    /// The tiers, in the order in which they are queried.
    pub tiers: Vec<&'static str>,
}

impl PipelineSpec {
    /// Parses text such as `Cache|Posix`, with the names of the tiers of this build. A single tier is short for a pool
    /// that keeps nothing: `Posix` is `Staging|Posix`.
    pub fn parse(text: &str, known_tiers: &[&'static str]) -> Result<Self> {
        if text.len() > PIPELINE_TEXT_BYTES_MAX {
            return Err(Error::new(ErrorKind::Config, "the pipeline's spelling is too long")
                .with("bytes", text.len())
                .with("bytes_max", PIPELINE_TEXT_BYTES_MAX));
        }
        let bad = |what: &str| Error::new(ErrorKind::Config, what.to_owned()).with("pipeline", text);
        if text.trim().is_empty() {
            return Err(bad("the pipeline is empty: write Cache|Posix, for example"));
        }
        let names: Vec<&str> = text.split('|').map(str::trim).collect();
        if names.contains(&"") {
            return Err(bad("the pipeline has a '|' with nothing on one side"));
        }
        let first_pool = PoolKind::ALL.into_iter().find(|pool| pool.as_str() == names[0]);
        let tier_names = if first_pool.is_some() { &names[1..] } else { &names[..] };
        let mut tiers = Vec::with_capacity(tier_names.len());
        for &name in tier_names {
            if PoolKind::ALL.iter().any(|pool| pool.as_str() == name) {
                return Err(bad("a pipeline has one pool, first").with("name", name));
            }
            let known = known_tiers.iter().find(|tier| **tier == name);
            let tier = *known.ok_or_else(|| unknown(name, known_tiers).with("pipeline", text))?;
            if tiers.contains(&tier) {
                return Err(bad("a tier is in the pipeline twice").with("tier", tier));
            }
            tiers.push(tier);
        }
        let pool = match first_pool {
            None if tiers.len() > 1 => {
                return Err(bad("a pipeline of several tiers begins with Cache or Staging"));
            }
            Some(PoolKind::Staging) if tiers.is_empty() => {
                return Err(bad(
                    "Staging keeps nothing, so it needs a tier: write Staging|Posix, for example",
                ));
            }
            pool => pool.unwrap_or(PoolKind::Staging),
        };
        Ok(Self { pool, tiers })
    }
}

/// An unknown name is an error that names the nearest known one (P10).
fn unknown(name: &str, tiers: &[&'static str]) -> Error {
    if LATER.contains(&name) {
        return Error::new(ErrorKind::Unsupported, "this tier comes with a later release").with("tier", name);
    }
    let known = || PoolKind::ALL.map(PoolKind::as_str).into_iter().chain(tiers.iter().copied());
    let lower = name.to_lowercase();
    let nearest =
        known().min_by_key(|candidate| strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()));
    Error::new(ErrorKind::Config, "unknown name in the pipeline")
        .with("name", name)
        .with("nearest", nearest.unwrap_or_default())
        .with("known", known().collect::<Vec<_>>().join(" "))
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for PipelineSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pool)?;
        self.tiers.iter().try_for_each(|tier| write!(f, "|{tier}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PipelineSpec> {
        PipelineSpec::parse(text, &["Posix", "Remote", "Fake", "Empty"])
    }

    #[test]
    fn spellings_come_back() {
        for text in ["Cache", "Cache|Posix", "Cache|Empty", "Cache|Remote|Posix", "Staging|Posix"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        for tier in ["Posix", "Fake", "Empty"] {
            assert_eq!(parse(tier).unwrap().to_string(), format!("Staging|{tier}"));
        }
        assert_eq!(parse(" Cache | Posix ").unwrap().to_string(), "Cache|Posix");
    }

    #[test]
    fn mistakes_are_named() {
        let long = "Cache|".repeat(100);
        for (text, wants) in [
            ("", "empty"),
            ("Cache|", "nothing on one side"),
            ("Cache|Posxi", "nearest=Posix"),
            ("cahce|Posix", "nearest=Cache"),
            ("Cache|posix", "known=Cache Staging Posix Remote Fake Empty"),
            ("Cache|Posix|Posix", "twice"),
            ("Posix|Cache", "first"),
            ("Cache|Cache", "first"),
            ("Staging", "needs a tier"),
            ("Remote|Posix", "begins with"),
            (long.as_str(), "too long"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(wants), "{text}: {error}");
        }
    }

    #[test]
    fn later_tiers_say_so() {
        for tier in LATER {
            let error = parse(&format!("Cache|{tier}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("later release"), "{error}");
        }
    }
}
