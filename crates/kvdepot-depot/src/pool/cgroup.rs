//! The cgroup that is charged for this process's memory, its limits, and whether a pool fits. Files are read below a
//! root directory that tests can replace.

use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};

/// Percentage of a limit above which a pool leaves too little for everything else.
const WARN_PERCENT: u64 = 80;
/// Version 1 writes "no limit" as the largest number of whole pages.
const NO_LIMIT: u64 = 1 << 62;

/// A limit, and the file that sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) bytes: u64,
    pub(crate) file: PathBuf,
}

/// The cgroup that is charged for this process's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Its path in the kernel; `None` if the kernel has no memory cgroups.
    pub(crate) path: Option<String>,
    /// The lowest hard limit from it up to the root: beyond that the kernel kills processes.
    pub(crate) limit: Option<Limit>,
    /// The lowest limit beyond which the kernel throttles processes; version 2 only.
    pub(crate) high: Option<Limit>,
    /// Current usage in bytes, page cache included.
    pub(crate) current_bytes: Option<u64>,
}

/// The directories of a controller for this process: its own first, then those of its ancestors.
struct Group {
    path: String,
    dirs: Vec<PathBuf>,
    v2: bool,
}

/// Finds a controller's line in `/proc/self/cgroup`. Returns its path, and whether it is of version 2.
fn path_of<'a>(text: &'a str, controller: &str) -> Option<(&'a str, bool)> {
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        Some((parts.next()?, parts.next()?, parts.next()?))
    });
    let mut unified = None;
    for (number, controllers, path) in lines {
        if controllers.split(',').any(|name| name == controller) {
            return Some((path, false));
        }
        if number == "0" && controllers.is_empty() {
            unified = Some((path, true));
        }
    }
    unified
}

impl Group {
    fn find(root: &Path, controller: &str) -> Option<Self> {
        let text = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
        let (path, v2) = path_of(&text, controller)?;
        let mounts = root.join("sys/fs/cgroup");
        let mount = match v2 {
            false => mounts.join(controller),
            true if mounts.join("unified/cgroup.controllers").exists() => mounts.join("unified"),
            true => mounts,
        };
        // A path outside of what this process can see (another cgroup namespace) begins with "..".
        let inside = path.trim_start_matches('/');
        let mut dirs = Vec::new();
        if !Path::new(inside).components().any(|part| part == std::path::Component::ParentDir) {
            let ancestors = Path::new(inside).ancestors().filter(|part| !part.as_os_str().is_empty());
            dirs.extend(ancestors.map(|part| mount.join(part)).filter(|dir| dir.is_dir()));
        }
        dirs.push(mount);
        Some(Self { path: path.to_owned(), dirs, v2 })
    }

    /// Returns the lowest limit in files of this name, here or above.
    fn lowest(&self, name: &str) -> Option<Limit> {
        let limits = self.dirs.iter().filter_map(|dir| {
            let file = dir.join(name);
            number(&file).filter(|&bytes| bytes < NO_LIMIT).map(|bytes| Limit { bytes, file })
        });
        limits.min_by_key(|limit| limit.bytes)
    }
}

/// Reads a number from a file; `None` for `max`, and for unreadable files.
fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

impl Memory {
    /// Reads the limits from the files below `root`, which is `/` outside of tests. Unreadable values are unknown.
    pub(crate) fn read(root: &Path) -> Self {
        let Some(group) = Group::find(root, "memory") else { return Self::default() };
        let (limit, current) = match group.v2 {
            true => ("memory.max", "memory.current"),
            false => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        };
        Self {
            limit: group.lowest(limit),
            high: group.v2.then(|| group.lowest("memory.high")).flatten(),
            current_bytes: group.dirs.iter().find_map(|dir| number(&dir.join(current))),
            path: Some(group.path),
        }
    }

    /// Formats it for `stat`.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "path": self.path,
            "limit_bytes": self.limit.as_ref().map(|limit| limit.bytes),
            "current_bytes": self.current_bytes,
        })
    }
}

/// Returns the limit of huge pages of 2 MiB of this process's cgroup, if there is one.
pub(crate) fn huge_page_limit(root: &Path) -> Option<Limit> {
    let group = Group::find(root, "hugetlb")?;
    group.lowest(if group.v2 { "hugetlb.2MB.max" } else { "hugetlb.2MB.limit_in_bytes" })
}

/// Returns the memory available without swapping.
pub(crate) fn available_bytes(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The requested sizes of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) pool_bytes: u64,
    /// The size that it may grow to. A value not above `pool_bytes` means that it does not grow.
    pub(crate) pool_bytes_max: u64,
}

/// Refuses a pool that cannot fit below the hard limit, and lowers the size that it may grow to. Returns warnings about
/// tight limits.
pub(crate) fn fit(sizes: &mut Sizes, memory: &Memory, available_bytes: Option<u64>) -> Result<Vec<String>> {
    let share = |bytes: u64| bytes / 100 * WARN_PERCENT;
    let pool = sizes.pool_bytes;
    let mut tight = Vec::new();
    if let Some(limit) = &memory.limit {
        if pool > limit.bytes {
            return Err(Error::new(
                ErrorKind::Config,
                "the pool does not fit the memory that its cgroup may have: make the pool smaller (pool_gb), or raise the limit",
            )
            .with("pool_bytes", pool)
            .with("limit_bytes", limit.bytes)
            .with("limit_file", limit.file.display()));
        }
        if pool > share(limit.bytes) {
            tight.push(format!(
                "the pool of {pool} bytes takes more than {WARN_PERCENT} % of the {} bytes that its cgroup may have ({}): the \
                 kernel kills processes of the cgroup when the rest does not do for them",
                limit.bytes,
                limit.file.display()
            ));
        }
        let grown_max = share(limit.bytes).max(pool);
        if sizes.pool_bytes_max > grown_max {
            tight.push(format!(
                "the pool grows to {grown_max} bytes, not to {}: its cgroup may have {} bytes ({})",
                sizes.pool_bytes_max,
                limit.bytes,
                limit.file.display()
            ));
            sizes.pool_bytes_max = grown_max - grown_max % kvdepot_core::limits::BLOCK_ALIGN_BYTES;
        }
    }
    if let Some(high) = memory.high.as_ref().filter(|high| pool > share(high.bytes)) {
        tight.push(format!(
            "the pool of {pool} bytes takes more than {WARN_PERCENT} % of the {} bytes beyond which the kernel slows its cgroup \
             down ({})",
            high.bytes,
            high.file.display()
        ));
    }
    if let Some(available) = available_bytes.filter(|&available| pool > share(available)) {
        tight.push(format!(
            "the pool of {pool} bytes takes more than {WARN_PERCENT} % of the {available} bytes of memory that are available \
             (MemAvailable of /proc/meminfo)"
        ));
    }
    Ok(tight)
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
