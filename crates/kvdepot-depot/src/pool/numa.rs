//! On which NUMA nodes a pool's memory lies.

use std::path::Path;

use kvdepot_core::{Error, ErrorKind, Result};

use super::PoolMapping;

/// Highest number of a node, as the kernel is built at most.
const NODES_MAX: u32 = 1024;

/// What `pool_numa` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NumaPlacement {
    /// Over all nodes in turn where there are several.
    Auto,
    /// The same, and an error where that fails.
    Interleave,
    /// Over these nodes in turn.
    Nodes(Vec<u32>),
}

impl NumaPlacement {
    /// Reads the key's value.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "interleave" => Ok(Self::Interleave),
            list => parse_list(list).filter(|nodes| !nodes.is_empty()).map(Self::Nodes).ok_or_else(|| {
                Error::new(
                    ErrorKind::Config,
                    "pool_numa is auto, interleave or a list of nodes such as 0,2-3",
                )
                .with("pool_numa", text)
            }),
        }
    }

    /// The nodes to take in turn; none when there is nothing to choose. `present` are the nodes that have memory, `usual`
    /// those of them that are taken unless the configuration names others.
    fn nodes(&self, present: &[u32], usual: &[u32]) -> Result<Option<Vec<u32>>> {
        match self {
            Self::Auto | Self::Interleave => {
                Ok((present.len() > 1 && !usual.is_empty()).then(|| usual.to_vec()))
            }
            Self::Nodes(wanted) => match wanted.iter().find(|node| !present.contains(node)) {
                Some(missing) => {
                    Err(Error::new(ErrorKind::Config, "this machine has no such NUMA node with memory")
                        .with("pool_numa_node", missing)
                        .with("nodes", format!("{present:?}")))
                }
                None => Ok((present.len() > 1).then(|| wanted.clone())),
            },
        }
    }
}

/// Numbers as the kernel lists them: `0-3,8`. Ascending, each once; none for anything else.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || last >= NODES_MAX {
            return None;
        }
        nodes.extend(first..=last);
    }
    nodes.sort_unstable();
    nodes.dedup();
    Some(nodes)
}

/// The nodes that have memory; node 0 where the kernel does not say.
pub(crate) fn present(root: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(root.join("sys/devices/system/node/has_memory")).ok();
    text.and_then(|text| parse_list(&text)).filter(|nodes| !nodes.is_empty()).unwrap_or_else(|| vec![0])
}

/// Those of the nodes that have processors and that this process may use. A node without processors is a GPU's or an
/// expander's memory, which is taken only where the configuration says so.
fn usual(root: &Path, present: &[u32]) -> Vec<u32> {
    let text = std::fs::read_to_string(root.join("sys/devices/system/node/has_cpu")).ok();
    let with_processors = text.and_then(|text| parse_list(&text));
    let allowed = allowed(root);
    let is_in =
        |nodes: &Option<Vec<u32>>, node: u32| nodes.as_ref().is_none_or(|nodes| nodes.contains(&node));
    present.iter().copied().filter(|&node| is_in(&with_processors, node) && is_in(&allowed, node)).collect()
}

/// The nodes that this process may have memory of; none where the kernel does not say.
pub(crate) fn allowed(root: &Path) -> Option<Vec<u32>> {
    let text = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
    parse_list(text.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?)
}

/// Bits of a set of nodes, as `mbind` takes it.
fn mask(nodes: &[u32]) -> Vec<libc::c_ulong> {
    let bits = libc::c_ulong::BITS;
    let mut mask = vec![0; (NODES_MAX / bits) as usize];
    for node in nodes {
        mask[(node / bits) as usize] |= 1 << (node % bits);
    }
    mask
}

