//! The namespaces of all runs. They are made once, because fingerprints are slow.

use std::sync::{Arc, OnceLock};

use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};

/// Namespaces with the number of shards per block; every shard is a page.
const SPACES: [(&str, usize); 8] =
    [("r0", 2), ("r1", 2), ("w0", 1), ("w1", 3), ("values", 2), ("x0", 1), ("x1", 2), ("x2", 1)];
/// Number of namespaces of a run in which none is forgotten.
pub(crate) const LASTING: usize = 5;
/// The namespace of values, which are replaced; the others are of blocks. The ones after it come and go.
pub(crate) const VALUES: usize = 4;

/// Ranks of a group for claims, as indexes into [`all`].
pub(crate) const GROUPS: [&[usize]; 4] = [&[0, 1], &[2], &[0], &[3]];

/// Returns all namespaces.
pub(crate) fn all() -> &'static [Arc<NamespaceSpec>] {
    static ALL: OnceLock<Vec<Arc<NamespaceSpec>>> = OnceLock::new();
    ALL.get_or_init(|| {
        SPACES
            .iter()
            .map(|&(name, shards)| {
                let layout = BlockLayout::uniform(shards, &[4096]).expect("a small layout");
                let facts = format!("{{\"model\":\"{name}\"}}");
                Arc::new(NamespaceSpec::new(&facts, layout).expect("plain facts"))
            })
            .collect()
    })
}

/// Returns the hash of one unit of a prompt.
pub(crate) const fn hash(prompt: usize, unit: usize) -> BlockHash {
    let mut bytes = [0xAB; 16];
    bytes[0] = prompt as u8;
    bytes[1] = unit as u8;
    BlockHash(bytes)
}
