//! An engine that injects faults by a plan.

use std::sync::Arc;
use std::time::Instant;

use super::plan::{FaultOp, Faults};
use crate::engine::{EngineStats, IoEngine, Request};

/// Fails requests before another engine sees them, as its plan says for [`FaultOp::Submit`]. A plan that makes `Submit`
/// slow or hang blocks the caller, which no engine may do; tests use that to show its effect.
#[derive(Debug)]
pub struct FaultEngine {
    inner: Arc<dyn IoEngine>,
    faults: Faults,
}

impl FaultEngine {
    /// Wraps an engine.
    pub fn new(inner: Arc<dyn IoEngine>, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl IoEngine for FaultEngine {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn submit(&self, batch: Vec<Request>) {
        let mut kept = Vec::with_capacity(batch.len());
        for request in batch {
            match self.faults.strike(FaultOp::Submit) {
                Ok(_) => kept.push(request),
                Err(error) => request.fail(error),
            }
        }
        self.inner.submit(kept);
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner.drain(deadline)
    }

    fn stats(&self) -> EngineStats {
        self.inner.stats()
    }
}
