//! Lanes in use: taken from the idle ones or connected, and the calls on them, after which a depot may count as lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_core::limits::BATCH_HASHES_MAX;
use kvdepot_core::{BlockHash, Error, ErrorKind, Result};

use crate::client::attach::{Attachment, Target};
use crate::client::generation::Generation;
use crate::client::lane::{Lane, unexpected};
use crate::epochs::OPEN_ANSWER;
use crate::message::{Hashes, Request, Response, hash_bytes};

/// The time for a handshake.
pub(super) const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
const _: () = assert!(
    OPEN_ANSWER.as_millis() < HANDSHAKE_WAIT.as_millis(),
    "a depot that waits for a tier is not late"
);
/// Number of lanes kept for reuse.
const IDLE_LANES_MAX: usize = 16;

/// How long a call in the background may take before the depot counts as lost: never less than a call of a client.
fn background_wait(call_timeout: Duration) -> Duration {
    HANDSHAKE_WAIT.max(call_timeout)
}

impl Attachment {
    /// Returns how long a call in the background may take.
    pub(super) fn background_wait(&self) -> Duration {
        background_wait(self.call_timeout)
    }

    /// Returns a lane of this generation, new or reused.
    pub(crate) fn lane(self: &Arc<Self>, generation: &Arc<Generation>, wait: Duration) -> Result<LaneGuard> {
        if let Some(lane) = generation.lanes.lock().pop() {
            return Ok(LaneGuard {
                attachment: Arc::clone(self),
                generation: Arc::clone(generation),
                lane: Some(lane),
                whole: false,
            });
        }
        let lane = match &self.target {
            Target::Embedded(depot, user) => Lane::embedded(depot.session_of(user)),
            Target::Socket { path, .. } => match Lane::connect(path, Instant::now() + wait) {
                Ok((lane, welcome, _)) if welcome.depot == generation.welcome.depot => lane,
                Ok(_) => {
                    // It is attached in a moment.
                    self.note_take_over(generation);
                    self.lost(generation, "another depot answers now");
                    return Err(Error::new(ErrorKind::Unavailable, "the depot was replaced"));
                }
                // A depot with too many connections closes new ones without an answer, and keeps serving the others.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Busy)
                        && !generation.hung_up() =>
                {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        "the depot refused another connection: it has reached its limit, or has just exited",
                    )
                    .with_source(error));
                }
                Err(error) => {
                    self.lost(generation, &error.to_string());
                    return Err(error);
                }
            },
        };
        Ok(LaneGuard {
            attachment: Arc::clone(self),
            generation: Arc::clone(generation),
            lane: Some(lane),
            whole: false,
        })
    }

    /// Returns a lane that is not returned for reuse.
    pub(crate) fn lane_of_its_own(self: &Arc<Self>, generation: &Arc<Generation>) -> Result<Lane> {
        let lane = self.lane(generation, self.background_wait())?.into_lane();
        lane.ok_or_else(|| Error::new(ErrorKind::Closed, "the lane is out of step"))
    }

    /// Makes a call on a lane. After a transport error the lane is dropped and the depot counts as lost, as does a depot
    /// that hands its pool over.
    fn call_on<T>(
        &self,
        generation: &Arc<Generation>,
        slot: &mut Option<Lane>,
        call: impl FnOnce(&mut Lane) -> Result<T>,
    ) -> Result<T> {
        let lane = slot.as_mut().ok_or_else(|| Error::new(ErrorKind::Closed, "the lane is out of step"))?;
        let outcome = call(lane);
        if lane.is_handed_over_after(&outcome) {
            self.hands_over(generation);
        }
        outcome.inspect_err(|error| {
            *slot = None;
            self.lost(generation, &error.to_string());
        })
    }

    /// Like `call_on`, for a call that waits for tiers. A depot that is late with it, but answers others, is not lost: only
    /// the lane is dropped, and what this process has open there works on (P6).
    fn call_on_late<T>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        slot: &mut Option<Lane>,
        call: impl FnOnce(&mut Lane) -> Result<T>,
    ) -> Result<T> {
        let mut late = None;
        let outcome = self.call_on(generation, slot, |lane| match call(lane) {
            Err(error) if error.kind() == ErrorKind::Timeout => {
                lane.look_for_announcement();
                late = Some(error);
                Ok(None)
            }
            outcome => outcome.map(Some),
        })?;
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
        *slot = None;
        self.is_answering(generation);
        Err(late.unwrap_or_else(unexpected))
    }

    /// Returns whether the depot answers a call in time. If not, it counts as lost.
    fn is_answering(self: &Arc<Self>, generation: &Arc<Generation>) -> bool {
        if let Ok(mut lane) = self.lane(generation, self.call_timeout)
            && lane.call(Request::Ping, Instant::now() + self.call_timeout).is_ok()
        {
            lane.finish();
        }
        !generation.lost.load(Ordering::Acquire)
    }
}

