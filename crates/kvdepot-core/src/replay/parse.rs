//! Parsers of traces: Mooncake's lines, and sessions of nested requests with their own hashes.

use std::fmt;

use serde::Deserialize;
use serde::de::Visitor;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::block_number;
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockHash;

/// A hash in a trace: a number, or a text such as 32 hex digits.
#[derive(Clone, Copy)]
struct Id(u64);

/// Milliseconds; as a text it is in nanoseconds.
struct Time(u64);

struct IdVisitor;
struct TimeVisitor;

impl Visitor<'_> for IdVisitor {
    type Value = Id;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a hash: a whole number or a text")
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<Id, E> {
        Ok(Id(xxh3_64(&number.to_le_bytes())))
    }

    fn visit_i64<E>(self, number: i64) -> std::result::Result<Id, E> {
        Ok(Id(xxh3_64(&number.to_le_bytes())))
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<Id, E> {
        Ok(Id(hex_hash(text).map_or_else(|| xxh3_64(text.as_bytes()), |hash| block_number(&hash))))
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(IdVisitor)
    }
}

impl Visitor<'_> for TimeVisitor {
    type Value = Time;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("milliseconds as a number, or nanoseconds as a text")
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<Time, E> {
        Ok(Time(number))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> std::result::Result<Time, E> {
        if number.is_finite() && number >= 0.0 {
            return Ok(Time(number as u64));
        }
        Err(E::custom(format_args!("{number} is not a time")))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Time, E> {
        let nanoseconds: u64 = text.parse().map_err(|_| E::custom(format_args!("{text:?} is not a time")))?;
        Ok(Time(nanoseconds / 1_000_000))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(TimeVisitor)
    }
}

fn hex_hash(text: &str) -> Option<BlockHash> {
    let digits = text.as_bytes();
    if digits.len() != 32 {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = [char::from(pair[0]).to_digit(16)?, char::from(pair[1]).to_digit(16)?];
        *byte = (high * 16 + low) as u8;
    }
    Some(BlockHash(bytes))
}

/// A line of either kind.
#[derive(Deserialize)]
struct Row {
    timestamp: Option<Time>,
    #[serde(default)]
    input_length: u64,
    #[serde(default)]
    output_length: u64,
    hash_ids: Option<Vec<Id>>,
    id: Option<serde_json::Value>,
    requests: Option<Vec<Turn>>,
}

/// A request of a session; a subagent has its own requests.
#[derive(Deserialize)]
struct Turn {
    /// Seconds since the start of the session.
    #[serde(default)]
    t: f64,
    #[serde(default, rename = "in")]
    input_length: u64,
    #[serde(default, rename = "out")]
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<Id>,
    #[serde(default)]
    requests: Vec<Turn>,
}

impl Trace {
    /// Adds a line of JSON: one request in Mooncake's format, or an entire session.
    ///
    /// A number in `hash_ids` of a request means the same block in all lines; in a session, only within that session.
    pub fn push_json(&mut self, line: &str) -> Result<()> {
        self.push_json_later(line, 0)
    }

    /// Does the same for a file that begins `later_ms` after the trace.
    pub fn push_json_later(&mut self, line: &str, later_ms: u64) -> Result<()> {
        let row: Row = serde_json::from_str(line)
            .map_err(|e| Error::new(ErrorKind::Config, "no line of a trace").with("problem", e))?;
        match (row.timestamp, row.hash_ids, row.requests) {
            (Some(time), Some(ids), None) => {
                let blocks: Vec<u64> = ids.iter().map(|id| id.0).collect();
                self.push(time.0.saturating_add(later_ms), row.input_length, row.output_length, &blocks);
                Ok(())
            }
            (_, None, Some(turns)) => {
                let name = row.id.ok_or_else(|| missing("id"))?;
                self.push_turns(&turns, xxh3_64(name.to_string().as_bytes()), later_ms);
                Ok(())
            }
            (None, ..) => Err(missing("timestamp")),
            (_, None, None) => Err(missing("hash_ids")),
            _ => Err(Error::new(ErrorKind::Config, "a line of a trace is either a request or a session")),
        }
    }

    fn push_turns(&mut self, turns: &[Turn], session: u64, later_ms: u64) {
        for turn in turns {
            if !turn.hash_ids.is_empty() {
                let own = |id: &Id| xxh3_64_with_seed(&id.0.to_le_bytes(), session);
                let blocks: Vec<u64> = turn.hash_ids.iter().map(own).collect();
                let at_ms = ((turn.t * 1000.0) as u64).saturating_add(later_ms); // a negative or senseless time is 0
                self.push(at_ms, turn.input_length, turn.output_length, &blocks);
            }
            self.push_turns(&turn.requests, session, later_ms);
        }
    }
}

fn missing(key: &str) -> Error {
    Error::new(ErrorKind::Config, "a line of a trace lacks a key").with("key", key)
}
