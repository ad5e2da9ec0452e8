//! A pipeline is data: the pool and the tiers under it, in order, as in `Cache|Posix`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::PIPELINE_TEXT_BYTES_MAX;

/// What the pool is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// Keeps blocks as long as it has room.
    Cache,
    /// Only a place to pass through: a block that the tiers have is given up.
    Staging,
}

impl PoolKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Cache, Self::Staging];

    /// Its spelling in a pipeline.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cache => "Cache",
            Self::Staging => "Staging",
        }
    }
}

/// A place below the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TierKind {
    /// A directory: local SSD, NFS or another shared file system.
    Posix,
    /// A raw device or one large file, cut into slabs.
    Slab,
    /// DAX or CXL memory.
    Dax,
    /// A memory pool of another machine.
    Remote,
    /// An object store.
    Object,
    /// Says that it has all, and gives zeros: measures what is above it.
    Fake,
    /// Has nothing and keeps nothing.
    Empty,
}

impl TierKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 7] =
        [Self::Posix, Self::Slab, Self::Dax, Self::Remote, Self::Object, Self::Fake, Self::Empty];

    /// Its spelling in a pipeline.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Posix => "Posix",
            Self::Slab => "Slab",
            Self::Dax => "Dax",
            Self::Remote => "Remote",
            Self::Object => "Object",
            Self::Fake => "Fake",
            Self::Empty => "Empty",
        }
    }

    /// Whether this build has it; the others come with a later release.
    pub const fn available(self) -> bool {
        matches!(self, Self::Posix | Self::Remote | Self::Fake | Self::Empty)
    }

    /// An `Unsupported` error for a tier that this build does not have.
    pub fn ensure_available(self) -> Result<()> {
        if self.available() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, "this tier comes with a later release").with("tier", self))
    }
}

/// The pool and the tiers under it, nearest first. Each kind stands there once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PipelineSpec {
    /// What the pool is for.
    pub pool: PoolKind,
    /// The tiers, in the order in which they are asked.
    pub tiers: Vec<TierKind>,
}

impl PipelineSpec {
    /// Reads `Cache|Posix`. A single tier is short for a pool that keeps nothing: `Posix` is `Staging|Posix`.
    pub fn parse(text: &str) -> Result<Self> {
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
                return Err(bad("the pool stands once, and first").with("name", name));
            }
            let tier = tier_by_name(name).ok_or_else(|| unknown(name).with("pipeline", text))?;
            if tiers.contains(&tier) {
                return Err(bad("a tier stands in the pipeline twice").with("tier", tier));
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

fn tier_by_name(name: &str) -> Option<TierKind> {
    TierKind::ALL.into_iter().find(|tier| tier.as_str() == name)
}

/// P10: an unknown name is an error that names the nearest known one.
fn unknown(name: &str) -> Error {
    let known = || PoolKind::ALL.map(PoolKind::as_str).into_iter().chain(TierKind::ALL.map(TierKind::as_str));
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

impl fmt::Display for TierKind {
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

impl FromStr for PipelineSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_come_back() {
        for text in
            ["Cache", "Cache|Posix", "Cache|Empty", "Cache|Remote|Posix", "Staging|Posix", "Cache|Dax"]
        {
            assert_eq!(PipelineSpec::parse(text).unwrap().to_string(), text);
        }
        for tier in ["Posix", "Fake", "Empty"] {
            assert_eq!(PipelineSpec::parse(tier).unwrap().to_string(), format!("Staging|{tier}"));
        }
        assert_eq!(PipelineSpec::parse(" Cache | Posix ").unwrap().to_string(), "Cache|Posix");
    }

    #[test]
    fn mistakes_are_named() {
        let long = "Cache|".repeat(100);
        for (text, wants) in [
            ("", "empty"),
            ("Cache|", "nothing on one side"),
            ("Cache|Posxi", "nearest=Posix"),
            ("cahce|Posix", "nearest=Cache"),
            ("Cache|posix", "known=Cache Staging Posix Slab Dax Remote Object Fake Empty"),
            ("Cache|Posix|Posix", "twice"),
            ("Posix|Cache", "first"),
            ("Cache|Cache", "first"),
            ("Staging", "needs a tier"),
            ("Remote|Posix", "begins with"),
            (long.as_str(), "too long"),
        ] {
            let error = PipelineSpec::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(wants), "{text}: {error}");
        }
    }

    #[test]
    fn later_tiers_say_so() {
        assert!(TierKind::Posix.ensure_available().is_ok());
        let error = TierKind::Slab.ensure_available().unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().contains("later release")),
            (ErrorKind::Unsupported, true)
        );
    }
}
