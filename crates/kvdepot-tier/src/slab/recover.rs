//! What a start finds on the medium: reads the footers of full segments and walks through the open one.

use hashbrown::HashSet;
use kvdepot_core::{BlockKey, NamespaceId, Result};

use super::codec::{PAGE, size};
use super::footer;
use super::group::{self, Entry, Head};
use super::index::{Index, Place};
use super::log::{Log, Tail};
use super::medium::{Medium, read};
use super::table::Row;
use crate::format::header_tag;

/// The result of a recovery.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) index: Index,
    pub(super) log: Log,
    /// Number of the newest table of namespaces, and its rows.
    pub(super) table: u64,
    pub(super) rows: Vec<Row>,
    /// Blocks whose records a crash has torn, as far as their first pages show. The medium must learn that they do not
    /// exist: the next head says that all groups before it were synced.
    pub(super) torn: HashSet<BlockKey>,
}

/// What the segments of a medium hold.
#[derive(Debug)]
pub(super) struct Replayed {
    pub(super) index: Index,
    /// The newest life of each segment that counts, in ascending order.
    pub(super) lives: Vec<u64>,
    /// The newest of them.
    open: Option<(u64, Life)>,
    /// As in `Recovered`.
    torn: HashSet<BlockKey>,
}

/// Which records of the open segment are taken in that a crash may have torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unproven {
    /// All.
    All,
    /// Those whose first page is there.
    Begun,
}

/// The entries of one life of a segment.
#[derive(Debug)]
struct Life {
    rows: Vec<footer::Row>,
    /// From this row on a crash may have torn the records.
    proven: usize,
    /// The place for the next group; `None` = the segment is full.
    tail: Option<Tail>,
}

impl Medium {
    /// Reads what is on the medium, before anything is written there.
    pub(super) fn recover(&self) -> Result<Recovered> {
        let mark = self.mark();
        let (table, rows) = self.rows()?;
        let Replayed { index, open, torn, .. } = self.replay(&rows, Unproven::Begun)?;
        let log = match open {
            None => Log::new(self.id, self.shape, 0, Tail::BEGIN, Vec::new()),
            Some((sequence, Life { rows, tail: Some(tail), .. })) => {
                Log::new(self.id, self.shape, sequence, tail, rows)
            }
            Some((sequence, Life { tail: None, .. })) => {
                // Nothing more fits, so that the next write moves on to the next segment.
                let full = Tail { bytes: self.shape.segment_bytes, ..Tail::BEGIN };
                Log::new(self.id, self.shape, sequence, full, Vec::new())
            }
        };
        // What counts from now on must survive a power loss too: after a mere crash it may never have been synced.
        self.sync(mark)?;
        Ok(Recovered { index, log, table, rows, torn })
    }

    /// Reads the segments, and changes nothing. The rows tell which namespaces are current.
    pub(super) fn replay(&self, rows: &[Row], unproven: Unproven) -> Result<Replayed> {
        let current: HashSet<NamespaceId> = rows.iter().map(|row| row.id).collect();
        let mut index = Index::new(self.shape.segments);
        let mut lives = Vec::new();
        for segment in 0..self.shape.segments {
            lives.extend(self.newest_life(segment)?);
        }
        lives.sort_unstable();
        // A segment that was skipped in its turn because it could not be written holds outdated contents.
        let newest = lives.last().copied().unwrap_or(0);
        lives.retain(|sequence| sequence + self.shape.segments > newest);
        let (mut open, mut torn) = (None, HashSet::new());
        // Oldest first: what happened last to a key counts.
        for &sequence in &lives {
            let life = self.read_life(sequence)?;
            let segment = self.shape.segment_of(sequence);
            for (number, row) in life.rows.iter().enumerate() {
                if row.pages == 0 || !current.contains(&row.key.namespace) {
                    index.remove(&row.key);
                    torn.remove(&row.key);
                    continue;
                }
                let place = Place { segment, page: row.page, pages: row.pages, tag: row.tag };
                let fits = u64::from(row.page) + u64::from(row.pages) <= self.shape.segment_bytes / PAGE;
                let is_proven = number < life.proven;
                if fits && (is_proven || unproven == Unproven::All || self.is_begun(&place)?) {
                    index.insert(row.key, place, !is_proven);
                    torn.remove(&row.key);
                } else {
                    // What was there before was removed, or is another version.
                    index.remove(&row.key);
                    torn.insert(row.key);
                }
            }
            open = Some((sequence, life));
        }
        // The next segment of the ring was given up when the open one was begun.
        let given_up = self.shape.segment_of(newest + 1);
        loop {
            let blocks = index.of_segment(given_up, 1024);
            if blocks.is_empty() {
                break;
            }
            for (key, _) in blocks {
                index.remove(&key);
            }
        }
        Ok(Replayed { index, lives, open, torn })
    }

