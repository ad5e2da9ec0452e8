//! The placement of a pool's memory on NUMA nodes.

use std::fmt;
use std::path::Path;
use std::ptr::NonNull;

use kvdepot_core::limits::POOL_REGIONS_MAX;
use kvdepot_core::{Error, ErrorKind, Result};

use super::nodes::{NODES_MAX, parse_list, present, usual};
use super::pages::HUGE_PAGE_BYTES;
use super::{PoolMapping, PoolRegion};

/// The values of `pool_numa`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NumaPlacement {
    /// A region on each node if there are several; the kernel's choice if that fails.
    Auto,
    /// One region interleaved over all nodes; an error if that fails.
    Interleave,
    /// A region on each of these nodes; an error if that fails.
    Nodes(Vec<u32>),
}

impl NumaPlacement {
    /// Parses the key's value.
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

    /// Returns the nodes to use; `None` if there is no choice. `present` are the nodes with memory, `usual` those of
    /// them that are used unless the configuration names others.
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

/// Returns a set of nodes as the bit mask for `mbind`.
fn mask(nodes: &[u32]) -> Vec<libc::c_ulong> {
    let bits = libc::c_ulong::BITS;
    let mut mask = vec![0; (NODES_MAX / bits) as usize];
    for node in nodes {
        mask[(node / bits) as usize] |= 1 << (node % bits);
    }
    mask
}

/// The placement of a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Pages are interleaved over the nodes.
    Interleave,
    /// Pages come from the node as long as it has some.
    Prefer,
}

/// Places a range of untouched memory on nodes.
type Bind = dyn Fn(NonNull<u8>, usize, Policy, &[u32]) -> std::io::Result<()>;

/// A machine's nodes.
pub(crate) struct Nodes<'a> {
    /// Nodes with memory.
    present: Vec<u32>,
    /// Those of them that are used unless the configuration names others.
    usual: Vec<u32>,
    bind: &'a Bind,
}

impl Nodes<'_> {
    /// Reads the nodes of this machine from the kernel's files below `root`.
    pub(crate) fn of(root: &Path) -> Self {
        let present = present(root);
        Self { usual: usual(root, &present), present, bind: &bind }
    }

    /// Pretends that there are these nodes, for tests. Their memory comes from the first real node.
    pub(crate) fn stand_in(nodes: &[u32]) -> Self {
        Self { present: nodes.to_vec(), usual: nodes.to_vec(), bind: &bind_to_first }
    }
}

/// Binds to the first real node, to imitate a machine with other nodes. A container, or a kernel without nodes, may
/// refuse any.
fn bind_to_first(base: NonNull<u8>, len: usize, policy: Policy, _: &[u32]) -> std::io::Result<()> {
    let first: Vec<u32> = present(Path::new("/")).into_iter().take(1).collect();
    match bind(base, len, policy, &first) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => Err(error),
        _ => Ok(()),
    }
}

fn bind(base: NonNull<u8>, len: usize, policy: Policy, nodes: &[u32]) -> std::io::Result<()> {
    let mask = mask(nodes);
    let mode = match policy {
        Policy::Interleave => libc::MPOL_INTERLEAVE,
        Policy::Prefer => libc::MPOL_PREFERRED,
    };
    // SAFETY: the mask has `NODES_MAX` bits; the call moves no memory and fails where the range is not mapped.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            base.as_ptr(),
            len,
            mode,
            mask.as_ptr(),
            // The kernel uses one bit less than it is told.
            libc::c_ulong::from(NODES_MAX + 1),
            0,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The placement of a pool's memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    /// A region on each node.
    Divided(Vec<PoolRegion>),
    /// One region, interleaved over these nodes.
    InTurn(Vec<u32>),
    /// One region, placed by the kernel.
    ByKernel,
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Divided(regions) => {
                let nodes: Vec<u32> = regions.iter().filter_map(|region| region.node).collect();
                write!(f, ", in a region on each of the NUMA nodes {nodes:?}")
            }
            Self::InTurn(nodes) => write!(f, ", on the NUMA nodes {nodes:?} in turn"),
            Self::ByKernel => Ok(()),
        }
    }
}

/// Divides a pool into a region on each node, of whole huge pages and as equal as possible; `None` if a node would get
/// nothing.
fn divide(bytes: u64, nodes: &[u32]) -> Option<Vec<PoolRegion>> {
    let each = bytes / nodes.len().max(1) as u64 / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    let (last, others) = nodes.split_last()?;
    if each == 0 || others.is_empty() || nodes.len() > POOL_REGIONS_MAX {
        return None;
    }
    let mut regions: Vec<_> = others.iter().map(|&node| PoolRegion::memory(each, Some(node))).collect();
    regions.push(PoolRegion::memory(bytes - each * others.len() as u64, Some(*last)));
    Some(regions)
}

