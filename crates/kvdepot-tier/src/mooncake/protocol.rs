//! Frames between the tier and its helper: a length (u32, little-endian) and a JSON object.

use kvdepot_core::limits::MOONCAKE_FRAME_BYTES_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Version of these frames.
pub(super) const PROTOCOL: u32 = 1;
const LENGTH_BYTES: usize = 4;

/// What a request does to all of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MooncakeOp {
    /// Stores values that are not there.
    Put,
    /// Reads values.
    Get,
    /// Asks whether there are values.
    Exists,
    /// Removes values.
    Remove,
    /// Stores records of epochs that are not there.
    PutRecord,
    /// Stores records of epochs in place of earlier ones.
    ReplaceRecord,
}

/// The first frame to the helper, which comes with the descriptor of the staging memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup<'a> {
    pub(super) protocol: u32,
    /// Size of the staging memory.
    pub(super) bytes: usize,
    pub(super) config_path: Option<&'a str>,
    pub(super) replicas: usize,
    /// Number of calls that may run at a time, hung ones included.
    pub(super) threads: usize,
}

/// A request to the helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MooncakeRequest {
    /// Number of the request, above 0. Its answer carries it.
    pub id: u64,
    /// What to do.
    pub op: MooncakeOp,
    /// Names in the store.
    pub keys: Vec<String>,
    /// For operations with bytes: offset of each value in the staging memory.
    pub at: Vec<usize>,
    /// For operations with bytes: size of each value.
    pub bytes: Vec<usize>,
}

/// A frame from the helper.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MooncakeAnswer {
    /// Number of the request; 0 for the answer to the setup.
    pub id: u64,
    /// A number for each key; below 0, an error of Mooncake's.
    #[serde(default)]
    pub codes: Vec<i64>,
    /// Why there are no codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// After the setup: version of Mooncake's package.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// After the setup: address of Mooncake's master.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub master: String,
}

/// Returns a frame.
pub(super) fn encode(body: &impl Serialize) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(body)
        .map_err(|e| Error::new(ErrorKind::Protocol, "a frame has no JSON form").with_source(e))?;
    let len = u32::try_from(text.len()).ok().filter(|_| text.len() <= MOONCAKE_FRAME_BYTES_MAX);
    let len = len.ok_or_else(|| too_long(text.len()))?;
    let mut frame = Vec::with_capacity(LENGTH_BYTES + text.len());
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(&text);
    Ok(frame)
}

fn too_long(bytes: usize) -> Error {
    Error::new(ErrorKind::Protocol, "a frame of the Mooncake tier's helper is too long")
        .with("bytes", bytes)
        .with("bytes_max", MOONCAKE_FRAME_BYTES_MAX)
}

/// Puts frames together from the pieces that a socket delivers.
#[derive(Debug, Default)]
pub(super) struct Frames {
    buffer: Vec<u8>,
}

impl Frames {
    /// Adds received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next complete frame. After an error the stream is out of sync.
    pub(super) fn next(&mut self) -> Result<Option<MooncakeAnswer>> {
        let Some((length, rest)) = self.buffer.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let len = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if len > MOONCAKE_FRAME_BYTES_MAX {
            return Err(too_long(len));
        }
        let Some(text) = rest.get(..len) else { return Ok(None) };
        let answer = serde_json::from_slice(text).map_err(|e| {
            Error::new(ErrorKind::Protocol, "the Mooncake tier's helper sent something else than an answer")
                .with("bytes", len)
                .with_source(e)
        });
        self.buffer.drain(..LENGTH_BYTES + len);
        answer.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answers() -> impl Strategy<Value = MooncakeAnswer> {
        let texts = (proptest::option::of(".{0,40}"), ".{0,20}", ".{0,20}");
        (any::<u64>(), proptest::collection::vec(any::<i64>(), 0..20), texts).prop_map(
            |(id, codes, (error, version, master))| MooncakeAnswer { id, codes, error, version, master },
        )
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_whatever_the_pieces(
            sent in proptest::collection::vec(answers(), 0..6),
            piece in 1..50_usize,
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|answer| encode(answer).unwrap()).collect();
            let (mut frames, mut received) = (Frames::default(), Vec::new());
            for some in bytes.chunks(piece) {
                frames.push(some);
                while let Some(answer) = frames.next().unwrap() {
                    received.push(answer);
                }
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn garbage_is_an_error_or_incomplete(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut frames = Frames::default();
            frames.push(&bytes);
            while let Ok(Some(_)) = frames.next() {}
        }
    }

    #[test]
    fn a_length_that_no_frame_has_is_refused_before_its_bytes_arrive() {
        let mut frames = Frames::default();
        frames.push(&u32::MAX.to_le_bytes());
        assert_eq!(frames.next().unwrap_err().kind(), ErrorKind::Protocol);
        assert!(encode(&"x".repeat(MOONCAKE_FRAME_BYTES_MAX)).is_err());
    }

    #[test]
    fn a_request_is_spelled_as_the_helper_reads_it() {
        let request = MooncakeRequest {
            id: 7,
            op: MooncakeOp::ReplaceRecord,
            keys: vec!["a".to_owned()],
            at: vec![4096],
            bytes: vec![10],
        };
        let text = r#"{"id":7,"op":"replace_record","keys":["a"],"at":[4096],"bytes":[10]}"#;
        assert_eq!(encode(&request).unwrap()[4..], *text.as_bytes());
    }
}
