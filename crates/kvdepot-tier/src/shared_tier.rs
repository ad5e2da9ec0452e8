//! `Tier` for a shared tier, so that decorators can wrap the registry's tiers.

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};

use crate::{
    Done, LeaseItem, Presence, ReadItem, Tier, TierEvents, TierMemory, TierServer, TierUsage, WriteItem,
};

impl<T: Tier + ?Sized> Tier for Arc<T> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        (**self).open_namespace(spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        (**self).advance_epoch(spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        (**self).close_namespace(root);
    }

    fn is_down(&self, key: &BlockKey) -> bool {
        (**self).is_down(key)
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        (**self).peek(keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        (**self).probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        (**self).read(reads, deadline);
    }

    fn memory(&self) -> Result<Option<TierMemory>> {
        (**self).memory()
    }

    fn lease(&self, leases: Vec<LeaseItem>, deadline: Instant) {
        (**self).lease(leases, deadline);
    }

    fn end_leases(&self, places: &[u64]) {
        (**self).end_leases(places);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        (**self).write(writes, deadline);
    }

    fn write_window_bytes(&self) -> u64 {
        (**self).write_window_bytes()
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        (**self).remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        (**self).part(key)
    }

    fn touch(&self, keys: &[BlockKey]) {
        (**self).touch(keys);
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        (**self).attach(events);
    }

    fn usage(&self) -> TierUsage {
        (**self).usage()
    }

    fn servers(&self) -> Vec<TierServer> {
        (**self).servers()
    }

    fn engine(&self) -> &'static str {
        (**self).engine()
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        (**self).figures()
    }

    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        (**self).keys(namespace)
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        (**self).keys_from(namespace, from)
    }

    fn tick(&self) {
        (**self).tick();
    }

    fn drain(&self, deadline: Instant) -> bool {
        (**self).drain(deadline)
    }
}
