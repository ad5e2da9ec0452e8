//! A claim on its owner's side. Operational failures settle it without a hit (P2, P6).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{BATCH_HASHES_MAX, CLAIM_HASHES_MAX, CLAIM_LABEL_CHARS_MAX};
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceSpec, Result};

use crate::client::attach::Attachment;
use crate::client::generation::Generation;
use crate::client::lane;
use crate::message::{Arriving, ClaimGroup, ClaimTimes, Hashes, Request, Response, hash_bytes};

/// Minimum time between two polls of one claim.
const POLL_PAUSE: Duration = Duration::from_micros(500);

/// A settled claim that is still polled is renewed when it is a third to two thirds as old as the depot lets it become.
const AGE_PARTS: u32 = 3;
/// Different ages of renewal: claims that a scheduler opened in one step are not all renewed in one step.
const RENEWAL_AGES: u64 = 64;

/// One KV-cache group of a claim: namespaces of all ranks, window in blocks (0 = full), hashes per block.
#[derive(Clone, Debug)]
pub struct ClaimGroupSpec {
    /// Namespaces of all ranks.
    pub namespaces: Vec<Arc<NamespaceSpec>>,
    /// Number of last blocks that the group needs; 0 = all.
    pub window_blocks: u32,
    /// Hash units per block, at least 1.
    pub hashes_per_block: u32,
}

/// The blocks that a claim is over, to open it again: a depot that takes over does not know it, and a depot lets claims
/// go that nobody polls.
struct Wanted {
    groups: Vec<ClaimGroupSpec>,
    hashes: Vec<BlockHash>,
    limit: u32,
    tiers: Option<Vec<String>>,
    label: String,
}

/// A hit being prepared. Its leases live on the lane that opened the claim, which all claims of an attachment share.
pub struct Claim {
    attachment: Arc<Attachment>,
    /// The depot that has the claim; `None` if none has it, or not yet.
    generation: Option<Arc<Generation>>,
    wanted: Option<Wanted>,
    id: u64,
    skip: u32,
    settled: bool,
    units: u32,
    units_from_tier: u32,
    arriving: Option<Arriving>,
    /// What the answer to the release said.
    times: Option<ClaimTimes>,
    asked: Instant,
    openings: u32,
}

impl Claim {
    /// Opens a claim that its client calls `label`. If the depot is absent, hung or out of step, the claim is settled without
    /// a hit. If another depot takes over the pool, the claim stays unsettled, and polls open it there.
    ///
    /// # Errors
    /// `Config` for arguments that no depot would accept.
    pub fn open(
        attachment: &Arc<Attachment>,
        groups: &[ClaimGroupSpec],
        hashes: &[BlockHash],
        skip: u32,
        limit: u32,
        label: &str,
    ) -> Result<Self> {
        Self::open_from(attachment, groups, hashes, (skip, limit), None, label)
    }

    /// Like [`Self::open`]. `tiers`: names of those that blocks may come from, as in the depot's pipeline; `None` = all,
    /// empty = the pool alone.
    ///
    /// # Errors
    /// `Config` also for a tier that the depot does not have.
    pub fn open_from(
        attachment: &Arc<Attachment>,
        groups: &[ClaimGroupSpec],
        hashes: &[BlockHash],
        (skip, limit): (u32, u32),
        tiers: Option<&[String]>,
        label: &str,
    ) -> Result<Self> {
        if groups.is_empty() || groups.iter().any(|g| g.namespaces.is_empty() || g.hashes_per_block == 0) {
            return Err(Error::new(
                ErrorKind::Config,
                "a claim needs groups, each with namespaces and hashes per block",
            ));
        }
        // Nothing beyond the limit is requested.
        let hashes = &hashes[..hashes.len().min(limit as usize).min(CLAIM_HASHES_MAX)];
        let mut claim = Self {
            attachment: Arc::clone(attachment),
            generation: None,
            wanted: None,
            id: 0,
            skip,
            settled: true,
            units: skip,
            units_from_tier: 0,
            arriving: None,
            times: None,
            asked: Instant::now(),
            openings: 0,
        };
        if limit > skip && (skip as usize) < hashes.len() {
            let label = label
                .char_indices()
                .nth(CLAIM_LABEL_CHARS_MAX)
                .map_or(label, |(end, _)| &label[..end])
                .into();
            let chooses = tiers.is_some();
            let (groups, hashes, tiers) = (groups.to_vec(), hashes.to_vec(), tiers.map(<[String]>::to_vec));
            let outcome = claim.open_at_depot(Wanted { groups, hashes, limit, tiers, label });
            match outcome {
                Err(error) if chooses && error.kind() == ErrorKind::Config => {
                    // No depot has it, so there is nothing to release.
                    claim.generation = None;
                    return Err(error);
                }
                outcome => claim.note(outcome),
            }
        }
        Ok(claim)
    }

