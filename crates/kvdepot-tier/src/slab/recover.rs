//! What a start finds on the medium: the footers of full segments, a walk through the open one.

use hashbrown::HashSet;
use kvdepot_core::{NamespaceId, Result};

use super::codec::size;
use super::footer;
use super::group::{self, Head};
use super::index::{Index, Place};
use super::log::{Log, Tail};
use super::medium::{Medium, read};
use super::shape::PAGE;
use super::table::Row;

/// What was found.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) index: Index,
    pub(super) log: Log,
    /// Number of the newest table of namespaces, and its rows.
    pub(super) table: u64,
    pub(super) rows: Vec<Row>,
}

/// The entries of one life of a segment.
struct Life {
    rows: Vec<footer::Row>,
    /// From this row on a crash may have torn the records.
    proven: usize,
    /// Where the next group goes; `None` = the segment is full.
    tail: Option<Tail>,
}

impl Medium {
    /// Reads what is on the medium.
    pub(super) fn recover(&self) -> Result<Recovered> {
        let (table, rows) = self.rows()?;
        let current: HashSet<NamespaceId> = rows.iter().map(|row| row.id).collect();
        let mut index = Index::new(self.shape.segments);
        let mut lives = Vec::new();
        for segment in 0..self.shape.segments {
            // The first group tells which life of the segment this is.
            let at = self.shape.segment_at(segment);
            let Some(head) = self.read_head(at, |pages| group::parse_any(self.id, pages)) else { continue };
            if u64::from(self.shape.segment_of(head.sequence)) == segment {
                lives.push(head.sequence);
            }
        }
        lives.sort_unstable();
        // A segment that was passed over in its turn, because it could not be written, holds what is over.
        let newest = lives.last().copied().unwrap_or(0);
        lives.retain(|sequence| sequence + self.shape.segments > newest);
        let mut open = None;
        // Oldest first: what happened last to a key counts.
        for &sequence in &lives {
            let life = self.read_life(sequence);
            let segment = self.shape.segment_of(sequence);
            for (number, row) in life.rows.iter().enumerate() {
                if row.pages == 0 || !current.contains(&row.key.namespace) {
                    index.remove(&row.key);
                    continue;
                }
                let place = Place { segment, page: row.page, pages: row.pages };
                if u64::from(row.page) + u64::from(row.pages) <= self.shape.segment_bytes / PAGE {
                    index.insert(row.key, place, number >= life.proven);
                }
            }
            open = Some((sequence, life));
        }
        let log = match open {
            None => Log::new(self.id, self.shape, 0, Tail::BEGIN, Vec::new()),
            Some((sequence, Life { rows, tail: Some(tail), .. })) => {
                Log::new(self.id, self.shape, sequence, tail, rows)
            }
            Some((sequence, Life { tail: None, .. })) => {
                // Nothing more fits, so that the next write goes on to the next segment.
                let full = Tail { bytes: self.shape.segment_bytes, ..Tail::BEGIN };
                Log::new(self.id, self.shape, sequence, full, Vec::new())
            }
        };
        // The next segment of the ring was given up when the open one was begun.
        loop {
            let blocks = index.of_segment(log.next_segment(), 1024);
            if blocks.is_empty() {
                break;
            }
            for (key, _) in blocks {
                index.remove(&key);
            }
        }
        Ok(Recovered { index, log, table, rows })
    }

    /// Reads the group head at an offset.
    fn read_head(&self, at: u64, parse: impl Fn(&[u8]) -> Option<Head>) -> Option<Head> {
        let page = read(&*self.volume, at, PAGE).ok()?;
        match group::peek(&page)? {
            PAGE => parse(&page),
            length => parse(&read(&*self.volume, at, length).ok()?),
        }
    }

    fn read_life(&self, sequence: u64) -> Life {
        match self.read_footer(sequence) {
            Some(rows) => Life { proven: rows.len(), rows, tail: None },
            None => self.walk(sequence),
        }
    }

    fn read_footer(&self, sequence: u64) -> Option<Vec<footer::Row>> {
        let end =
            self.shape.segment_at(self.shape.segment_of(sequence).into()) + self.shape.segment_bytes - PAGE;
        let trailer = footer::parse_trailer(self.id, &read(&*self.volume, end, PAGE).ok()?)?;
        let bytes = trailer.table_bytes();
        if trailer.sequence != sequence || bytes >= self.shape.segment_bytes {
            return None;
        }
        footer::parse_rows(trailer, &read(&*self.volume, end - bytes, bytes).ok()?)
    }

    /// Follows the groups of a segment to where they end.
    fn walk(&self, sequence: u64) -> Life {
        let begin = self.shape.segment_at(self.shape.segment_of(sequence).into());
        let (mut tail, mut rows, mut starts, mut durable) = (Tail::BEGIN, Vec::new(), Vec::new(), 0);
        loop {
            let Tail { bytes, ordinal, before } = tail;
            let place = group::Place { medium: self.id, sequence, ordinal, before };
            let room = bytes + PAGE <= self.shape.segment_bytes;
            let head = room.then(|| self.read_head(begin + bytes, |pages| group::parse(place, pages)));
            let Some(head) = head.flatten().filter(|head| bytes + head.bytes <= self.shape.segment_bytes)
            else {
                break;
            };
            starts.push(rows.len());
            durable = durable.max(head.durable);
            let mut at = bytes + group::head_bytes(head.entries.len());
            for entry in &head.entries {
                rows.push(footer::Row { key: entry.key, page: (at / PAGE) as u32, pages: entry.pages });
                at += u64::from(entry.pages) * PAGE;
            }
            tail = Tail { bytes: bytes + head.bytes, ordinal: ordinal + 1, before: head.checksum };
        }
        let proven = starts.get(size(durable.into())).copied().unwrap_or(rows.len());
        Life { rows, proven, tail: Some(tail) }
    }
}