    /// Returns which life a segment holds: its first group says so, or its footer if that group is damaged.
    pub(super) fn newest_life(&self, segment: u64) -> Result<Option<u64>> {
        let begin = self.shape.segment_at(segment);
        let head = self.read_head(begin, |pages| group::parse_any(self.id, pages))?;
        let trailer = self.read_trailer(segment)?;
        let found = [head.map(|head| head.sequence), trailer.map(|trailer| trailer.sequence)];
        // A medium that holds anything may claim to have been written more often than places can be numbered.
        let sequence_max = (u64::MAX / (self.shape.segment_bytes / PAGE)).saturating_sub(self.shape.segments);
        let is_here = |sequence: &u64| {
            *sequence < sequence_max && u64::from(self.shape.segment_of(*sequence)) == segment
        };
        Ok(found.into_iter().flatten().filter(is_here).max())
    }

    /// Returns whether a record's first page belongs to what was written there last.
    fn is_begun(&self, place: &Place) -> Result<bool> {
        let at = self.shape.record_at(*place);
        Ok(header_tag(&read(&*self.volume, at, PAGE)?) == Some(place.tag))
    }

    /// Reads the group head at an offset. An unreadable page is not the end of a log: the start fails.
    fn read_head(&self, at: u64, parse: impl Fn(&[u8]) -> Option<Head>) -> Result<Option<Head>> {
        let page = read(&*self.volume, at, PAGE)?;
        Ok(match group::peek(&page) {
            None => None,
            Some(PAGE) => parse(&page),
            // The segment ends before that, so it is not a head.
            Some(length) if at + length > self.shape.bytes() => None,
            Some(length) => parse(&read(&*self.volume, at, length)?),
        })
    }

    fn read_life(&self, sequence: u64) -> Result<Life> {
        match self.read_footer(sequence)? {
            Some(rows) => Ok(Life { proven: rows.len(), rows, tail: None }),
            None => self.walk(sequence),
        }
    }

    fn read_trailer(&self, segment: u64) -> Result<Option<footer::Trailer>> {
        let at = self.shape.segment_at(segment) + self.shape.segment_bytes - PAGE;
        Ok(footer::parse_trailer(self.id, &read(&*self.volume, at, PAGE)?))
    }

    fn read_footer(&self, sequence: u64) -> Result<Option<Vec<footer::Row>>> {
        let segment = u64::from(self.shape.segment_of(sequence));
        let end = self.shape.segment_at(segment) + self.shape.segment_bytes - PAGE;
        let Some(trailer) = self.read_trailer(segment)? else { return Ok(None) };
        let bytes = trailer.table_bytes();
        if trailer.sequence != sequence || bytes >= self.shape.segment_bytes {
            return Ok(None);
        }
        Ok(footer::parse_rows(trailer, &read(&*self.volume, end - bytes, bytes)?))
    }

    /// Follows the groups of a segment to their end.
    fn walk(&self, sequence: u64) -> Result<Life> {
        let begin = self.shape.segment_at(self.shape.segment_of(sequence).into());
        let (mut tail, mut rows, mut starts, mut durable) = (Tail::BEGIN, Vec::new(), Vec::new(), 0);
        loop {
            let Tail { bytes, ordinal, before } = tail;
            let place = group::Place { medium: self.id, sequence, ordinal, before };
            let room = bytes + PAGE <= self.shape.segment_bytes;
            let head = match room {
                true => self.read_head(begin + bytes, |pages| group::parse(place, pages))?,
                false => None,
            };
            let Some(head) = head.filter(|head| bytes + head.bytes <= self.shape.segment_bytes) else {
                break;
            };
            starts.push(rows.len());
            durable = durable.max(head.durable);
            let mut at = bytes + group::head_bytes(head.entries.len());
            for entry in &head.entries {
                let Entry { key, pages, tag } = *entry;
                rows.push(footer::Row { key, page: (at / PAGE) as u32, pages, tag });
                at += u64::from(entry.pages) * PAGE;
            }
            tail = Tail { bytes: bytes + head.bytes, ordinal: ordinal + 1, before: head.checksum };
        }
        let proven = starts.get(size(durable.into())).copied().unwrap_or(rows.len());
        Ok(Life { rows, proven, tail: Some(tail) })
    }
}
