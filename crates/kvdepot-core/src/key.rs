//! Names of blocks. P8: a key cannot be built without its namespace.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::BlockLayout;
use crate::limits::{ENGINE_HASH_BYTES_MAX, NAMESPACE_SPEC_BYTES_MAX};

/// Prefix of the canonical description when a namespace is fingerprinted.
const NAMESPACE_DOMAIN: &[u8] = b"kvdepot namespace v1\0";

/// An engine's chained hash of the tokens up to a block's end, in 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockHash(pub [u8; 16]);

/// Hashes the bytes as one integer: a derived implementation hashes their number and then a slice, which takes several
/// times as long, and a dump hashes each block's key for several tables.
impl Hash for BlockHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u128(u128::from_le_bytes(self.0));
    }
}

impl BlockHash {
    /// Takes 16 bytes unchanged. Any other length up to 64 bytes is reduced by XXH3-128 (big-endian).
    ///
    /// Engines pass digests (vLLM: SHA-256), for which the 128-bit reduction makes collisions practically impossible. A
    /// caller that passes counters gets distinct keys, too, because every byte counts.
    pub fn from_engine(hash: &[u8]) -> Result<Self> {
        if let Ok(exact) = <[u8; 16]>::try_from(hash) {
            return Ok(Self(exact));
        }
        if hash.is_empty() || hash.len() > ENGINE_HASH_BYTES_MAX {
            return Err(Error::new(ErrorKind::Config, "a block hash must have 1 to 64 bytes")
                .with("bytes", hash.len()));
        }
        Ok(Self(xxhash_rust::xxh3::xxh3_128(hash).to_be_bytes()))
    }
}

/// Fingerprint of everything that changes a block's bytes, including the epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamespaceId(pub [u8; 16]);

/// Like that of [`BlockHash`].
impl Hash for NamespaceId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u128(u128::from_le_bytes(self.0));
    }
}

/// A block's name in every tier: 32 bytes, namespace first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockKey {
    /// Namespace of the block.
    pub namespace: NamespaceId,
    /// Hash of the block.
    pub hash: BlockHash,
}

impl BlockKey {
    /// Returns the key's 32 bytes: namespace, then hash.
    pub fn to_bytes(self) -> [u8; 32] {
        let mut out = [0; 32];
        out[..16].copy_from_slice(&self.namespace.0);
        out[16..].copy_from_slice(&self.hash.0);
        out
    }

    /// Reads a key that `to_bytes` wrote.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        let (mut namespace, mut hash) = ([0; 16], [0; 16]);
        namespace.copy_from_slice(&bytes[..16]);
        hash.copy_from_slice(&bytes[16..]);
        Self { namespace: NamespaceId(namespace), hash: BlockHash(hash) }
    }
}

/// Everything that changes a block's bytes: facts named by the engine's face, and the layout of the block.
///
/// Facts are a flat or nested JSON object (model, dtype, strides, ranks, versions…). Numbers must be integers, so that
/// every language writes the same canonical text: keys sorted, no spaces, UTF-8, as Python's `json.dumps(x,
/// sort_keys=True, separators=(",", ":"), ensure_ascii=False)` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    canonical: String,
    layout: BlockLayout,
}

/// What the facts of namespaces with values begin with: `kind`.
pub const VALUES_KIND: &str = "kvdepot value";
/// How that is spelled in a canonical description.
const VALUES_FACT: &str = "\"kind\":\"kvdepot value";