/// Places a pool's memory, of which nothing may be touched yet: the nodes in use, none where the kernel chooses.
///
/// The nodes take pages in turn. When one is full, others give them: memory elsewhere is slower, and no memory at all
/// would end processes.
pub(crate) fn place(pool: &PoolMapping, placement: &NumaPlacement, root: &Path) -> Result<Option<Vec<u32>>> {
    let present = present(root);
    let Some(nodes) = placement.nodes(&present, &usual(root, &present))? else { return Ok(None) };
    let mask = mask(&nodes);
    let len = pool.mapped_len();
    // SAFETY: the range is the mapping, and the mask has `NODES_MAX` bits; the call moves no memory.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            pool.base.as_ptr(),
            len,
            libc::MPOL_INTERLEAVE,
            mask.as_ptr(),
            // The kernel counts one bit less than it is told.
            libc::c_ulong::from(NODES_MAX + 1),
            0,
        )
    };
    if outcome == 0 {
        return Ok(Some(nodes));
    }
    let error = Error::io(
        "cannot place the pool on NUMA nodes (a container needs the capability SYS_NICE for it)",
        std::io::Error::last_os_error(),
    )
    .with("nodes", format!("{nodes:?}"));
    if *placement == NumaPlacement::Auto {
        tracing::info!("the kernel chooses the pool's NUMA nodes: {error}");
        return Ok(None);
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read_as_the_kernel_writes_them() {
        for (text, nodes) in [("0\n", vec![0]), ("0-3,8", vec![0, 1, 2, 3, 8]), ("5,1,1", vec![1, 5])] {
            assert_eq!(parse_list(text), Some(nodes), "{text}");
        }
        for text in ["", "a", "1-", "3-1", "1024", "0-4294967295", "-1", "1,,2"] {
            assert_eq!(parse_list(text), None, "{text}");
        }
    }

    #[test]
    fn keys_are_read_and_nonsense_is_refused() {
        assert_eq!(NumaPlacement::parse("auto").unwrap(), NumaPlacement::Auto);
        assert_eq!(NumaPlacement::parse("interleave").unwrap(), NumaPlacement::Interleave);
        assert_eq!(NumaPlacement::parse("0,2-3").unwrap(), NumaPlacement::Nodes(vec![0, 2, 3]));
        for text in ["", "near", "0;1"] {
            assert_eq!(NumaPlacement::parse(text).unwrap_err().kind(), ErrorKind::Config, "{text}");
        }
    }

    #[test]
    fn a_machine_of_one_node_has_nothing_to_choose() {
        for placement in [NumaPlacement::Auto, NumaPlacement::Interleave, NumaPlacement::Nodes(vec![0])] {
            assert_eq!(placement.nodes(&[0], &[0]).unwrap(), None, "{placement:?}");
        }
        assert_eq!(NumaPlacement::Nodes(vec![1]).nodes(&[0], &[0]).unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn several_nodes_take_turns_and_a_list_says_which() {
        assert_eq!(NumaPlacement::Auto.nodes(&[0, 1], &[0, 1]).unwrap(), Some(vec![0, 1]));
        assert_eq!(NumaPlacement::Nodes(vec![1]).nodes(&[0, 1], &[0]).unwrap(), Some(vec![1]));
        assert!(NumaPlacement::Nodes(vec![1, 2]).nodes(&[0, 1], &[0]).unwrap_err().to_string().contains('2'));
        assert_eq!(mask(&[0, 65])[..2], [1, 2]);
    }

    /// As on a machine whose GPU's memory is a node of its own.
    #[test]
    fn memory_without_processors_is_not_taken_unless_it_is_named() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/system/node");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("has_memory"), "0-2\n").unwrap();
        std::fs::write(dir.join("has_cpu"), "0-1\n").unwrap();
        let present = present(root.path());
        let usual = usual(root.path(), &present);
        assert_eq!(NumaPlacement::Auto.nodes(&present, &usual).unwrap(), Some(vec![0, 1]));
        assert_eq!(NumaPlacement::Nodes(vec![2]).nodes(&present, &usual).unwrap(), Some(vec![2]));
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        std::fs::write(root.path().join("proc/self/status"), "Mems_allowed_list:\t1-2\n").unwrap();
        assert_eq!(super::usual(root.path(), &present), [1], "as numactl --membind says");
    }

    #[test]
    fn the_kernel_takes_the_call() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/system/node");
        std::fs::create_dir_all(&dir).unwrap();
        // A machine that says it has two nodes: the kernel takes those that are there, or refuses as a whole.
        std::fs::write(dir.join("has_memory"), "0-1\n").unwrap();
        let pool = PoolMapping::create(4 << 20).unwrap();
        match place(&pool, &NumaPlacement::Nodes(vec![0]), root.path()) {
            Ok(nodes) => assert_eq!(nodes, Some(vec![0])),
            Err(error) => assert!(error.to_string().contains("SYS_NICE"), "{error}"),
        }
        pool.populate(0, 4 << 20).unwrap();
    }
}