/// Places a pool's untouched memory. A pool that `grows` is used from its beginning, so it is not divided.
///
/// If a node is full, its pages come from others: remote memory is slower, but no memory would kill processes.
pub(crate) fn place(
    pool: &PoolMapping,
    placement: &NumaPlacement,
    grows: bool,
    machine: &Nodes<'_>,
) -> Result<Placed> {
    let Some(nodes) = placement.nodes(&machine.present, &machine.usual)? else {
        return Ok(Placed::ByKernel);
    };
    let is_divided = !grows && *placement != NumaPlacement::Interleave;
    let placed = match divide(pool.bytes(), &nodes).filter(|_| is_divided) {
        Some(regions) => bind_each(pool, &regions, machine.bind).map(|()| Placed::Divided(regions)),
        None => (machine.bind)(pool.base, pool.mapped_len(), Policy::Interleave, &nodes)
            .map(|()| Placed::InTurn(nodes.clone())),
    };
    let error = match placed {
        Ok(placed) => return Ok(placed),
        Err(error) => Error::io(
            "cannot place the pool on NUMA nodes (a container needs the capability SYS_NICE for it)",
            error,
        )
        .with("nodes", format!("{nodes:?}")),
    };
    if *placement == NumaPlacement::Auto {
        tracing::info!("the kernel chooses the pool's NUMA nodes: {error}");
        return Ok(Placed::ByKernel);
    }
    Err(error)
}

fn bind_each(pool: &PoolMapping, regions: &[PoolRegion], bind: &Bind) -> std::io::Result<()> {
    let mut start = 0;
    for (number, region) in regions.iter().enumerate() {
        let end = if number + 1 == regions.len() { pool.mapped_len() } else { start + region.bytes as usize };
        let nodes: Vec<u32> = region.node.into_iter().collect();
        // SAFETY: `start` lies in the mapping, whose length was a `usize` when it was mapped.
        let base = unsafe { pool.base.add(start) };
        bind(base, end - start, Policy::Prefer, &nodes)?;
        start = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// A machine whose GPU's memory is a separate node.
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

    /// The calls that placed memory, from the pool's beginning.
    type Calls = std::cell::RefCell<Vec<(usize, usize, Policy, Vec<u32>)>>;

    fn placed(pool: &PoolMapping, placement: &NumaPlacement, grows: bool) -> (Placed, Calls) {
        let calls = std::rc::Rc::new(Calls::default());
        let start = pool.base.as_ptr().addr();
        let noted = std::rc::Rc::clone(&calls);
        let note = move |base: NonNull<u8>, len: usize, policy: Policy, nodes: &[u32]| {
            noted.borrow_mut().push((base.as_ptr().addr() - start, len, policy, nodes.to_vec()));
            bind_to_first(base, len, policy, nodes)
        };
        let placed =
            place(pool, placement, grows, &Nodes { bind: &note, ..Nodes::stand_in(&[0, 1]) }).unwrap();
        let calls = calls.take();
        (placed, Calls::new(calls))
    }

    #[test]
    fn each_node_has_a_region_of_whole_huge_pages() {
        const MIB: u64 = 1 << 20;
        let pool = PoolMapping::create(7 * MIB + 4096).unwrap();
        for placement in [NumaPlacement::Auto, NumaPlacement::Nodes(vec![0, 1])] {
            let (placed, calls) = placed(&pool, &placement, false);
            let regions =
                vec![PoolRegion::memory(2 * MIB, Some(0)), PoolRegion::memory(5 * MIB + 4096, Some(1))];
            assert_eq!(placed, Placed::Divided(regions), "{placement:?}");
            let first = (2 * MIB) as usize;
            let expected = [
                (0, first, Policy::Prefer, vec![0]),
                (first, pool.mapped_len() - first, Policy::Prefer, vec![1]),
            ];
            assert_eq!(calls.into_inner(), expected);
        }
        pool.populate(0, pool.bytes()).unwrap();
    }

    #[test]
    fn one_region_has_its_pages_in_turn() {
        let pool = PoolMapping::create(8 << 20).unwrap();
        let small = PoolMapping::create(3 << 20).unwrap();
        for (pool, placement, grows) in [
            (&pool, NumaPlacement::Interleave, false),
            (&pool, NumaPlacement::Auto, true),
            (&small, NumaPlacement::Auto, false),
        ] {
            let (placed, calls) = placed(pool, &placement, grows);
            assert_eq!(placed, Placed::InTurn(vec![0, 1]), "{placement:?}, grows: {grows}");
            let expected = [(0, pool.mapped_len(), Policy::Interleave, vec![0, 1])];
            assert_eq!(calls.into_inner(), expected);
        }
    }

    #[test]
    fn a_kernel_that_refuses_chooses_itself_unless_nodes_were_asked_for() {
        let pool = PoolMapping::create(8 << 20).unwrap();
        let refuse = |_: NonNull<u8>, _: usize, _: Policy, _: &[u32]| {
            Err(std::io::Error::from_raw_os_error(libc::EPERM))
        };
        let nodes = Nodes { bind: &refuse, ..Nodes::stand_in(&[0, 1]) };
        assert_eq!(place(&pool, &NumaPlacement::Auto, false, &nodes).unwrap(), Placed::ByKernel);
        for placement in [NumaPlacement::Interleave, NumaPlacement::Nodes(vec![0, 1])] {
            let error = place(&pool, &placement, false, &nodes).unwrap_err();
            assert!(error.to_string().contains("SYS_NICE"), "{error}");
        }
    }
}
