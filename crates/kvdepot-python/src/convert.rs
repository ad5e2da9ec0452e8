//! Converts Python values to the core's types, and offers small pure functions.

use kvdepot_core::limits::BLOCK_BYTES_MAX;
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_tier::encoding::{self, Encoding};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors::OrRaise;

/// Reads block hashes from a sequence of `bytes`. A list, as vLLM passes it, costs about 11 ns per hash.
pub(crate) fn hashes(sequence: &Bound<'_, PyAny>) -> PyResult<Vec<BlockHash>> {
    if let Ok(list) = sequence.cast::<PyList>() {
        let mut out = Vec::with_capacity(list.len());
        for item in list.iter() {
            out.push(BlockHash::from_engine(item.cast::<PyBytes>()?.as_bytes()).or_raise()?);
        }
        return Ok(out);
    }
    sequence
        .try_iter()?
        .map(|item| BlockHash::from_engine(item?.cast::<PyBytes>()?.as_bytes()).or_raise())
        .collect()
}

/// Makes a description from the facts and the layout, both JSON.
pub(crate) fn spec(facts_json: &str, layout_json: &str) -> Result<NamespaceSpec> {
    let layout: serde_json::Value = serde_json::from_str(layout_json)
        .map_err(|e| Error::new(ErrorKind::Config, "the layout is not JSON").with_source(e))?;
    NamespaceSpec::new(facts_json, BlockLayout::from_json(&layout)?)
}

#[pyfunction]
pub(crate) fn crc64nvme(data: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, data)
}

#[pyfunction]
#[pyo3(signature = (encoding, payload, *, block_bytes))]
pub(crate) fn decode_block<'py>(
    py: Python<'py>,
    encoding: u32,
    payload: &[u8],
    block_bytes: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let decode = || {
        let known = Encoding::of(encoding).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "no such encoding of a block").with("encoding", encoding)
        })?;
        let mut block = vec![0; block_bytes.min(usize::try_from(BLOCK_BYTES_MAX).unwrap_or(usize::MAX))];
        if block.len() < block_bytes {
            return Err(
                Error::new(ErrorKind::Corrupt, "a block is longer than any").with("bytes", block_bytes)
            );
        }
        encoding::decode(known, payload, block_bytes, |at, piece| {
            block[at..at + piece.len()].copy_from_slice(piece);
        })?;
        Ok(block)
    };
    Ok(PyBytes::new(py, &py.detach(decode).or_raise()?))
}

#[pyfunction]
pub(crate) fn block_hash<'py>(py: Python<'py>, engine_hash: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(py, &BlockHash::from_engine(engine_hash).or_raise()?.0))
}

#[pyfunction]
#[pyo3(signature = (facts_json, layout_json, *, epoch = 0))]
pub(crate) fn namespace_id(facts_json: &str, layout_json: &str, epoch: u32) -> PyResult<String> {
    Ok(spec(facts_json, layout_json).or_raise()?.id(epoch).to_string())
}

#[pyfunction]
pub(crate) fn inspect_medium(py: Python<'_>, tier: &str, settings: &str) -> PyResult<String> {
    let facts = || {
        let settings = serde_json::from_str(settings).map_err(|error| {
            Error::new(ErrorKind::Config, "a tier's settings are not JSON").with_source(error)
        })?;
        let facts = kvdepot_tier::media::inspect(tier, &settings)?;
        Ok(serde_json::json!(facts).to_string())
    };
    py.detach(facts).or_raise()
}

#[pyfunction]
pub(crate) fn tier_table() -> String {
    kvdepot_tier::registry::table_json()
}
