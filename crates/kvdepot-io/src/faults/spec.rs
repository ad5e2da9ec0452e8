//! The text form of a plan of faults: `read_eio=0.1,write_enospc=0.02,slow_ms=20,read_slow=0.5,seed=7`.

use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

use super::plan::{Fault, FaultOp, Faults};

/// The keys of probabilities. `slow_ms` replaces the duration of `Slow`.
const CHANCES: [(&str, FaultOp, Fault); 17] = [
    ("open_eio", FaultOp::Open, Fault::Eio),
    ("read_eio", FaultOp::Read, Fault::Eio),
    ("read_short", FaultOp::Read, Fault::Short),
    ("read_flip", FaultOp::Read, Fault::Flip),
    ("read_slow", FaultOp::Read, Fault::Slow(Duration::ZERO)),
    ("read_hang", FaultOp::Read, Fault::Hang),
    ("create_eio", FaultOp::Create, Fault::Eio),
    ("write_eio", FaultOp::Write, Fault::Eio),
    ("write_enospc", FaultOp::Write, Fault::NoSpace),
    ("write_short", FaultOp::Write, Fault::Short),
    ("write_slow", FaultOp::Write, Fault::Slow(Duration::ZERO)),
    ("write_hang", FaultOp::Write, Fault::Hang),
    ("publish_eio", FaultOp::Publish, Fault::Eio),
    ("publish_late", FaultOp::Publish, Fault::Late),
    ("meta_eio", FaultOp::Meta, Fault::Eio),
    ("grow_enospc", FaultOp::Grow, Fault::NoSpace),
    ("flush_eio", FaultOp::Flush, Fault::Eio),
];

/// The delay of `read_slow` and `write_slow` without `slow_ms`.
const SLOW_MS_DEFAULT: u64 = 10;

impl Faults {
    /// Parses a plan: `key=value` pairs separated by commas, with probabilities from 0 to 1 and the integers `seed` and
    /// `slow_ms`.
    pub fn from_spec(spec: &str) -> Result<Self> {
        let bad =
            |what: &str, part: &str| Error::new(ErrorKind::Config, what.to_owned()).with("faults", part);
        let (mut seed, mut slow_ms, mut chances) = (0, SLOW_MS_DEFAULT, Vec::new());
        for part in spec.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) =
                part.split_once('=').ok_or_else(|| bad("a fault is spelled key=value", part))?;
            let integer = || value.parse::<u64>().map_err(|e| bad("not a whole number", part).with_source(e));
            match key {
                "seed" => seed = integer()?,
                "slow_ms" => slow_ms = integer()?,
                _ => {
                    let &(_, op, fault) =
                        CHANCES.iter().find(|(name, ..)| *name == key).ok_or_else(|| {
                            let known: Vec<&str> = CHANCES.iter().map(|(name, ..)| *name).collect();
                            bad("no such fault", part).with("known", known.join(" "))
                        })?;
                    let chance: f64 = value.parse().map_err(|e| bad("not a number", part).with_source(e))?;
                    if !(0.0..=1.0).contains(&chance) {
                        return Err(bad("a probability must be between 0 and 1", part));
                    }
                    chances.push((op, fault, chance));
                }
            }
        }
        let faults = Self::seeded(seed);
        for (op, fault, chance) in chances {
            let fault = match fault {
                Fault::Slow(_) => Fault::Slow(Duration::from_millis(slow_ms)),
                other => other,
            };
            faults.chance(op, fault, chance);
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_parse_or_say_why() {
        let faults = Faults::from_spec("read_eio=1, seed=7").unwrap();
        assert!(faults.strike(FaultOp::Read).is_err());
        assert!(faults.strike(FaultOp::Write).is_ok());
        for text in ["read_eio", "read_eio=2", "read_eio=x", "seed=-1", "reed_eio=0.1"] {
            assert_eq!(Faults::from_spec(text).unwrap_err().kind(), ErrorKind::Config, "{text}");
        }
    }
}
