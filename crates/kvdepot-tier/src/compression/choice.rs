//! Which blocks of a namespace are encoded, and how: decided by what was measured on some of them.

use std::time::Duration;

use super::measure::{Measured, Outcome};
use crate::encoding::Encoding;

/// Blocks that are measured before a namespace is decided.
const SAMPLES: u32 = 4;
/// Blocks in a row that did not become smaller, after which a namespace is measured again.
const LOSSES_MAX: u32 = 8;
/// Blocks of an encoded namespace after which it is measured again.
const BLOCKS_ON: u64 = 8192;
/// The same of one that is left plain. It doubles with each time that the outcome is the same, up to `BLOCKS_ON`.
const BLOCKS_OFF: u64 = 512;
/// Blocks after which samples that were not reported are given up.
const BLOCKS_WAITED: u64 = 512;
/// The smallest part of a block that `auto` must save: a tenth.
const SAVING_PERCENT: u64 = 10;
/// The slowest rate of a thread at which `auto` encodes, in bytes a second.
const ENCODE_RATE_MIN: u128 = 100_000_000;
/// The slowest rate of a thread at which `auto` decodes, in bytes a second: reads wait for it.
const DECODE_RATE_MIN: u128 = 400_000_000;

/// Whether a tier encodes blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Never.
    #[default]
    Off,
    /// Where it saves a tenth, at a rate that does not slow reads down.
    Auto,
    /// Every block that takes fewer pages then.
    On,
}

/// What to do with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Store it as it is.
    Plain,
    /// Measure it, report that, and ask again for this block.
    Measure,
    /// Encode it, and report whether it became smaller.
    Encode(Encoding),
}

#[derive(Debug)]
enum Phase {
    /// Samples are handed out and awaited.
    Sampling { given: u32, reported: u32, waited: u64, sum: Measured },
    /// Decided, for this many more blocks.
    Decided { encoding: Option<Encoding>, blocks_left: u64, losses: u32 },
}

const SAMPLING: Phase = Phase::Sampling {
    given: 0,
    reported: 0,
    waited: 0,
    sum: Measured {
        plain_bytes: 0,
        outcomes: [Outcome { stored_bytes: 0, encode: Duration::ZERO, decode: Duration::ZERO };
            Encoding::ALL.len()],
    },
};

/// The state of one namespace.
#[derive(Debug)]
pub(super) struct Choice {
    is_forced: bool,
    phase: Phase,
    blocks_off: u64,
    /// What was decided last.
    last: Option<Encoding>,
}

impl Choice {
    /// Begins to sample. `is_forced` encodes also what `auto` would leave plain.
    pub(super) const fn new(is_forced: bool) -> Self {
        Self { is_forced, phase: SAMPLING, blocks_off: BLOCKS_OFF, last: None }
    }

    /// Returns what to do with the next block.
    pub(super) fn next(&mut self) -> Plan {
        match &mut self.phase {
            Phase::Sampling { given, .. } if *given < SAMPLES => {
                *given += 1;
                Plan::Measure
            }
            Phase::Sampling { waited, .. } => {
                *waited += 1;
                if *waited == BLOCKS_WAITED {
                    self.phase = SAMPLING;
                }
                self.meanwhile()
            }
            Phase::Decided { blocks_left: 0, .. } => {
                self.phase = SAMPLING;
                self.next()
            }
            Phase::Decided { encoding, blocks_left, .. } => {
                *blocks_left -= 1;
                encoding.map_or(Plan::Plain, Plan::Encode)
            }
        }
    }

    /// Returns what to do with a block as long as nothing is decided: what was decided before.
    fn meanwhile(&self) -> Plan {
        let first = if self.is_forced { Some(Encoding::Halves) } else { None };
        self.last.or(first).map_or(Plan::Plain, Plan::Encode)
    }

    /// Takes a sample in. Returns what to do with the block that was measured.
    pub(super) fn measured(&mut self, sample: &Measured) -> Plan {
        if let Phase::Sampling { reported, sum, .. } = &mut self.phase {
            *reported += 1;
            sum.plain_bytes += sample.plain_bytes;
            for (sum, one) in sum.outcomes.iter_mut().zip(&sample.outcomes) {
                sum.stored_bytes += one.stored_bytes;
                sum.encode += one.encode;
                sum.decode += one.decode;
            }
            if *reported >= SAMPLES {
                let encoding = best(sum, self.is_forced);
                self.decide(encoding);
            } else if self.is_forced {
                return best(sample, true).map_or(Plan::Plain, Plan::Encode);
            }
        }
        match &self.phase {
            Phase::Decided { encoding, .. } => encoding.map_or(Plan::Plain, Plan::Encode),
            Phase::Sampling { .. } => self.meanwhile(),
        }
    }

