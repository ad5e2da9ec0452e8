//! The priority of a dumped block in the pool.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// How long the pool keeps a block that nobody uses, compared with others. Tiers do not know priorities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// Evicted before all others, and written to no tier. Its first use makes it `Normal`.
    Low,
    /// Evicted in the order of the eviction policy.
    #[default]
    Normal,
    /// Evicted after all others, while such blocks take at most half of the pool.
    High,
}

/// The names that [`Priority::from_name`] knows.
pub const PRIORITY_NAMES: [&str; 3] = ["low", "normal", "high"];

impl Priority {
    /// Returns the priority with this name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "low" => Ok(Self::Low),
            "normal" => Ok(Self::Normal),
            "high" => Ok(Self::High),
            _ => Err(Error::new(ErrorKind::Config, "no such priority: use one of the known ones")
                .with("priority", name)
                .with("known", PRIORITY_NAMES.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_have_names_and_an_order() {
        let all = PRIORITY_NAMES.map(|name| Priority::from_name(name).unwrap());
        assert_eq!(all, [Priority::Low, Priority::Normal, Priority::High]);
        assert!(all.is_sorted());
        let error = Priority::from_name("urgent").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("low, normal, high"), "{error}");
    }
}
