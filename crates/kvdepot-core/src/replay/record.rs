//! A request as a line of a trace, in Mooncake's format.

use crate::key::BlockHash;

/// The recorded data of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Time of arrival, in milliseconds since the recording began.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_length: u64,
    /// Tokens of the answer.
    pub output_length: u64,
    /// Number of tokens per hash.
    pub block_tokens: u32,
    /// The chained hashes of the prompt's full blocks.
    pub hashes: Vec<BlockHash>,
}

impl Record {
    /// Returns the number of bytes that the record takes while it waits to be written.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(self.hashes.as_slice())
    }

    /// Appends the record's line. Hashes are written as 32 hex digits.
    pub fn write_line(&self, out: &mut Vec<u8>) {
        let head = format_args!(
            r#"{{"timestamp": {}, "input_length": {}, "output_length": {}, "block_tokens": {}, "hash_ids": ["#,
            self.timestamp_ms, self.input_length, self.output_length, self.block_tokens
        )
        .to_string();
        out.extend_from_slice(head.as_bytes());
        out.reserve(self.hashes.len() * 36);
        for (index, hash) in self.hashes.iter().enumerate() {
            out.extend_from_slice(if index == 0 { b"\"" } else { b", \"" });
            for byte in hash.0 {
                out.extend_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
            }
            out.push(b'"');
        }
        out.extend_from_slice(b"]}\n");
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";