    fn decide(&mut self, encoding: Option<Encoding>) {
        let blocks_left = if encoding.is_some() {
            BLOCKS_ON
        } else {
            let blocks = self.blocks_off;
            self.blocks_off = (2 * blocks).min(BLOCKS_ON);
            blocks
        };
        self.last = encoding;
        self.phase = Phase::Decided { encoding, blocks_left, losses: 0 };
    }

    /// Notes whether an encoded block became smaller by enough. Too many in a row that did not leave the namespace plain,
    /// for longer each time, even if samples say otherwise: they count bytes, and a block must save a page.
    pub(super) fn encoded(&mut self, is_smaller: bool) {
        if is_smaller {
            self.blocks_off = BLOCKS_OFF;
        }
        let Phase::Decided { losses, .. } = &mut self.phase else { return };
        *losses = if is_smaller { 0 } else { *losses + 1 };
        if *losses >= LOSSES_MAX && !self.is_forced {
            self.decide(None);
        }
    }

    /// Returns what was decided last, if anything was.
    pub(super) const fn decided(&self) -> Option<Encoding> {
        self.last
    }
}

/// Returns the encoding that makes blocks the smallest, of those that pay; with `is_forced`, of all: what a block does not
/// gain by is noticed when it is encoded.
fn best(sum: &Measured, is_forced: bool) -> Option<Encoding> {
    let is_fast = |took: Duration, rate_min: u128| {
        u128::from(sum.plain_bytes) * 1_000_000_000 >= took.as_nanos() * rate_min
    };
    let pays = |outcome: &Outcome| {
        let saves = outcome.stored_bytes * 100 <= sum.plain_bytes * (100 - SAVING_PERCENT);
        saves && is_fast(outcome.encode, ENCODE_RATE_MIN) && is_fast(outcome.decode, DECODE_RATE_MIN)
    };
    let each = Encoding::ALL.into_iter().zip(&sum.outcomes);
    let good = each.filter(|(_, outcome)| is_forced || pays(outcome));
    good.min_by_key(|(_, outcome)| outcome.stored_bytes).map(|(encoding, _)| encoding)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: u64 = 1_000_000;

    /// A sample: bytes stored by each encoding, and the rates of both in MB/s.
    fn sample(bytes: u64, halves: u64, encode: u64, decode: u64) -> Measured {
        let outcome = |stored_bytes| Outcome {
            stored_bytes,
            encode: Duration::from_micros(PLAIN / encode),
            decode: Duration::from_micros(PLAIN / decode),
        };
        Measured { plain_bytes: PLAIN, outcomes: [outcome(bytes), outcome(halves)] }
    }

    fn settle(choice: &mut Choice, sample: &Measured) -> Plan {
        let mut plan = Plan::Plain;
        for _ in 0..SAMPLES {
            assert_eq!(choice.next(), Plan::Measure);
            plan = choice.measured(sample);
        }
        plan
    }

    #[test]
    fn the_smallest_encoding_is_chosen_if_it_saves_a_tenth_and_is_fast() {
        for (bytes, halves, encode, decode, expected) in [
            (900_000, 700_000, 500, 1000, Some(Encoding::Halves)),
            (850_000, 990_000, 500, 1000, Some(Encoding::Bytes)),
            (900_000, 950_000, 500, 1000, Some(Encoding::Bytes)),
            (900_001, 950_000, 500, 1000, None),
            (600_000, 700_000, 99, 1000, None),
            (600_000, 700_000, 500, 399, None),
            (600_000, 700_000, 100, 400, Some(Encoding::Bytes)),
        ] {
            let mut choice = Choice::new(false);
            let plan = settle(&mut choice, &sample(bytes, halves, encode, decode));
            let wanted = expected.map_or(Plan::Plain, Plan::Encode);
            assert_eq!(
                (plan, choice.next(), choice.decided()),
                (wanted, wanted, expected),
                "{bytes} {halves}"
            );
        }
    }

    #[test]
    fn a_namespace_is_plain_until_it_is_decided() {
        let mut choice = Choice::new(false);
        let good = sample(700_000, 700_000, 500, 1000);
        (0..SAMPLES).for_each(|_| assert_eq!(choice.next(), Plan::Measure));
        assert_eq!(choice.next(), Plan::Plain, "other writers do not wait for samples");
        assert_eq!(choice.measured(&good), Plan::Plain);
        (2..SAMPLES).for_each(|_| assert_eq!(choice.measured(&good), Plan::Plain));
        assert_eq!(choice.measured(&good), Plan::Encode(Encoding::Bytes));
    }

    #[test]
    fn forced_blocks_are_all_tried_whatever_others_did() {
        let mut choice = Choice::new(true);
        assert_eq!(choice.next(), Plan::Measure);
        assert_eq!(choice.measured(&sample(999_000, 999_001, 1, 1)), Plan::Encode(Encoding::Bytes));
        assert_eq!(choice.next(), Plan::Measure);
        assert_eq!(choice.measured(&sample(PLAIN, PLAIN + 8, 1, 1)), Plan::Encode(Encoding::Bytes));
        let mut choice = Choice::new(true);
        settle(&mut choice, &sample(PLAIN, PLAIN + 8, 1, 1));
        for _ in 0..BLOCKS_ON {
            assert_eq!(choice.next(), Plan::Encode(Encoding::Bytes));
            choice.encoded(false);
        }
        assert_eq!(choice.next(), Plan::Measure);
    }

    #[test]
    fn what_was_left_plain_is_measured_again_ever_more_rarely() {
        let mut choice = Choice::new(false);
        let bad = sample(PLAIN, PLAIN, 500, 1000);
        for blocks in [512, 1024, 2048, 4096, 8192, 8192] {
            assert_eq!(settle(&mut choice, &bad), Plan::Plain);
            (0..blocks).for_each(|_| assert_eq!(choice.next(), Plan::Plain));
        }
        settle(&mut choice, &sample(PLAIN, 700_000, 500, 1000));
        (0..BLOCKS_ON).for_each(|_| assert_eq!(choice.next(), Plan::Encode(Encoding::Halves)));
        choice.encoded(true);
        assert_eq!(settle(&mut choice, &bad), Plan::Plain);
        (0..BLOCKS_OFF).for_each(|_| assert_eq!(choice.next(), Plan::Plain));
        assert_eq!(choice.next(), Plan::Measure);
    }

    #[test]
    fn losses_in_a_row_end_an_encoding() {
        let mut choice = Choice::new(false);
        let good = sample(PLAIN, 700_000, 500, 1000);
        settle(&mut choice, &good);
        for _ in 0..3 {
            (1..LOSSES_MAX).for_each(|_| choice.encoded(false));
            choice.encoded(true);
        }
        assert_eq!(choice.next(), Plan::Encode(Encoding::Halves), "not in a row");
        (0..LOSSES_MAX).for_each(|_| choice.encoded(false));
        (0..BLOCKS_OFF).for_each(|_| assert_eq!(choice.next(), Plan::Plain));
        assert_eq!(choice.next(), Plan::Measure);
    }

    /// Blocks of a page shrink in bytes, and never by a page.
    #[test]
    fn samples_that_blocks_belie_cost_ever_less() {
        let mut choice = Choice::new(false);
        let good = sample(PLAIN, 700_000, 500, 1000);
        let mut tried = 0;
        for _ in 0..20_000 {
            let mut plan = choice.next();
            tried += u32::from(plan != Plan::Plain);
            if plan == Plan::Measure {
                plan = choice.measured(&good);
            }
            if let Plan::Encode(_) = plan {
                choice.encoded(false);
            }
        }
        assert!(tried < 100, "{tried} of 20,000 blocks were measured or encoded");
    }

    #[test]
    fn lost_samples_are_replaced() {
        let mut choice = Choice::new(false);
        (0..SAMPLES).for_each(|_| assert_eq!(choice.next(), Plan::Measure));
        (0..BLOCKS_WAITED).for_each(|_| assert_eq!(choice.next(), Plan::Plain));
        assert_eq!(choice.next(), Plan::Measure);
    }
}
