//! A level of a replay, as JSON.

use kvdepot_core::machine::{Placement, WriteWhen};
use kvdepot_core::replay::Level;
use kvdepot_core::{Error, ErrorKind, Result};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LevelJson {
    policy: String,
    capacity: u64,
    #[serde(default)]
    write: Option<String>,
    #[serde(default)]
    promote: bool,
    /// Blocks.
    #[serde(default)]
    writes_per_day: u64,
}

impl LevelJson {
    pub(crate) fn level(self) -> Result<Level> {
        let write = match self.write.as_deref() {
            None | Some("through") => WriteWhen::Through,
            Some("second_use") => WriteWhen::OnSecondUse,
            Some("cold") => WriteWhen::WhenCold,
            Some("demoted") => WriteWhen::OnDemotion,
            Some(other) => {
                return Err(Error::new(
                    ErrorKind::Config,
                    "write is one of through, second_use, cold and demoted",
                )
                .with("write", other));
            }
        };
        let placement = Placement { write, promote: self.promote };
        let Self { policy, capacity, writes_per_day, .. } = self;
        Ok(Level { policy, capacity, placement, writes_per_day })
    }
}
