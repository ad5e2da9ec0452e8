//! A shared tier is a tier, so that decorators can wrap what the registry built.

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;

use crate::{Done, Presence, Tier, TierEvents, TierServer, TierUsage, Written};

impl<T: Tier + ?Sized> Tier for Arc<T> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn open_namespace(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        (**self).open_namespace(spec, at_least)
    }

    fn advance_epoch(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        (**self).advance_epoch(spec, at_least)
    }

    fn close_namespace(&self, root: NamespaceId) {
        (**self).close_namespace(root);
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        (**self).peek(keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        (**self).probe(keys, deadline, done);
    }

    fn read(&self, key: BlockKey, dst: SlotBuf, deadline: Instant, done: Done<()>) {
        (**self).read(key, dst, deadline, done);
    }

    fn write(&self, key: BlockKey, src: SlotBuf, deadline: Instant, done: Done<Written>) {
        (**self).write(key, src, deadline, done);
    }

    fn remove(&self, key: BlockKey) {
        (**self).remove(key);
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

    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        (**self).keys(namespace)
    }

    fn drain(&self, deadline: Instant) -> bool {
        (**self).drain(deadline)
    }
}
