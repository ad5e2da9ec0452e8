//! A device in sysfs.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The directory of a device, whose `kind` is `block` or `char`.
pub(crate) fn sysfs(device: &Path, kind: &str) -> PathBuf {
    let number = std::fs::metadata(device).unwrap().st_rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    std::fs::canonicalize(format!("/sys/dev/{kind}/{major}:{minor}")).unwrap()
}