impl NamespaceSpec {
    /// Builds a specification from the engine's facts (a JSON object) and the block layout.
    pub fn new(facts_json: &str, layout: BlockLayout) -> Result<Self> {
        let facts: serde_json::Value = serde_json::from_str(facts_json)
            .map_err(|e| Error::new(ErrorKind::Config, "namespace facts are not JSON").with_source(e))?;
        if !facts.is_object() {
            return Err(Error::new(ErrorKind::Config, "namespace facts must be a JSON object"));
        }
        if contains_float(&facts) {
            return Err(Error::new(
                ErrorKind::Config,
                "namespace facts must not contain fractions: write them as text",
            ));
        }
        let mut whole = serde_json::Map::new();
        whole.insert("facts".to_owned(), facts);
        whole.insert("layout".to_owned(), layout.to_json());
        let canonical = serde_json::Value::Object(whole).to_string();
        if canonical.len() > NAMESPACE_SPEC_BYTES_MAX {
            return Err(Error::new(ErrorKind::Config, "namespace description is too long")
                .with("bytes", canonical.len())
                .with("bytes_max", NAMESPACE_SPEC_BYTES_MAX));
        }
        Ok(Self { canonical, layout })
    }

    /// Rebuilds a specification from its canonical text (a `namespace.json` or a frame).
    pub fn from_canonical(text: &str) -> Result<Self> {
        let bad = || Error::new(ErrorKind::Corrupt, "not a namespace description");
        if text.len() > NAMESPACE_SPEC_BYTES_MAX {
            return Err(bad().with("bytes", text.len()));
        }
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| bad().with_source(e))?;
        let layout = BlockLayout::from_json(value.get("layout").ok_or_else(bad)?)?;
        Self::new(&value.get("facts").ok_or_else(bad)?.to_string(), layout)
    }

    /// Returns whether its blocks are values, which can be replaced, by its facts.
    pub fn holds_values(&self) -> bool {
        self.canonical().contains(VALUES_FACT)
    }

    /// Returns the canonical text that is fingerprinted.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// Returns the layout of this namespace's blocks.
    pub const fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Returns the fingerprint without an epoch, which names the directory of all epochs.
    pub fn root(&self) -> NamespaceId {
        fingerprint(&[NAMESPACE_DOMAIN, self.canonical.as_bytes()])
    }

    /// Returns the fingerprint that keys of this epoch carry. A reset of the engine's cache starts the next epoch.
    pub fn id(&self, epoch: u32) -> NamespaceId {
        fingerprint(&[NAMESPACE_DOMAIN, self.canonical.as_bytes(), b"\0", &epoch.to_le_bytes()])
    }
}

fn fingerprint(parts: &[&[u8]]) -> NamespaceId {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    let mut id = [0; 16];
    id.copy_from_slice(&hasher.finalize()[..16]);
    NamespaceId(id)
}

fn contains_float(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Number(n) => n.is_f64(),
        serde_json::Value::Array(items) => items.iter().any(contains_float),
        serde_json::Value::Object(map) => map.values().any(contains_float),
        _ => false,
    }
}

macro_rules! hex_text {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
        impl $name {
            /// Parses 32 lower-case hex digits.
            pub fn from_hex(text: &str) -> Option<Self> {
                if text.len() != 32 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                    return None;
                }
                let mut out = [0; 16];
                for (i, byte) in out.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
                }
                Some(Self(out))
            }
        }
    )*};
}
hex_text!(BlockHash, NamespaceId);

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.hash)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

/// Returns the epoch after `stored` that is at least `at_least`: the target of an advance.
///
/// # Errors
/// `Unsupported`: epochs are 32-bit numbers, and this was the last one.
pub fn next_epoch(stored: u32, at_least: u32) -> Result<u32> {
    let next = stored.checked_add(1).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the namespace has no more epochs: empty its directories")
    })?;
    Ok(next.max(at_least))
}

/// Returns whether a namespace in epoch `current` advances when it gets `epoch`.
///
/// # Errors
/// `Config`: `epoch` is lower than `current`.
pub fn epoch_moves(current: u32, epoch: u32) -> Result<bool> {
    if epoch < current {
        return Err(Error::new(ErrorKind::Config, "an epoch never goes back")
            .with("epoch", epoch)
            .with("epoch_current", current));
    }
    Ok(epoch > current)
}
