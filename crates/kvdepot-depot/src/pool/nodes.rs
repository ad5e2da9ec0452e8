//! The NUMA nodes of this machine, and those that this process may use.

use std::path::Path;

/// Upper bound of node numbers in any kernel build.
pub(super) const NODES_MAX: u32 = 1024;
/// More processors than any kernel build supports.
const PROCESSORS_MAX: u32 = 1 << 16;

/// Parses numbers as the kernel lists them: `0-3,8`. Returns them ascending and once each; `None` for anything else.
pub(super) fn parse_list(text: &str) -> Option<Vec<u32>> {
    parse_numbers(text, NODES_MAX)
}

fn parse_numbers(text: &str, below: u32) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || last >= below {
            return None;
        }
        nodes.extend(first..=last);
    }
    nodes.sort_unstable();
    nodes.dedup();
    Some(nodes)
}

/// Returns the nodes that have memory; node 0 if the kernel does not tell.
pub(crate) fn present(root: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(root.join("sys/devices/system/node/has_memory")).ok();
    text.and_then(|text| parse_list(&text)).filter(|nodes| !nodes.is_empty()).unwrap_or_else(|| vec![0])
}

/// Returns those nodes that have processors and that this process may use. A node without processors is the memory of a
/// GPU or an expander, which is used only if the configuration says so.
pub(super) fn usual(root: &Path, present: &[u32]) -> Vec<u32> {
    let text = std::fs::read_to_string(root.join("sys/devices/system/node/has_cpu")).ok();
    let with_processors = text.and_then(|text| parse_list(&text));
    let allowed = allowed(root);
    let is_in =
        |nodes: &Option<Vec<u32>>, node: u32| nodes.as_ref().is_none_or(|nodes| nodes.contains(&node));
    present.iter().copied().filter(|&node| is_in(&with_processors, node) && is_in(&allowed, node)).collect()
}

/// Returns the nodes on which this process may allocate memory; `None` if the kernel does not tell.
pub(crate) fn allowed(root: &Path) -> Option<Vec<u32>> {
    let text = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
    parse_list(text.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?)
}

/// Returns the distances of other nodes from one, in the kernel's unit; empty if it does not tell.
pub(crate) fn distances(root: &Path, node: u32) -> Vec<(u32, u32)> {
    let nodes = root.join("sys/devices/system/node");
    let online = std::fs::read_to_string(nodes.join("online")).ok().and_then(|text| parse_list(&text));
    let text = std::fs::read_to_string(nodes.join(format!("node{node}/distance"))).unwrap_or_default();
    let distances = text.split_ascii_whitespace().filter_map(|word| word.parse().ok());
    online.unwrap_or_default().into_iter().zip(distances).collect()
}

/// Returns the node with all processors that this process may use; `None` if they are on several nodes.
pub(crate) fn own_node(root: &Path) -> Option<u32> {
    let status = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
    let own = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).and_then(parse_cpus)?;
    let nodes = root.join("sys/devices/system/node");
    let online = std::fs::read_to_string(nodes.join("online")).ok().and_then(|text| parse_list(&text))?;
    online.into_iter().find(|node| {
        let text = std::fs::read_to_string(nodes.join(format!("node{node}/cpulist"))).unwrap_or_default();
        parse_cpus(&text).is_some_and(|cpus| own.iter().all(|own| cpus.contains(own)))
    })
}

/// Parses the kernel's list of processors, of which there may be more than nodes.
fn parse_cpus(text: &str) -> Option<Vec<u32>> {
    parse_numbers(text, PROCESSORS_MAX)
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
    fn distances_and_the_node_of_a_process_are_read_from_the_kernel_s_files() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/system/node");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("online"), "0-1\n").unwrap();
        for (node, distances, cpus) in [(0, "10 21\n", "0-3,8\n"), (1, "21 10\n", "4-7\n")] {
            std::fs::create_dir_all(dir.join(format!("node{node}"))).unwrap();
            std::fs::write(dir.join(format!("node{node}/distance")), distances).unwrap();
            std::fs::write(dir.join(format!("node{node}/cpulist")), cpus).unwrap();
        }
        assert_eq!(distances(root.path(), 1), [(0, 21), (1, 10)]);
        assert_eq!(distances(root.path(), 9), []);
        assert_eq!(own_node(root.path()), None, "no list of processors");
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        for (own, node) in [("5-6", Some(1)), ("2,8", Some(0)), ("3-4", None)] {
            let status = format!("Cpus_allowed_list:\t{own}\n");
            std::fs::write(root.path().join("proc/self/status"), status).unwrap();
            assert_eq!(own_node(root.path()), node, "{own}");
        }
    }
}
