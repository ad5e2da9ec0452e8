//! Makes a depot's pool by its configuration: checks it against the process's limits, places it, locks it, and logs it.

use std::path::Path;

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::mm::MlockFlags;
use rustix::process::{Resource, getrlimit};

use super::cgroup::{self, Memory, Sizes};
use super::numa::{self, NumaPlacement, Placed};
use super::{PoolMapping, pages};
use crate::config::DepotConfig;

/// The processes that can use a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Other processes can map it, too.
    Shared,
    /// Only this process.
    Private,
}

/// Makes the pool. `config` is adjusted if it can grow less far than requested.
pub(crate) fn make(config: &mut DepotConfig, reach: Reach) -> Result<PoolMapping> {
    let root = Path::new("/");
    let placement = NumaPlacement::parse(&config.pool_numa)?;
    let machine = config.numa_nodes.as_deref().map_or_else(|| numa::Nodes::of(root), numa::Nodes::stand_in);
    let memory = Memory::read(root);
    let mut sizes = Sizes { pool_bytes: config.pool_bytes, pool_bytes_max: config.pool_bytes_max };
    for tight in cgroup::fit(&mut sizes, &memory, cgroup::available_bytes(root))? {
        tracing::warn!("{tight}");
    }
    config.pool_bytes_max = sizes.pool_bytes_max;
    let bytes = config.mapped_bytes();
    let pool = match reach {
        Reach::Shared => PoolMapping::create(bytes)?,
        Reach::Private => PoolMapping::create_private(bytes)?,
    };
    let placed = numa::place(&pool, &placement, config.pool_bytes_max > config.pool_bytes, &machine)?;
    let told = placed.to_string();
    let pool = match placed {
        Placed::Divided(regions) => pool.divided(regions)?,
        Placed::InTurn(_) | Placed::ByKernel => pool,
    };
    if config.pool_mlock {
        lock(&pool)?;
    }
    tracing::info!(
        "the pool has {bytes} bytes in {}{}{}; they count for the cgroup {}{}",
        pool.pages().describe(bytes),
        told,
        if config.pool_mlock { ", locked" } else { "" },
        memory.path.as_deref().unwrap_or("(none)"),
        memory.limit.map_or_else(String::new, |limit| format!(", which may have {} bytes", limit.bytes)),
    );
    Ok(pool)
}

/// Locks the pool's pages in memory from their first touch on. Touches nothing itself.
pub(crate) fn lock(pool: &PoolMapping) -> Result<()> {
    // SAFETY: the range is the mapping.
    let locked =
        unsafe { rustix::mm::mlock_with(pool.base.as_ptr().cast(), pool.mapped_len(), MlockFlags::ONFAULT) };
    locked.map_err(|errno| refused(pool.bytes(), getrlimit(Resource::Memlock).current, errno.into()))
}

fn refused(pool_bytes: u64, limit: Option<u64>, cause: std::io::Error) -> Error {
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |bytes| bytes.to_string());
    Error::new(
        ErrorKind::Config,
        "cannot lock the pool's memory (pool_mlock): raise the limit on locked memory (ulimit -l, LimitMEMLOCK= of a systemd \
         unit, --ulimit memlock= of a container), give the capability IPC_LOCK, or turn pool_mlock off",
    )
    .with("pool_bytes", pool_bytes)
    .with("memlock_limit_bytes", limit)
    .with_source(cause)
}

/// Returns the part of `stat` about a pool's memory.
pub(crate) fn describe(pool: &PoolMapping, config: &DepotConfig) -> [(&'static str, serde_json::Value); 4] {
    let page = match pool.pages() {
        pages::Pages::Huge => pages::HUGE_PAGE_BYTES,
        _ => kvdepot_io::aligned::page_bytes() as u64,
    };
    [
        ("pool_page_bytes", page.into()),
        ("pool_pages", pool.pages().name().into()),
        ("pool_mlock", config.pool_mlock.into()),
        ("cgroup_memory", Memory::read(Path::new("/")).to_json()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: serde_json::Value) -> DepotConfig {
        let mut text = serde_json::json!({"pipeline": "Cache", "pool_bytes": 8 << 20});
        text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        DepotConfig::from_json(&text.to_string()).unwrap()
    }

    /// Returns whether the first `bytes` of a pool, which were touched, can never be swapped out.
    fn stays(pool: &PoolMapping, bytes: u64) -> bool {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", pool.base.as_ptr().addr());
        let mine = text.split_once(&start).unwrap().1;
        let flags = mine.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        let locked = mine.lines().find_map(|line| line.strip_prefix("Locked:")).unwrap();
        let locked: u64 = locked.trim().trim_end_matches("kB").trim().parse().unwrap();
        // Huge pages are never swapped out, and the kernel does not count them as locked.
        let has = |wanted: &str| flags.split(' ').any(|flag| flag == wanted);
        has("ht") || (has("lo") && locked * 1024 >= bytes)
    }

    #[test]
    fn a_pool_that_is_locked_stays_in_memory_once_it_is_touched_or_is_refused_with_the_limit() {
        for reach in [Reach::Shared, Reach::Private] {
            match make(&mut config(serde_json::json!({"pool_mlock": true})), reach) {
                Ok(pool) => {
                    pool.populate(0, 4 << 20).unwrap();
                    assert!(stays(&pool, 4 << 20), "{reach:?}");
                }
                // A process that may lock less than the pool gets this error.
                Err(error) => assert!(error.to_string().contains("memlock_limit_bytes"), "{error}"),
            }
        }
    }

    #[test]
    fn a_refusal_to_lock_names_the_limit_and_what_to_do() {
        let error = refused(1 << 30, Some(65_536), std::io::Error::from_raw_os_error(libc::ENOMEM));
        assert_eq!(error.kind(), ErrorKind::Config);
        for said in ["65536", "1073741824", "ulimit -l", "pool_mlock"] {
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(
            refused(1, None, std::io::Error::from_raw_os_error(libc::EPERM))
                .to_string()
                .contains("unlimited")
        );
    }

    #[test]
    fn what_a_pool_is_made_of_is_shown() {
        let mut config = config(serde_json::json!({}));
        let pool = make(&mut config, Reach::Shared).unwrap();
        let shown: serde_json::Map<_, _> =
            describe(&pool, &config).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let huge = shown["pool_pages"] == "huge";
        assert_eq!(shown["pool_page_bytes"] == 2 << 20, huge, "{shown:?}");
        assert_eq!(shown["pool_mlock"], false);
        let paid_by = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        if let Some(path) = shown["cgroup_memory"]["path"].as_str() {
            assert!(paid_by.contains(path), "{path} is none of\n{paid_by}");
        }
    }

    #[test]
    fn a_pool_on_nodes_that_are_not_there_is_refused() {
        let error = make(&mut config(serde_json::json!({"pool_numa": "1023"})), Reach::Shared).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("1023"), "{error}");
    }
}
