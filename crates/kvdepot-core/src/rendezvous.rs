//! Placement of blocks on servers by rendezvous hashing, so that adding or removing a server moves only its own share.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::key::BlockKey;

/// The servers' seeds, in the order of the configuration.
#[derive(Debug)]
pub struct Places {
    seeds: Vec<u64>,
}

impl Places {
    /// Makes the places on these servers, by their names.
    pub fn new(servers: &[String]) -> Self {
        Self { seeds: servers.iter().map(|server| xxh3_64(server.as_bytes())).collect() }
    }

    /// Returns the server of a block: the one with the highest score, in whichever order they are listed.
    pub fn of(&self, key: &BlockKey) -> usize {
        if self.seeds.len() == 1 {
            return 0;
        }
        let bytes = key.to_bytes();
        let score = |seed: u64| (xxh3_64_with_seed(&bytes, seed), seed);
        (0..self.seeds.len()).max_by_key(|&index| score(self.seeds[index])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{BlockHash, NamespaceId};

    fn key(n: u64) -> BlockKey {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&n.to_le_bytes());
        BlockKey { namespace: NamespaceId([7; 16]), hash: BlockHash(hash) }
    }

    #[test]
    fn order_does_not_matter_and_a_server_that_leaves_moves_only_its_own() {
        let names = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let (all, turned, fewer) =
            (names(&["a:1", "b:1", "c:1"]), names(&["c:1", "a:1", "b:1"]), names(&["a:1", "c:1"]));
        let (first, second, third) = (Places::new(&all), Places::new(&turned), Places::new(&fewer));
        let mut share = [0; 3];
        for n in 0..3000 {
            let at = first.of(&key(n));
            share[at] += 1;
            assert_eq!(all[at], turned[second.of(&key(n))]);
            if all[at] != "b:1" {
                assert_eq!(all[at], fewer[third.of(&key(n))], "block {n} moved without need");
            }
        }
        assert!(share.iter().all(|&count| count > 800), "{share:?}");
    }

    /// Nodes of different versions must agree, so these values never change.
    #[test]
    fn places_are_fixed() {
        let places = Places::new(&["a:1".to_owned(), "b:1".to_owned(), "c:1".to_owned()]);
        let at: Vec<usize> = (0..16).map(|n| places.of(&key(n))).collect();
        assert_eq!(at, EXPECTED);
    }

    const EXPECTED: [usize; 16] = [1, 0, 2, 1, 2, 2, 0, 0, 0, 0, 2, 0, 1, 0, 2, 2];
}
