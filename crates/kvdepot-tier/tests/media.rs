//! A medium is looked at without being changed, and what a tier would refuse is refused in the same words.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;

use kvdepot_core::ErrorKind;
use kvdepot_tier::media::{MediumFacts, MediumKind, inspect};
use kvdepot_tier::{DaxConfig, DaxTier, SlabConfig, SlabTier};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn file(path: &Path, bytes: u64) {
    std::fs::File::create(path).unwrap().set_len(bytes).unwrap();
}

fn dax(path: &Path) -> Value {
    json!({ "device_path": path })
}

fn slab(path: &Path, bytes: u64) -> Value {
    json!({ "path": path, "capacity_bytes": bytes, "segment_mb": 1 })
}

#[test]
fn a_dax_medium() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("medium");
    assert_eq!(inspect("Dax", &dax(&path)).unwrap_err().kind(), ErrorKind::NotFound);
    file(&path, 4 * MIB);
    let empty = MediumFacts { kind: MediumKind::File, bytes: 4 * MIB, formatted_bytes: None };
    assert_eq!(inspect("Dax", &dax(&path)).unwrap(), empty);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0), "nothing was written");
    let tier = DaxTier::open(DaxConfig::new(&path)).unwrap();
    assert_eq!(inspect("Dax", &dax(&path)).unwrap_err().kind(), ErrorKind::Busy);
    drop(tier);
    let before = std::fs::read(&path).unwrap();
    assert_eq!(inspect("Dax", &dax(&path)).unwrap().formatted_bytes, Some(4 * MIB));
    let short = json!({ "device_path": path, "max_bytes": 3 * MIB });
    assert!(inspect("Dax", &short).unwrap_err().to_string().contains("truncated"));
    assert!(std::fs::read(&path).unwrap() == before, "nothing was written, not even who looked");
    std::fs::write(&path, [7; 50_000]).unwrap();
    assert!(inspect("Dax", &dax(&path)).unwrap_err().to_string().contains("not kvdepot's"));
    file(&path, 8192);
    assert!(inspect("Dax", &dax(&path)).unwrap_err().to_string().contains("too small"));
}

#[test]
fn a_slab_medium() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("medium");
    let missing = MediumFacts { kind: MediumKind::Missing, bytes: 16 * MIB, formatted_bytes: None };
    assert_eq!(inspect("Slab", &slab(&path, 16 * MIB)).unwrap(), missing);
    assert!(inspect("Slab", &slab(&path, 0)).unwrap_err().to_string().contains("needs a size"));
    assert!(inspect("Slab", &slab(&path, 100_000)).is_err(), "less than three segments");
    let nowhere = dir.path().join("missing/medium");
    assert!(inspect("Slab", &slab(&nowhere, 16 * MIB)).unwrap_err().to_string().contains("directory"));
    assert!(!path.exists() && !nowhere.exists(), "nothing was created");
    let config = SlabConfig { capacity_bytes: 16 * MIB, segment_bytes: MIB, ..SlabConfig::new(&path) };
    let tier = SlabTier::open(config).unwrap();
    assert_eq!(inspect("Slab", &slab(&path, 0)).unwrap_err().kind(), ErrorKind::Busy);
    drop(tier);
    let before = std::fs::read(&path).unwrap();
    let facts = inspect("Slab", &slab(&path, 16 * MIB)).unwrap();
    assert!(facts.formatted_bytes.is_some_and(|bytes| bytes <= 16 * MIB), "{facts:?}");
    let other = inspect("Slab", &slab(&path, 8 * MIB)).unwrap_err();
    assert!(other.to_string().contains("formatted with another size"), "{other}");
    assert!(std::fs::read(&path).unwrap() == before, "nothing was written");
    file(&path, 16 * MIB);
    assert_eq!(inspect("Slab", &slab(&path, 0)).unwrap().formatted_bytes, None);
    assert!(inspect("Slab", &slab(&path, 8 * MIB)).is_ok(), "a file may be longer than what is used of it");
    std::fs::write(&path, vec![7; 50_000]).unwrap();
    assert!(inspect("Slab", &slab(&path, 0)).is_err());
}

#[test]
fn a_tier_without_a_medium() {
    assert_eq!(inspect("Posix", &Value::Null).unwrap_err().kind(), ErrorKind::Unsupported);
}
