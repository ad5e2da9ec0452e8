//! Chooses the next step: any that the rules allow, depending on the seed.
//!
//! Within one queue pair these are InfiniBand's ordering rules for reliable connections:
//! - The peer carries requests out in order: a request begins when those before it are *executed*. WRITEs are the
//!   exception: they may be placed at the same time if they do not overlap, since nobody may read them before a
//!   completion.
//! - A READ is executed when it has taken its bytes; it places them at any later time. A request that must not begin
//!   before they are placed has a fence.
//! - Completions come in order.

use kvdepot_verbs::sys::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS,
};

use crate::completion::Arrival;
use crate::memory::{fetch, place};
use crate::request::{Phase, Receive, Request, cut};
use crate::state::State;

/// Number of requests at the front of a queue that are considered.
const WINDOW: usize = 6;
/// Number of checks of a peer that is not connected yet before it counts as lost.
const CONNECT_ATTEMPTS_MAX: u32 = 10_000;
/// The value of `rnr_retry` that means unlimited.
const FOR_EVER: u8 = 7;

impl State {
    /// Does one random step. Returns false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        if self.config.hung {
            return false;
        }
        let mut candidates = Vec::new();
        for (&number, qp) in &self.qps {
            if qp.state != IBV_QPS_RTS {
                continue;
            }
            for index in 0..qp.requests.len().min(WINDOW) {
                if self.is_runnable(number, index) {
                    candidates.push((number, index));
                }
            }
        }
        let landing = usize::from(!self.posted.is_empty());
        if candidates.len() + landing == 0 {
            return false;
        }
        let drawn = self.rng.below(candidates.len() + landing);
        let Some(&(number, index)) = candidates.get(drawn) else {
            self.land_one();
            return true;
        };
        self.steps += 1;
        self.run(number, index);
        true
    }

    fn is_runnable(&self, number: u32, index: usize) -> bool {
        let Some(qp) = self.qps.get(&number) else { return false };
        let request = &qp.requests[index];
        match &request.phase {
            Phase::Moving { chunks, receive: None } if chunks.is_empty() && request.takes_receive() => {
                !self.is_starved(number)
            }
            Phase::Moving { .. } | Phase::Taking { .. } | Phase::Placing { .. } => true,
            Phase::Away => false,
            Phase::Done(_) => index == 0,
            Phase::Waiting => {
                let before = qp.requests.iter().take(index);
                let local = self.qps.contains_key(&qp.dest);
                let allowed = before.into_iter().all(|earlier| {
                    let fence = !request.is_fenced() || !earlier.is_read() || earlier.is_done();
                    let both_write = request.is_plain_write() && earlier.is_plain_write();
                    let moving = matches!(earlier.phase, Phase::Moving { .. });
                    let side_by_side = both_write && moving && !request.overlaps(earlier);
                    // After a refusal the peer carries out no more requests.
                    let refused = matches!(earlier.phase, Phase::Done(status) if status != IBV_WC_SUCCESS);
                    fence && !refused && (earlier.is_executed() || side_by_side)
                });
                let starved = request.takes_receive() && local && self.is_starved(number);
                // Another process gets one request at a time.
                allowed && !starved && (local || index == 0)
            }
        }
    }

    /// Returns whether a request waits for the peer's next receive without limit.
    fn is_starved(&self, number: u32) -> bool {
        let Some(qp) = self.qps.get(&number) else { return false };
        let Some(peer) = self.qps.get(&qp.dest) else { return false };
        let none = self.srqs.get(&peer.srq).map_or(peer.receives.is_empty(), |srq| srq.receives.is_empty());
        none && qp.rnr_retry == FOR_EVER && (IBV_QPS_RTR..=IBV_QPS_RTS).contains(&peer.state)
    }

    fn run(&mut self, number: u32, index: usize) {
        let Some(mut request) = self.take(number, index) else { return };
        let phase = std::mem::replace(&mut request.phase, Phase::Away);
        request.phase = match phase {
            Phase::Done(status) => {
                request.phase = Phase::Done(status);
                self.put(number, index, request);
                self.complete_head(number);
                return;
            }
            Phase::Waiting => self.begin(number, &mut request),
            Phase::Moving { chunks, receive } => self.move_chunk(number, &mut request, chunks, receive),
            Phase::Taking { chunks, staged } => self.take_chunk(number, &request, chunks, staged),
            Phase::Placing { chunks, staged } => self.place_chunk(number, &request, chunks, staged),
            Phase::Away => Phase::Away,
        };
        self.put(number, index, request);
    }

    fn take(&mut self, number: u32, index: usize) -> Option<Request> {
        let request = self.qps.get_mut(&number)?.requests.get_mut(index)?;
        let hole = Request { entries: Vec::new(), inline: None, phase: Phase::Away, ..*request };
        Some(std::mem::replace(request, hole))
    }

    fn put(&mut self, number: u32, index: usize, request: Request) {
        if let Some(place) = self.qps.get_mut(&number).and_then(|qp| qp.requests.get_mut(index)) {
            *place = request;
        }
    }

    fn begin(&mut self, number: u32, request: &mut Request) -> Phase {
        let Some(qp) = self.qps.get(&number) else { return Phase::Done(IBV_WC_RETRY_EXC_ERR) };
        if qp.cut {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        }
        let (pd, dest, sq_psn, rnr_retry) = (qp.pd, qp.dest, qp.sq_psn, qp.rnr_retry);
        // Keys of this side are checked before any byte leaves.
        let keys = self.local(pd, &request.entries, 0, request.len, request.is_read());
        if let (None, Err(status)) = (&request.inline, keys) {
            return Phase::Done(status);
        }
        let Some(peer) = self.qps.get(&dest) else { return self.send_away(number, request) };
        if peer.state == IBV_QPS_INIT && request.attempts < CONNECT_ATTEMPTS_MAX {
            request.attempts += 1;
            return Phase::Waiting;
        }
        let connected = (IBV_QPS_RTR..=IBV_QPS_RTS).contains(&peer.state) && peer.dest == number;
        if !connected || peer.cut || peer.rq_psn != sq_psn {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        }
        let (peer_pd, peer_access) = (peer.pd, peer.access);
        if request.is_read() || request.writes_remote() {
            let need = if request.is_read() { IBV_ACCESS_REMOTE_READ } else { IBV_ACCESS_REMOTE_WRITE };
            if peer_access & need == 0 {
                return self.refuse(number, dest, IBV_WC_REM_INV_REQ_ERR);
            }
            let range = (request.remote_address, request.len);
            let checked = self.remote(peer_pd, range.0, range.1, request.rkey, request.writes_remote());
            // Nothing is looked up for zero bytes.
            if let (Err(status), true) = (checked, request.len > 0) {
                return self.refuse(number, dest, status);
            }
        }
        let chunks = cut(&mut self.rng, request.len);
        if request.is_read() {
            return Phase::Taking { chunks, staged: vec![0; request.len] };
        }
        if request.writes_remote() {
            return Phase::Moving { chunks, receive: None };
        }
        match self.next_receive(dest) {
            Some(receive) if receive.len() >= request.len => Phase::Moving { chunks, receive: Some(receive) },
            Some(receive) => {
                self.fail_receive(dest, &receive, IBV_WC_LOC_LEN_ERR);
                self.refuse(number, dest, IBV_WC_REM_INV_REQ_ERR)
            }
            None => not_ready(request, rnr_retry),
        }
    }

    /// Refuses a request: the peer stops, unless it is this queue pair itself, which stops after its completion.
    fn refuse(&mut self, number: u32, peer: u32, status: u32) -> Phase {
        if peer != number {
            self.fail_qp(peer);
        }
        Phase::Done(status)
    }

    pub(crate) fn next_receive(&mut self, number: u32) -> Option<Receive> {
        let qp = self.qps.get_mut(&number)?;
        match self.srqs.get_mut(&qp.srq) {
            Some(srq) => srq.receives.pop_front(),
            None => qp.receives.pop_front(),
        }
    }

    pub(crate) fn fail_receive(&mut self, number: u32, receive: &Receive, status: u32) {
        let arrival = Arrival { status, len: 0, imm: None, solicited: false, is_write: false };
        self.end_receive(number, receive, arrival);
    }

    fn move_chunk(
        &mut self,
        number: u32,
        request: &mut Request,
        mut chunks: Vec<(usize, usize)>,
        receive: Option<Receive>,
    ) -> Phase {
        let known = self.qps.get(&number).map(|qp| (qp.pd, qp.dest, qp.rnr_retry));
        let Some((pd, dest, rnr_retry)) = known else {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        };
        let Some(peer_pd) = self.qps.get(&dest).map(|peer| peer.pd) else {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        };
        if let Some((from, len)) = chunks.pop() {
            let bytes = match &request.inline {
                Some(bytes) => Some(bytes[from..from + len].to_vec()),
                None => match self.local(pd, &request.entries, from, len, false) {
                    Ok(pieces) => fetch(&pieces),
                    Err(status) => return Phase::Done(status),
                },
            };
            let Some(bytes) = bytes else { return Phase::Done(IBV_WC_LOC_PROT_ERR) };
            self.bytes += len as u64;
            if let Some(receive) = &receive {
                let placed = self.local(peer_pd, &receive.entries, from, len, true);
                if !placed.is_ok_and(|pieces| place(&pieces, &bytes)) {
                    self.fail_receive(dest, receive, IBV_WC_LOC_PROT_ERR);
                    return self.refuse(number, dest, IBV_WC_REM_OP_ERR);
                }
            } else {
                let address = request.remote_address + from as u64;
                let target = self.remote(peer_pd, address, len, request.rkey, true);
                if !target.is_ok_and(|piece| self.deliver(request.rkey, piece, bytes)) {
                    return self.refuse(number, dest, IBV_WC_REM_ACCESS_ERR);
                }
            }
        }
        if !chunks.is_empty() {
            return Phase::Moving { chunks, receive };
        }
        if !request.takes_receive() {
            return Phase::Done(IBV_WC_SUCCESS);
        }
        // A WRITE WITH IMM takes its receive when all of its bytes have arrived.
        let Some(receive) = receive.or_else(|| self.next_receive(dest)) else {
            return match not_ready(request, rnr_retry) {
                Phase::Waiting => Phase::Moving { chunks, receive: None },
                ended => ended,
            };
        };
        let arrival = Arrival {
            status: IBV_WC_SUCCESS,
            len: request.len,
            imm: request.has_imm().then_some(request.imm),
            solicited: request.is_solicited(),
            is_write: request.writes_remote(),
        };
        self.end_receive(dest, &receive, arrival);
        Phase::Done(IBV_WC_SUCCESS)
    }

    fn take_chunk(
        &mut self,
        number: u32,
        request: &Request,
        mut chunks: Vec<(usize, usize)>,
        mut staged: Vec<u8>,
    ) -> Phase {
        let Some(dest) = self.qps.get(&number).map(|qp| qp.dest) else {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        };
        let Some(peer_pd) = self.qps.get(&dest).map(|peer| peer.pd) else {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        };
        self.land_all();
        if let Some((from, len)) = chunks.pop() {
            let source = self.remote(peer_pd, request.remote_address + from as u64, len, request.rkey, false);
            match source.ok().and_then(|piece| fetch(&[piece])) {
                Some(bytes) => staged[from..from + len].copy_from_slice(&bytes),
                None => return self.refuse(number, dest, IBV_WC_REM_ACCESS_ERR),
            }
        }
        if !chunks.is_empty() {
            return Phase::Taking { chunks, staged };
        }
        Phase::Placing { chunks: cut(&mut self.rng, request.len), staged }
    }

    fn place_chunk(
        &mut self,
        number: u32,
        request: &Request,
        mut chunks: Vec<(usize, usize)>,
        staged: Vec<u8>,
    ) -> Phase {
        let Some(pd) = self.qps.get(&number).map(|qp| qp.pd) else {
            return Phase::Done(IBV_WC_RETRY_EXC_ERR);
        };
        if let Some((from, len)) = chunks.pop() {
            let pieces = match self.local(pd, &request.entries, from, len, true) {
                Ok(pieces) => pieces,
                Err(status) => return Phase::Done(status),
            };
            self.bytes += len as u64;
            if !place(&pieces, &staged[from..from + len]) {
                return Phase::Done(IBV_WC_LOC_PROT_ERR);
            }
        }
        if chunks.is_empty() { Phase::Done(IBV_WC_SUCCESS) } else { Phase::Placing { chunks, staged } }
    }
}

/// Handles a peer without a receive: retry, or fail.
pub(crate) fn not_ready(request: &mut Request, rnr_retry: u8) -> Phase {
    request.attempts += 1;
    if rnr_retry == FOR_EVER || request.attempts <= u32::from(rnr_retry) {
        Phase::Waiting
    } else {
        Phase::Done(IBV_WC_RNR_RETRY_EXC_ERR)
    }
}
