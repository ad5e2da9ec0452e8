//! A namespace on disk: `<root-hex>/namespace.json` and blocks under `<root-hex>/e<epoch>/`.

use std::path::PathBuf;

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, SMALL_FILE_BYTES_MAX};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::Device;
use serde_json::{Value, json};

use crate::format::{FORMAT_VERSION, file_bytes, header_bytes};

/// Suffix of block files.
pub(super) const BLOCK_SUFFIX: &str = ".kvb";
/// Suffix of corrupt files set aside.
pub(super) const BAD_SUFFIX: &str = ".bad";

/// One epoch of one namespace.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) spec: NamespaceSpec,
    pub(super) root: NamespaceId,
    pub(super) id: NamespaceId,
    pub(super) epoch: u32,
    /// Whether files are spread over 256 subdirectories: taken from `namespace.json`, so that all nodes agree.
    pub(super) sharded: bool,
    pub(super) header_bytes: usize,
    pub(super) slot_bytes: usize,
    /// Length of a plain block's file: an encoded block's is shorter.
    pub(super) file_bytes: u64,
}

impl Space {
    pub(super) fn new(spec: NamespaceSpec, epoch: u32, sharded: bool) -> Self {
        let layout = spec.layout();
        Self {
            root: spec.root(),
            id: spec.id(epoch),
            epoch,
            sharded,
            header_bytes: header_bytes(layout.shard_count()),
            slot_bytes: usize::try_from(layout.slot_bytes()).expect("BLOCK_BYTES_MAX fits an address"),
            file_bytes: file_bytes(layout),
            spec,
        }
    }

    /// `<root-hex>`.
    pub(super) fn root_dir(&self) -> PathBuf {
        PathBuf::from(self.root.to_string())
    }

    /// `<root-hex>/e<epoch>`.
    pub(super) fn epoch_dir(&self) -> PathBuf {
        epoch_dir(self.root, self.epoch)
    }

    /// The directory of a block's file.
    pub(super) fn block_dir(&self, hash: BlockHash) -> PathBuf {
        let dir = self.epoch_dir();
        if self.sharded { dir.join(format!("{:02x}", hash.0[0])) } else { dir }
    }

    /// A block's file.
    pub(super) fn block_path(&self, hash: BlockHash) -> PathBuf {
        self.block_dir(hash).join(format!("{hash}{BLOCK_SUFFIX}"))
    }

    /// Returns the path where a corrupt block's file is kept.
    pub(super) fn bad_path(&self, hash: BlockHash) -> PathBuf {
        self.block_dir(hash).join(format!("{hash}{BAD_SUFFIX}"))
    }

    /// The fewest bytes that a block's file has: a page of payload after the header.
    pub(super) const fn fewest_bytes(&self) -> usize {
        self.header_bytes + BLOCK_ALIGN_BYTES as usize
    }

    /// Returns whether a block's file, plain or encoded, may have this length.
    pub(super) const fn is_usual(&self, bytes: u64) -> bool {
        self.fewest_bytes() as u64 <= bytes && bytes <= self.file_bytes
    }

    pub(super) const fn key(&self, hash: BlockHash) -> BlockKey {
        BlockKey { namespace: self.id, hash }
    }
}

/// `<root-hex>/e<epoch>`.
pub(super) fn epoch_dir(root: NamespaceId, epoch: u32) -> PathBuf {
    PathBuf::from(root.to_string()).join(format!("e{epoch}"))
}

/// The epoch in a directory's name; accepts only the spelling that `epoch_dir` writes.
pub(super) fn epoch_of_dir(name: &str) -> Option<u32> {
    let epoch: u32 = name.strip_prefix('e')?.parse().ok()?;
    (name == format!("e{epoch}")).then_some(epoch)
}

/// The epoch below which all epochs are over according to a directory's name; accepts only the spelling `below<N>`.
pub(super) fn below_of_dir(name: &str) -> Option<u32> {
    let epoch: u32 = name.strip_prefix("below")?.parse().ok()?;
    (name == format!("below{epoch}")).then_some(epoch)
}

/// Returns whether a name is one of the 256 subdirectories.
pub(super) fn is_shard_dir(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns which of `count` directories holds a block: its hash as a big-endian number, modulo `count`.
pub(super) fn home(hash: BlockHash, count: usize) -> usize {
    usize::try_from(u128::from_be_bytes(hash.0) % count as u128).expect("less than `count`")
}

/// The contents of `namespace.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamespaceFile {
    pub(super) spec: NamespaceSpec,
    pub(super) epoch: u32,
    pub(super) sharded: bool,
}

impl NamespaceFile {
    /// `<root-hex>/namespace.json`.
    pub(super) fn path(root: NamespaceId) -> PathBuf {
        PathBuf::from(root.to_string()).join("namespace.json")
    }

    /// Reads it from one directory; `None` if it does not exist, `Corrupt` if it does not describe `root`.
    pub(super) fn read(device: &dyn Device, root: NamespaceId) -> Result<Option<Self>> {
        let path = Self::path(root);
        let Some(bytes) = device.read_small(&path, SMALL_FILE_BYTES_MAX)? else { return Ok(None) };
        Self::parse(&bytes, root).map(Some).map_err(|e| e.with("path", device.root().join(path).display()))
    }

    fn parse(bytes: &[u8], root: NamespaceId) -> Result<Self> {
        let bad = |what: &str| Error::new(ErrorKind::Corrupt, format!("namespace.json {what}"));
        let value: Value = serde_json::from_slice(bytes).map_err(|e| bad("is not JSON").with_source(e))?;
        let number = |name: &str| value.get(name).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        let version = number("format_version").ok_or_else(|| bad("has no format_version"))?;
        if version != FORMAT_VERSION {
            return Err(Error::new(
                ErrorKind::Version,
                "a directory was written in another format version: name another directory, or remove its contents",
            )
            .with("version", version)
            .with("version_expected", FORMAT_VERSION));
        }
        let spec = value.get("namespace").ok_or_else(|| bad("has no namespace"))?.to_string();
        let spec = NamespaceSpec::from_canonical(&spec)?;
        if spec.root() != root {
            return Err(bad("describes another namespace")
                .with("describes", spec.root())
                .with("directory", root));
        }
        let epoch = number("epoch").ok_or_else(|| bad("has no epoch"))?;
        let sharded = value.get("shard_directories").and_then(Value::as_bool);
        Ok(Self { spec, epoch, sharded: sharded.ok_or_else(|| bad("has no shard_directories"))? })
    }

    /// Writes it into one directory, completely or not at all.
    pub(super) fn write(&self, device: &dyn Device, temporary_name: &str) -> Result<()> {
        let root = self.spec.root();
        let namespace: Value = serde_json::from_str(self.spec.canonical()).expect("canonical text is JSON");
        let text = json!({
            "format_version": FORMAT_VERSION,
            "epoch": self.epoch,
            "shard_directories": self.sharded,
            "root": root.to_string(),
            "id": self.spec.id(self.epoch).to_string(),
            "namespace": namespace,
        });
        let dir = PathBuf::from(root.to_string());
        device.make_dir(&dir)?;
        device.write_small(&Self::path(root), &dir.join(temporary_name), format!("{text:#}\n").as_bytes())?;
        device.sync_dir(&dir)
    }
}
