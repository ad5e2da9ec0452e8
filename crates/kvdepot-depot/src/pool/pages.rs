//! The size of a pool's pages, and whether the kernel can guarantee huge ones.

use std::os::fd::BorrowedFd;
use std::path::Path;

use super::{cgroup, nodes};

/// Size of a huge page.
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// The magic number of hugetlbfs in `statfs`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The kind of a pool's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Huge pages reserved for the pool when it was mapped.
    Huge,
    /// Ordinary pages, which the kernel merges into huge ones where it can.
    Transparent,
    /// Ordinary pages.
    Small,
}

impl Pages {
    /// Returns the kind for a pool's file.
    pub(crate) fn of(fd: BorrowedFd<'_>, root: &Path) -> Self {
        let huge =
            rustix::fs::fstatfs(fd).is_ok_and(|about| about.f_type as u64 & 0xffff_ffff == HUGETLBFS_MAGIC);
        if huge {
            return Self::Huge;
        }
        Self::joined(root, "shmem_enabled", &["always", "within_size", "advise", "force"])
    }

    /// Returns the kind for private memory.
    pub(crate) fn of_private(root: &Path) -> Self {
        Self::joined(root, "enabled", &["always", "madvise"])
    }

    fn joined(root: &Path, file: &str, on: &[&str]) -> Self {
        let file = root.join("sys/kernel/mm/transparent_hugepage").join(file);
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let chosen =
            text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
        if chosen.is_some_and(|chosen| on.contains(&chosen)) { Self::Transparent } else { Self::Small }
    }

    /// Returns the name in `stat`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Huge => "huge",
            Self::Transparent => "transparent",
            Self::Small => "small",
        }
    }

    /// Describes the kind for a log line, with advice on larger pages.
    pub(crate) fn describe(self, bytes: u64) -> String {
        match self {
            Self::Huge => "huge pages of 2 MiB".to_owned(),
            Self::Transparent => "pages of 4 KiB, which the kernel joins to 2 MiB where it can".to_owned(),
            Self::Small => format!(
                "pages of 4 KiB (for 2 MiB: sysctl vm.nr_hugepages={}, or echo advise > \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled, before the depot starts)",
                bytes.div_ceil(HUGE_PAGE_BYTES)
            ),
        }
    }
}

/// Checks whether all huge pages that the kernel reserves for a pool of this size would be available when they are
/// touched. Fails with the reason if not. The reservation counts all nodes and ignores cgroups, so a process limited to
/// some nodes, or in its huge pages, could get SIGBUS.
pub(crate) fn are_huge_pages_sure(bytes: u64, root: &Path) -> Result<(), String> {
    let path = root.join("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let free = free.unwrap_or(0).saturating_mul(HUGE_PAGE_BYTES);
    if free < bytes {
        return Err(format!("{free} bytes of huge pages are free, and the pool has {bytes}"));
    }
    if let Some(limit) = cgroup::huge_page_limit(root) {
        return Err(format!(
            "the cgroup limits huge pages to {} bytes ({})",
            limit.bytes,
            limit.file.display()
        ));
    }
    let (present, allowed) = (nodes::present(root), nodes::allowed(root));
    if allowed.is_none_or(|allowed| present.iter().any(|node| !allowed.contains(node))) {
        return Err("the process may not have memory of all NUMA nodes".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: u64 = 4 << 20;

    fn tree(free: &str, allowed: &str, limit: &str, shmem: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let status = format!("Name: x\nMems_allowed_list:\t{allowed}\n");
        for (path, text) in [
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", free),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem),
            ("sys/devices/system/node/has_memory", "0-1\n"),
            ("sys/fs/cgroup/hugetlb.2MB.max", limit),
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/status", &status),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn huge_pages_are_taken_only_where_they_cannot_run_out() {
        let sure =
            |free, allowed, limit| are_huge_pages_sure(POOL, tree(free, allowed, limit, "").path()).is_ok();
        assert!(sure("2\n", "0-1", "max\n") && sure("9\n", "0-7", "max\n"));
        assert!(!sure("1\n", "0-1", "max\n"), "too few are free");
        assert!(!sure("2\n", "0", "max\n"), "the cpuset leaves out a node");
        assert!(!sure("2\n", "0-1", "1073741824\n"), "the cgroup may forbid some of them");
        assert!(are_huge_pages_sure(POOL, Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn the_kernels_choice_is_read_from_its_brackets() {
        let pages = |text| Pages::joined(tree("", "", "", text).path(), "shmem_enabled", &["advise"]);
        assert_eq!(pages("always within_size [advise] never deny force\n"), Pages::Transparent);
        assert_eq!(pages("always within_size advise [never] deny force\n"), Pages::Small);
        assert_eq!(pages(""), Pages::Small);
        assert!(Pages::Small.describe(3 << 20).contains("nr_hugepages=2"));
    }
}
