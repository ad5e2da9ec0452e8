//! The ledger's bytes; `docs/format.md` shows them.

use kvdepot_io::checksum::crc64;

use super::book::{BYTES_MAX, Book, MEMBERS_MAX, Round, Row, WHO_BYTES_MAX};

const MAGIC: &[u8; 8] = b"KVDLEDGR";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 80;
const ROW_BYTES: usize = 88 + WHO_BYTES_MAX;
/// The longest ledger.
pub(super) const LEDGER_BYTES_MAX: usize = HEADER_BYTES + MEMBERS_MAX * ROW_BYTES + 8;

const IS_DUE: u32 = 1;
const HAS_ROUND: u32 = 2;
const IS_MEASURED: u32 = 4;
const IS_FRESH: u32 = 1;
const IS_GONE: u32 = 2;

/// Encodes the ledger with this number.
pub(super) fn encode(book: &Book, number: u64) -> Vec<u8> {
    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
    let round = book.round;
    let measured = round.and_then(|round| round.measured);
    let flags =
        flag(book.is_due, IS_DUE) | flag(round.is_some(), HAS_ROUND) | flag(measured.is_some(), IS_MEASURED);
    let mut out = Vec::with_capacity(HEADER_BYTES + book.rows.len() * ROW_BYTES + 8);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(book.rows.len() as u32).to_le_bytes());
    for value in [number, book.bound, book.next_id, book.rounds] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.extend_from_slice(&u64::from(flags).to_le_bytes());
    for value in [round.map_or(0, |round| round.collector), measured.unwrap_or(0), book.directories] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    for row in &book.rows {
        for value in [row.id, row.beat, row.cap] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&row.granted.to_le_bytes());
        for value in [row.freed, row.done, row.in_flight, row.hungry, row.freed_then, row.done_then] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        let flags = flag(row.is_fresh, IS_FRESH) | flag(row.is_gone, IS_GONE);
        out.extend_from_slice(&flags.to_le_bytes());
        let who = &row.who.as_bytes()[..row.who.len().min(WHO_BYTES_MAX)];
        out.extend_from_slice(&(who.len() as u32).to_le_bytes());
        out.extend_from_slice(who);
        out.resize(out.len() + WHO_BYTES_MAX - who.len(), 0);
    }
    let crc = crc64(&out);
    out.extend_from_slice(&crc.to_le_bytes());
    out
}

/// Returns the version of a ledger that a later kvdepot wrote; `None` if it is of this version, or damaged.
pub(super) fn later_version(bytes: &[u8]) -> Option<u32> {
    let (body, crc) = bytes.split_last_chunk::<8>()?;
    let is_whole = body.starts_with(MAGIC) && crc64(body) == u64::from_le_bytes(*crc);
    u32_at(body, 8).filter(|version| is_whole && *version > VERSION)
}

/// Decodes the ledger with this number; `None` if it is not exactly what `encode` writes, or absurd.
pub(super) fn decode(bytes: &[u8], number: u64) -> Option<Book> {
    let count = u32_at(bytes, 12)? as usize;
    if count > MEMBERS_MAX || bytes.len() != HEADER_BYTES + count * ROW_BYTES + 8 {
        return None;
    }
    let flags = u32_at(bytes, 48)?;
    let measured = (flags & IS_MEASURED != 0).then_some(u64_at(bytes, 64)?);
    let collector = u64_at(bytes, 56)?;
    let book = Book {
        bound: u64_at(bytes, 24)?,
        next_id: u64_at(bytes, 32)?,
        rounds: u64_at(bytes, 40)?,
        directories: u64_at(bytes, 72)?,
        is_due: flags & IS_DUE != 0,
        round: (flags & HAS_ROUND != 0).then_some(Round { collector, measured }),
        rows: (0..count).map(|n| row(bytes.get(HEADER_BYTES + n * ROW_BYTES..)?)).collect::<Option<_>>()?,
    };
    let row_sums = book.rows.iter().flat_map(|row| {
        [
            row.id,
            row.beat,
            row.cap,
            row.granted.unsigned_abs(),
            row.freed,
            row.done,
            row.in_flight,
            row.hungry,
            row.freed_then,
            row.done_then,
        ]
    });
    let sums = [book.bound, measured.unwrap_or(0), book.next_id, book.rounds];
    let is_sane = sums.into_iter().chain(row_sums).all(|sum| sum <= BYTES_MAX);
    (is_sane && bytes == encode(&book, number)).then_some(book)
}

fn row(bytes: &[u8]) -> Option<Row> {
    let flags = u32_at(bytes, 80)?;
    let who = bytes.get(88..88 + (u32_at(bytes, 84)? as usize).min(WHO_BYTES_MAX))?;
    Some(Row {
        id: u64_at(bytes, 0)?,
        beat: u64_at(bytes, 8)?,
        cap: u64_at(bytes, 16)?,
        granted: u64_at(bytes, 24)?.cast_signed(),
        freed: u64_at(bytes, 32)?,
        done: u64_at(bytes, 40)?,
        in_flight: u64_at(bytes, 48)?,
        hungry: u64_at(bytes, 56)?,
        freed_then: u64_at(bytes, 64)?,
        done_then: u64_at(bytes, 72)?,
        is_fresh: flags & IS_FRESH != 0,
        is_gone: flags & IS_GONE != 0,
        who: String::from_utf8(who.to_vec()).ok()?,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::book::Report;
    use super::*;

    #[test]
    fn a_ledger_is_read_only_as_it_was_written() {
        let mut book = Book::new(1 << 40, 2);
        let report = Report { cap: 1 << 41, freed: 3, done: 4, in_flight: 5, hungry: 6 };
        let one = book.join("node-7.0123abcd.4026531836-4242-99-1".to_owned(), 7, report).unwrap();
        book.join("node-8.89abcdef.4026531836-17-5-1".to_owned(), 0, report).unwrap();
        book.renew(one, report, -3).unwrap();
        book.begin_round(one);
        book.end_survey(12);
        let bytes = encode(&book, 42);
        assert_eq!(bytes.len(), HEADER_BYTES + 2 * ROW_BYTES + 8);
        assert_eq!(decode(&bytes, 42), Some(book));
        assert_eq!(decode(&bytes, 43), None, "under another name");
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bytes, 42), None, "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert_eq!(decode(&bytes[..end], 42), None, "{end} bytes");
        }
        assert_eq!(later_version(&bytes), None);
        let mut later = bytes[..bytes.len() - 8].to_vec();
        later[8] = 2;
        let crc = crc64(&later);
        later.extend_from_slice(&crc.to_le_bytes());
        assert_eq!((decode(&later, 42), later_version(&later)), (None, Some(2)));
        later[20] ^= 1;
        assert_eq!(later_version(&later), None, "damaged");
    }
}