    fn open_or_miss(&mut self) {
        if let Some(wanted) = self.wanted.take() {
            let outcome = self.open_at_depot(wanted);
            self.note(outcome);
        }
    }

    fn open_at_depot(&mut self, wanted: Wanted) -> Result<()> {
        let outcome = self.ask_open(&wanted);
        self.openings += u32::from(outcome.is_ok());
        self.wanted = Some(wanted);
        outcome
    }

    /// Settles the claim without a hit after an error, unless another depot will know more.
    fn note(&mut self, outcome: Result<()>) {
        if let Err(error) = outcome {
            let handed_over = self.generation.take().is_none_or(|generation| generation.is_handed_over());
            if handed_over && self.attachment.attached() {
                (self.settled, self.arriving, self.asked) = (false, None, Instant::now());
            } else {
                self.miss(&error);
            }
        }
        if self.settled && self.units <= self.skip {
            self.wanted = None;
        }
    }

    fn ask_open(&mut self, Wanted { groups, hashes, limit, tiers, label }: &Wanted) -> Result<()> {
        let generation = self.attachment.generation()?;
        self.generation = Some(Arc::clone(&generation));
        let groups = groups
            .iter()
            .map(|group| {
                let handles = group.namespaces.iter().map(|spec| self.attachment.handle(&generation, spec));
                Ok(ClaimGroup {
                    namespaces: handles.collect::<Result<_>>()?,
                    window_blocks: group.window_blocks,
                    hashes_per_block: group.hashes_per_block,
                })
            })
            .collect::<Result<_>>()?;
        let (ahead, last) = hashes.split_at((hashes.len() - 1) / BATCH_HASHES_MAX * BATCH_HASHES_MAX);
        let hashes = Hashes(hash_bytes(last).into());
        let request = Request::ClaimOpen {
            groups,
            hashes,
            skip: self.skip,
            limit: *limit,
            tiers: tiers.clone(),
            label: label.as_str().into(),
        };
        self.ask(ahead, request)
    }

    /// Makes a request on the lane that all claims share, about the hashes `ahead` and those of the request.
    fn ask(&mut self, ahead: &[BlockHash], request: Request<'_>) -> Result<()> {
        let generation = self.generation.clone().ok_or_else(lane::unexpected)?;
        // Once for each frame: a depot takes longer for a prompt of a million tokens.
        let frames = ahead.len().div_ceil(BATCH_HASHES_MAX) + 1;
        let wait = self.attachment.call_timeout * u32::try_from(frames).unwrap_or(u32::MAX);
        let deadline = Instant::now() + wait;
        let answer = generation.ask_claims(&self.attachment, ahead, request, deadline)?;
        self.asked = Instant::now();
        match answer {
            Response::Claim { claim, settled, units, units_from_tier, arriving } => {
                self.id = claim;
                self.settled = settled;
                self.units = if settled { units.max(self.skip) } else { self.skip };
                self.units_from_tier = units_from_tier;
                self.arriving = arriving;
                Ok(())
            }
            Response::ClaimTimes(times) => {
                self.times = Some(times);
                Ok(())
            }
            Response::Ok => Ok(()),
            _ => Err(lane::unexpected()),
        }
    }

    fn miss(&mut self, error: &Error) {
        self.attachment.stats.failed("claim", error);
        self.generation = None;
        self.settled = true;
        self.units = self.skip;
        self.units_from_tier = 0;
        self.arriving = None;
    }

