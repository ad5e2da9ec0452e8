//! The secret that readers send as a header, and its file.

use std::path::Path;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use kvdepot_core::{Error, Result};
use kvdepot_wire::own::Token;

/// Size limit of a token file.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a request without the right token is refused.
pub(crate) const WANTED: &str = "send the token: Authorization: Bearer …";

/// Reads a secret from its file.
pub(crate) fn read(path: &Path) -> Result<Token> {
    let context = |e: Error| e.with("path", path.display());
    let bytes = std::fs::metadata(path)
        .and_then(|meta| if meta.len() > FILE_BYTES_MAX { Ok(Vec::new()) } else { std::fs::read(path) });
    let bytes = bytes.map_err(|e| context(Error::io("cannot read the token", e)))?;
    Token::new(&bytes).map_err(context)
}

/// Returns whether a request has the token.
pub(crate) fn is_sent(token: &Token, headers: &HeaderMap) -> bool {
    let said = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    said.and_then(|said| said.strip_prefix(b"Bearer ")).is_some_and(|said| token.is(said.trim_ascii()))
}