impl Generation {
    /// Makes a request on the lane of the claims, about the hashes `ahead` and those of the request. A lane that is out
    /// of step is dropped, and its claims' leases with it.
    pub(crate) fn ask_claims(
        self: &Arc<Self>,
        attachment: &Arc<Attachment>,
        ahead: &[BlockHash],
        request: Request<'_>,
        deadline: Instant,
    ) -> Result<Response> {
        let mut claims = self.claims.lock();
        if self.lost.load(Ordering::Acquire) {
            *claims = None;
            return Err(Error::new(ErrorKind::Unavailable, "the depot was lost"));
        }
        if claims.is_none() {
            *claims = attachment.lane(self, attachment.call_timeout)?.into_lane();
        }
        let named = request.namespaces();
        let call = |lane: &mut Lane| {
            for hashes in ahead.chunks(BATCH_HASHES_MAX) {
                lane.tell(Request::ClaimHashes { hashes: Hashes(hash_bytes(hashes).into()) }, deadline)?;
            }
            lane.call(request, deadline)
        };
        let response = attachment.call_on(self, &mut claims, call)?;
        self.checked(&named, response)
    }
}

/// A lane in use. Dropping it closes it, which ends its leases. `finish` returns it for reuse instead, when nothing is
/// leased on it any more.
pub(crate) struct LaneGuard {
    attachment: Arc<Attachment>,
    generation: Arc<Generation>,
    lane: Option<Lane>,
    whole: bool,
}

impl LaneGuard {
    /// Makes a call. `Failed` answers are returned as errors and leave the lane in step.
    pub(crate) fn call(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        let named = request.namespaces();
        let call = |lane: &mut Lane| lane.call(request, deadline);
        let response = self.attachment.call_on(&self.generation, &mut self.lane, call)?;
        self.generation.checked(&named, response)
    }

    /// Like `call`, for a request that waits for tiers: a depot that is late with it is lost only if it answers nothing
    /// else either.
    pub(crate) fn call_late(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        let named = request.namespaces();
        let call = |lane: &mut Lane| lane.call(request, deadline);
        let response = self.attachment.call_on_late(&self.generation, &mut self.lane, call)?;
        self.generation.checked(&named, response)
    }

    /// Returns how long a call in the background may take.
    pub(super) fn background_wait(&self) -> Duration {
        self.attachment.background_wait()
    }

    /// Sends a request that is not answered.
    pub(crate) fn tell(&mut self, request: Request<'_>, deadline: Instant) -> Result<()> {
        let tell = |lane: &mut Lane| lane.tell(request, deadline);
        self.attachment.call_on(&self.generation, &mut self.lane, tell)
    }

    /// Makes the depot place blocks requested on this lane near a NUMA node, where it has space.
    pub(crate) fn wish_near(&mut self, node: Option<u32>, deadline: Instant) -> Result<()> {
        let tell = |lane: &mut Lane| lane.wish_near(node, deadline);
        self.attachment.call_on(&self.generation, &mut self.lane, tell)
    }

    /// Like `call`, for a request that may wait for tiers: a depot that answers no calls is lost after `call_timeout`,
    /// not only at the deadline.
    pub(crate) fn call_patiently(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        let (attachment, generation) = (&self.attachment, &self.generation);
        let is_answering = || attachment.is_answering(generation);
        let patience = attachment.call_timeout;
        let named = request.namespaces();
        let call = |lane: &mut Lane| lane.call_patiently(request, deadline, patience, is_answering);
        let response = attachment.call_on(generation, &mut self.lane, call)?;
        generation.checked(&named, response)
    }

    fn into_lane(mut self) -> Option<Lane> {
        self.lane.take()
    }

    /// Takes the lane with everything leased on it; calls fail from now on.
    pub(crate) fn take(&mut self) -> Option<Lane> {
        self.lane.take()
    }

    /// Returns the lane for reuse. It must hold no lease any more.
    pub(crate) fn finish(mut self) {
        self.whole = true;
    }
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if let (true, Some(lane)) = (self.whole, self.lane.take()) {
            let mut lanes = self.generation.lanes.lock();
            if lanes.len() < IDLE_LANES_MAX && !self.generation.lost.load(Ordering::Acquire) {
                lanes.push(lane);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_in_the_background_has_no_less_time_than_a_client_s() {
        assert_eq!(background_wait(Duration::from_secs(1)), HANDSHAKE_WAIT);
        assert_eq!(background_wait(Duration::from_secs(60)), Duration::from_secs(60));
    }
}
