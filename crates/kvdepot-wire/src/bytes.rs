//! Reads little-endian fields from bytes sent by a peer.

use kvdepot_core::{Error, ErrorKind, Result};

/// The unread rest of a message.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// `what` names the message in errors.
    pub(crate) const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    pub(crate) fn bad(&self, why: &str) -> Error {
        Error::new(ErrorKind::Protocol, format!("a message of the wire protocol cannot be read: {why}"))
            .with("message", self.what)
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or_else(|| {
            self.bad("it ends too early").with("bytes_left", self.rest.len()).with("bytes_wanted", count)
        })?;
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.bad("it ends too early"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of items of `item_bytes` each, and returns their bytes.
    pub(crate) fn list(&mut self, item_bytes: usize, count_max: usize) -> Result<&'a [u8]> {
        let count = self.u32()? as usize;
        if count > count_max {
            return Err(self.bad("a batch is too long").with("count", count).with("count_max", count_max));
        }
        self.take(count * item_bytes)
    }

    /// Reads a length and that many bytes of text.
    pub(crate) fn text(&mut self, bytes_max: usize) -> Result<&'a str> {
        let bytes = self.list(1, bytes_max)?;
        std::str::from_utf8(bytes).map_err(|e| self.bad("its text is not UTF-8").with_source(e))
    }

    /// Returns the unread rest.
    pub(crate) const fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Fails unless everything was read.
    pub(crate) fn end(self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(self.bad("it goes on after its end").with("bytes_left", self.rest.len()))
    }
}

/// Appends a list's count and bytes.
pub(crate) fn put_list(out: &mut Vec<u8>, items: &[u8], item_bytes: usize) {
    out.extend_from_slice(&((items.len() / item_bytes) as u32).to_le_bytes());
    out.extend_from_slice(items);
}
