//! The part of FlatBuffers that InfiniStore uses: one root table whose fields are scalars, a string, or a vector of
//! strings or 64-bit numbers. The reader checks every offset and length before it follows it. There is no nesting, so
//! the time for a message is bounded by its own length.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::limits::{KEY_BYTES_MAX, KEYS_MAX};

fn bad(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("a flatbuffer cannot be read: {why}"))
}

/// A table whose vtable lies inside of the message.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    bytes: &'a [u8],
    start: usize,
    table_bytes: usize,
    vtable: &'a [u8],
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let piece = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    piece.copied().ok_or_else(|| bad("something lies outside of it").with("offset_bytes", at))
}

fn u16_at(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(u16::from_le_bytes(array(bytes, at)?).into())
}

fn u32_at(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(u32::from_le_bytes(array(bytes, at)?) as usize)
}

/// Returns the target of the offset at `at`.
fn follow(bytes: &[u8], at: usize) -> Result<usize> {
    let offset = u32_at(bytes, at)?;
    let target = at.checked_add(offset).filter(|&target| offset > 0 && target < bytes.len());
    target.ok_or_else(|| bad("an offset points outside of it").with("offset_bytes", at))
}

/// Returns the bytes of the elements of a vector or string.
fn vector(bytes: &[u8], at: usize, item_bytes: usize) -> Result<&[u8]> {
    let count = u32_at(bytes, at)?;
    let len = count.checked_mul(item_bytes).ok_or_else(|| bad("a vector is too long"))?;
    let items = bytes.get(at + 4..).and_then(|rest| rest.get(..len));
    items.ok_or_else(|| bad("a vector is longer than it").with("count", count))
}

impl<'a> Table<'a> {
    /// Returns the root table of a message.
    pub(crate) fn root(bytes: &'a [u8]) -> Result<Self> {
        let start = follow(bytes, 0)?;
        let back = i64::from(i32::from_le_bytes(array(bytes, start)?));
        let vtable_at = usize::try_from(start as i64 - back).map_err(|_| bad("it has no vtable"))?;
        let vtable_bytes = u16_at(bytes, vtable_at)?;
        let table_bytes = u16_at(bytes, vtable_at + 2)?;
        let vtable = bytes.get(vtable_at..).and_then(|rest| rest.get(..vtable_bytes));
        let vtable = vtable.filter(|v| v.len() >= 4 && v.len().is_multiple_of(2));
        let vtable = vtable.ok_or_else(|| bad("its vtable lies outside of it"))?;
        if table_bytes < 4 || bytes.len() - start < table_bytes {
            return Err(bad("its table lies outside of it"));
        }
        Ok(Self { bytes, start, table_bytes, vtable })
    }

    /// Returns the position of field number `field` of `field_bytes`; `None` if it is absent.
    fn field(&self, field: usize, field_bytes: usize) -> Result<Option<usize>> {
        if 4 + field * 2 >= self.vtable.len() {
            return Ok(None);
        }
        match u16_at(self.vtable, 4 + field * 2)? {
            0 => Ok(None),
            at if at >= 4 && at + field_bytes <= self.table_bytes => Ok(Some(self.start + at)),
            _ => Err(bad("a field lies outside of its table").with("field", field)),
        }
    }

    pub(crate) fn i8(&self, field: usize) -> Result<u8> {
        let at = self.field(field, 1)?;
        at.map_or(Ok(0), |at| Ok(array::<1>(self.bytes, at)?[0]))
    }

    pub(crate) fn i32(&self, field: usize) -> Result<i32> {
        let at = self.field(field, 4)?;
        at.map_or(Ok(0), |at| Ok(i32::from_le_bytes(array(self.bytes, at)?)))
    }

