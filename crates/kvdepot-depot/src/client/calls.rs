//! Calls of an attachment that move no blocks.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::BATCH_HASHES_MAX;
use kvdepot_core::{BlockHash, NamespaceSpec, Result};

use crate::client::attach::Attachment;
use crate::client::generation::Generation;
use crate::client::lane;
use crate::message::{Hashes, Request, Response, hash_bytes};

impl Attachment {
    /// Advances namespaces to their next epoch: blocks dumped before are not served again, from any tier.
    pub fn reset(self: &Arc<Self>, namespaces: &[Arc<NamespaceSpec>]) -> Result<()> {
        let generation = self.generation()?;
        let handles = namespaces.iter().map(|spec| self.handle(&generation, spec)).collect::<Result<_>>()?;
        let wait = std::time::Duration::from_millis(generation.welcome.timeout_ms);
        let mut lane = self.lane(&generation, self.call_timeout)?;
        let answer = lane.call_late(Request::Reset { namespaces: handles }, Instant::now() + wait)?;
        lane.finish();
        if let Response::Epochs(_) = answer { Ok(()) } else { Err(lane::unexpected()) }
    }

    /// Waits until everything dumped so far is in the tiers. Returns `false` on timeout.
    pub fn drain(self: &Arc<Self>, wait: std::time::Duration) -> Result<bool> {
        let generation = self.generation()?;
        let mut lane = self.lane(&generation, self.call_timeout)?;
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        // The depot answers by its own deadline; the extra time is for a busy machine.
        let answer =
            lane.call(Request::Drain { wait_ms }, Instant::now() + wait + std::time::Duration::from_secs(1))?;
        lane.finish();
        if let Response::Drained(drained) = answer { Ok(drained) } else { Err(lane::unexpected()) }
    }

    /// Returns the counters of this client, and under `depot` those of the depot if one is attached.
    pub fn stats(self: &Arc<Self>) -> serde_json::Value {
        let mut map = self.stats.to_json();
        map.retain(|name, _| name == "failures");
        map.insert("attached".to_owned(), self.attached().into());
        if let Ok(text) = self.depot_stats() {
            map.insert("depot".to_owned(), serde_json::from_str(&text).unwrap_or_default());
        }
        map.into()
    }

    fn depot_stats(self: &Arc<Self>) -> Result<String> {
        let generation = self.generation()?;
        let mut lane = self.lane(&generation, self.call_timeout)?;
        let wait = self.call_timeout.max(std::time::Duration::from_secs(1));
        let answer = lane.call(Request::Stats, Instant::now() + wait)?;
        lane.finish();
        if let Response::Stats(text) = answer { Ok(text) } else { Err(lane::unexpected()) }
    }

    /// Makes a call, and again at the next depot if this one hands its pool over before it has answered.
    fn across_take_over<T>(
        &self,
        deadline: Instant,
        mut call: impl FnMut(&Arc<Generation>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let generation = self.generation_by(deadline)?;
            let outcome = call(&generation);
            if outcome.is_ok() || !generation.is_handed_over() || Instant::now() >= deadline {
                return outcome;
            }
        }
    }

    /// Returns which blocks the depot has, in pool or tier, within `wait` as long as the depot answers other calls. A
    /// depot that takes over is waited for.
    pub(crate) fn lookup(
        self: &Arc<Self>,
        spec: &NamespaceSpec,
        hashes: &[BlockHash],
        wait: std::time::Duration,
    ) -> Result<Vec<u8>> {
        self.across_take_over(Instant::now() + wait, |generation| {
            let namespace = self.handle(generation, spec)?;
            let mut lane = self.lane(generation, self.call_timeout)?;
            let mut present = Vec::with_capacity(hashes.len());
            for batch in hashes.chunks(BATCH_HASHES_MAX) {
                let request = Request::Lookup { namespace, hashes: Hashes(hash_bytes(batch).into()) };
                let Response::Present(bytes) = lane.call_patiently(request, Instant::now() + wait)? else {
                    return Err(lane::unexpected());
                };
                present.extend_from_slice(&bytes);
            }
            lane.finish();
            if present.len() == hashes.len() { Ok(present) } else { Err(lane::unexpected()) }
        })
    }

    /// Returns how many leading blocks the depot has, within `wait` as long as the depot answers other calls. A depot
    /// that takes over is waited for.
    pub(crate) fn lookup_prefix(
        self: &Arc<Self>,
        spec: &NamespaceSpec,
        hashes: &[BlockHash],
        wait: std::time::Duration,
    ) -> Result<usize> {
        self.across_take_over(Instant::now() + wait, |generation| {
            let namespace = self.handle(generation, spec)?;
            let mut lane = self.lane(generation, self.call_timeout)?;
            let mut prefix = 0;
            for batch in hashes.chunks(BATCH_HASHES_MAX) {
                let hashes = Hashes(hash_bytes(batch).into());
                let request = Request::LookupPrefix { namespaces: vec![namespace], hashes };
                let Response::Prefix(count) = lane.call_patiently(request, Instant::now() + wait)? else {
                    return Err(lane::unexpected());
                };
                prefix += (count as usize).min(batch.len());
                if (count as usize) < batch.len() {
                    break;
                }
            }
            lane.finish();
            Ok(prefix)
        })
    }

    /// Requests that blocks be read into the pool.
    pub(crate) fn prefetch(self: &Arc<Self>, spec: &NamespaceSpec, hashes: &[BlockHash]) -> Result<()> {
        let generation = self.generation()?;
        let namespace = self.handle(&generation, spec)?;
        let mut lane = self.lane(&generation, self.call_timeout)?;
        for batch in hashes.chunks(BATCH_HASHES_MAX) {
            let request = Request::Prefetch { namespace, hashes: Hashes(hash_bytes(batch).into()) };
            lane.call(request, Instant::now() + self.call_timeout)?;
        }
        lane.finish();
        Ok(())
    }
}
