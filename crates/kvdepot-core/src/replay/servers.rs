//! The pool servers that the nodes of a simulated fleet share. Blocks lie on them as those of a Remote tier do.

use super::level::Level;
use super::simulated::SimulatedCache;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{BlockHash, BlockKey, NamespaceId};
use crate::rendezvous::Places;

/// The block's server is down.
#[derive(Debug)]
pub(super) struct Unreachable;

/// Pool servers; one that is down is `None`.
pub(super) struct Servers {
    caches: Vec<Option<SimulatedCache>>,
    places: Places,
    level: Level,
}

impl Servers {
    /// Makes this many empty servers, each with the capacity of the level.
    pub(super) fn new(count: usize, level: &Level) -> Result<Self> {
        let cache = || SimulatedCache::new(&level.policy, level.capacity).map(Some);
        let names: Vec<String> = (0..count).map(|number| format!("server {number}")).collect();
        Ok(Self {
            caches: (0..count).map(|_| cache()).collect::<Result<_>>()?,
            places: Places::new(&names),
            level: level.clone(),
        })
    }

    /// A server goes down, and loses its blocks.
    pub(super) fn lose(&mut self, server: usize) -> Result<()> {
        let lost = self.caches[server].take();
        lost.map(drop).ok_or_else(|| refused("a lost pool server is down already", server))
    }

    /// A server comes back, empty.
    pub(super) fn bring_back(&mut self, server: usize) -> Result<()> {
        if self.caches[server].is_some() {
            return Err(refused("an added pool server is up already", server));
        }
        self.caches[server] = Some(SimulatedCache::new(&self.level.policy, self.level.capacity)?);
        Ok(())
    }

    fn place(&self, block: u64) -> usize {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&block.to_le_bytes());
        self.places.of(&BlockKey { namespace: NamespaceId([0; 16]), hash: BlockHash(hash) })
    }

    pub(super) fn begin_request(&mut self) {
        self.caches.iter_mut().flatten().for_each(SimulatedCache::begin_request);
    }

    pub(super) fn contains(&self, block: u64) -> bool {
        self.caches[self.place(block)].as_ref().is_some_and(|cache| cache.contains(block))
    }

    pub(super) fn touch(&mut self, block: u64) -> bool {
        let place = self.place(block);
        self.caches[place].as_mut().is_some_and(|cache| cache.touch(block))
    }

    pub(super) fn remove(&mut self, is_past: &impl Fn(u64) -> bool) {
        self.caches.iter_mut().flatten().for_each(|cache| cache.remove(is_past));
    }

    pub(super) fn insert(&mut self, block: u64) -> std::result::Result<Option<u64>, Unreachable> {
        let place = self.place(block);
        self.caches[place].as_mut().map(|cache| cache.insert(block)).ok_or(Unreachable)
    }
}

fn refused(why: &'static str, server: usize) -> Error {
    Error::new(ErrorKind::Config, why).with("server", server)
}