    /// Returns a string's bytes, without its NUL; empty if it is absent.
    pub(crate) fn string(&self, field: usize) -> Result<&'a [u8]> {
        match self.field(field, 4)? {
            None => Ok(&[]),
            Some(at) => self.string_at(at),
        }
    }

    fn string_at(&self, at: usize) -> Result<&'a [u8]> {
        let text = vector(self.bytes, follow(self.bytes, at)?, 1)?;
        if text.len() > KEY_BYTES_MAX {
            return Err(bad("a key is too long").with("bytes", text.len()).with("bytes_max", KEY_BYTES_MAX));
        }
        Ok(text)
    }

    /// Returns a vector of strings; empty if it is absent.
    pub(crate) fn strings(&self, field: usize) -> Result<Vec<&'a [u8]>> {
        let Some(at) = self.field(field, 4)? else { return Ok(Vec::new()) };
        let first = follow(self.bytes, at)? + 4;
        let count = vector(self.bytes, first - 4, 4)?.len() / 4;
        if count > KEYS_MAX {
            return Err(bad("too many keys").with("keys", count).with("keys_max", KEYS_MAX));
        }
        let mut all_bytes = 0;
        let keys = (0..count).map(|i| {
            let key = self.string_at(first + i * 4)?;
            all_bytes += key.len();
            // Overlapping keys would let a short message cost as much as a long one.
            if all_bytes > self.bytes.len() { Err(bad("its keys overlap")) } else { Ok(key) }
        });
        keys.collect()
    }

    /// Returns a vector of 64-bit numbers; empty if it is absent.
    pub(crate) fn u64s(&self, field: usize) -> Result<Vec<u64>> {
        let Some(at) = self.field(field, 4)? else { return Ok(Vec::new()) };
        let items = vector(self.bytes, follow(self.bytes, at)?, 8)?;
        if items.len() / 8 > KEYS_MAX {
            return Err(bad("too many addresses").with("count", items.len() / 8));
        }
        Ok(items.as_chunks::<8>().0.iter().map(|item| u64::from_le_bytes(*item)).collect())
    }
}

/// A field to be written. Every field takes eight bytes of the table, so all are aligned alike.
#[derive(Debug)]
pub(crate) enum Field<'a> {
    I8(u8),
    I32(i32),
    String(&'a [u8]),
    Strings(&'a [&'a [u8]]),
    U64s(&'a [u64]),
}

/// Size of a field in a table.
const FIELD_BYTES: usize = 8;

/// Encodes a message with one table of these fields, numbered from 0.
///
/// ```text
///   root offset | vtable | pad | table: vtable's distance, pad, fields | targets of offsets
/// ```
pub(crate) fn encode(fields: &[Field<'_>]) -> Vec<u8> {
    let vtable_bytes = 4 + fields.len() * 2;
    let table = (4 + vtable_bytes).next_multiple_of(8);
    let table_bytes = 8 + fields.len() * FIELD_BYTES;
    let mut out = Vec::with_capacity(table + table_bytes + 256);
    put(&mut out, table);
    out.extend_from_slice(&(vtable_bytes as u16).to_le_bytes());
    out.extend_from_slice(&(table_bytes as u16).to_le_bytes());
    for index in 0..fields.len() {
        out.extend_from_slice(&((8 + index * FIELD_BYTES) as u16).to_le_bytes());
    }
    out.resize(table, 0);
    put(&mut out, table - 4);
    out.resize(table + table_bytes, 0);
    for (index, field) in fields.iter().enumerate() {
        let at = table + 8 + index * FIELD_BYTES;
        match field {
            Field::I8(value) => out[at] = *value,
            Field::I32(value) => out[at..at + 4].copy_from_slice(&value.to_le_bytes()),
            Field::String(text) => {
                point(&mut out, at, 4);
                put_string(&mut out, text);
            }
            Field::Strings(texts) => {
                point(&mut out, at, 4);
                put(&mut out, texts.len());
                let first = out.len();
                out.resize(first + texts.len() * 4, 0);
                for (i, text) in texts.iter().enumerate() {
                    point(&mut out, first + i * 4, 4);
                    put_string(&mut out, text);
                }
            }
            Field::U64s(values) => {
                // The count precedes the first element, which is aligned to eight bytes.
                while out.len() % 8 != 4 {
                    out.push(0);
                }
                point(&mut out, at, 4);
                put(&mut out, values.len());
                values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            }
        }
    }
    out
}

fn put(out: &mut Vec<u8>, value: usize) {
    out.extend_from_slice(&(value as u32).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    put(out, text.len());
    out.extend_from_slice(text);
    out.push(0);
}

/// Sets the offset at `at` to the bytes that are appended next.
fn point(out: &mut Vec<u8>, at: usize, align: usize) {
    out.resize(out.len().next_multiple_of(align), 0);
    let distance = (out.len() - at) as u32;
    out[at..at + 4].copy_from_slice(&distance.to_le_bytes());
}