    /// Returns `(settled, units, units from a tier)`. Asks the depot at most every half millisecond; once settled, rarely,
    /// to keep the leases. A claim that the depot has let go is opened again, and may then be unsettled again.
    pub fn poll(&mut self) -> (bool, u32, u32) {
        if self.settled {
            self.renew();
        } else if self.asked.elapsed() >= POLL_PAUSE {
            self.ask_or_miss(Request::ClaimPoll { claim: self.id, settle: false });
        }
        (self.settled, self.units, self.units_from_tier)
    }

    /// Keeps the leases of a settled hit, if they would end soon.
    fn renew(&mut self) {
        let Some(generation) = self.generation.as_ref().filter(|_| self.wanted.is_some()) else { return };
        let part = Duration::from_millis(generation.welcome.timeout_ms) / AGE_PARTS;
        let spread = part * (self.id % RENEWAL_AGES) as u32 / RENEWAL_AGES as u32;
        if self.asked.elapsed() >= part + spread {
            self.ask_or_miss(Request::ClaimPoll { claim: self.id, settle: false });
        }
    }

    /// Returns how often the claim was opened at a depot: more than once if a depot has let it go, or took over.
    pub const fn openings(&self) -> u32 {
        self.openings
    }

    /// Returns the last known state of blocks in flight. A load may begin before all of them have arrived: it waits for
    /// each block itself, and fails those that never arrive.
    pub fn arriving(&self) -> Option<Arriving> {
        self.arriving.filter(|_| !self.settled)
    }

    /// Polls until the claim is settled or the timeout has passed.
    pub fn wait(&mut self, timeout: Duration) -> (bool, u32, u32) {
        let deadline = Instant::now() + timeout;
        loop {
            let now = self.poll();
            if now.0 || Instant::now() >= deadline {
                return now;
            }
            std::thread::sleep(POLL_PAUSE);
        }
    }

    /// Settles the claim with what has arrived so far.
    pub fn settle_now(&mut self) -> (bool, u32, u32) {
        self.end_with(|claim| Request::ClaimPoll { claim, settle: true })
    }

    /// As [`Self::settle_now`], because computing the rest is faster than waiting for it.
    pub fn decline(&mut self) -> (bool, u32, u32) {
        self.end_with(|claim| Request::ClaimDecline { claim })
    }

    fn end_with(&mut self, request: fn(u64) -> Request<'static>) -> (bool, u32, u32) {
        if !self.settled {
            let is_new = self.ask_or_miss(request(self.id));
            if is_new && !self.settled && self.generation.is_some() {
                self.ask_or_miss(request(self.id));
            }
            self.settled = true;
        }
        (self.settled, self.units, self.units_from_tier)
    }

    /// Makes a request about the claim. Returns whether it was opened anew instead, because no depot has it any more.
    fn ask_or_miss(&mut self, request: Request<'_>) -> bool {
        if self.generation.is_some() {
            let outcome = self.ask(&[], request);
            let is_let_go = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
            if outcome.is_err() && !is_let_go {
                self.give_up();
            }
            if !is_let_go || self.wanted.is_none() {
                self.note(outcome);
                return false;
            }
        }
        self.open_or_miss();
        true
    }

    /// Ends the leases of a claim about which its depot has answered with an error. A lane out of step has ended them.
    fn give_up(&mut self) {
        let is_there = |generation: &Arc<Generation>| !generation.is_lost() && !generation.is_handed_over();
        if self.generation.as_ref().is_some_and(is_there) {
            // The error that is noted is the first one.
            let _ = self.ask(&[], Request::ClaimRelease { claim: self.id, tell_times: false });
        }
    }

    /// Ends the leases. Later calls have no effect.
    pub fn release(&mut self) {
        self.end(false);
    }

    /// Like [`Self::release`]. With `tell_times` it returns when the claim got how far, if a depot still held it.
    pub fn end(&mut self, tell_times: bool) -> Option<ClaimTimes> {
        self.times = None;
        if self.generation.is_some() {
            if let Err(error) = self.ask(&[], Request::ClaimRelease { claim: self.id, tell_times }) {
                self.attachment.stats.failed("claim", &error);
            }
            self.generation = None;
        }
        (self.settled, self.wanted) = (true, None);
        self.times.take()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({}, settled: {}, units: {})", self.id, self.settled, self.units)
    }
}
