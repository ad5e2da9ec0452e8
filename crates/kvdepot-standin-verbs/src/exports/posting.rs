//! Calls of a context's table: posting, polling, arming.

use std::ffi::c_int;

use kvdepot_verbs::sys::*;

use crate::memory::{Entry, Piece, fetch, own_pid};
use crate::request::{Phase, Receive, Request};
use crate::state::{State, lock, wake};

/// Maximum number of steps of one poll in lazy mode.
const STEPS_OF_A_POLL: usize = 6;

pub(super) fn operations() -> ibv_context_ops {
    ibv_context_ops {
        _compat_before_poll: [std::ptr::null_mut(); 11],
        poll_cq: Some(poll_cq),
        req_notify_cq: Some(req_notify_cq),
        _compat_before_srq: [std::ptr::null_mut(); 7],
        post_srq_recv: Some(post_srq_recv),
        _compat_before_post: [std::ptr::null_mut(); 4],
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        _compat_rest: [std::ptr::null_mut(); 5],
    }
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, max: c_int, out: *mut ibv_wc) -> c_int {
    let mut state = lock();
    if let Some(code) = state.fault("poll_cq") {
        return -code;
    }
    if state.config.lazy {
        let steps = state.rng.below(STEPS_OF_A_POLL);
        for _ in 0..steps {
            if !state.step() {
                break;
            }
        }
    }
    let max = usize::try_from(max).unwrap_or(0);
    let Some(completions) = state.poll(cq as usize, max) else { return -libc::EOVERFLOW };
    for (index, completion) in completions.iter().enumerate() {
        // SAFETY: the caller has room for `max`.
        unsafe { *out.add(index) = *completion };
    }
    completions.len() as c_int
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let mut state = lock();
    if let Some(errno) = state.fault("req_notify_cq") {
        return errno;
    }
    let Some(cq) = state.cqs.get_mut(&(cq as usize)) else { return libc::EINVAL };
    // A later request for fewer events does not undo an earlier one.
    cq.armed = Some(solicited_only != 0 && cq.armed.unwrap_or(true));
    drop(state);
    wake();
    0
}

/// # Safety
/// `list` must have `count` entries.
unsafe fn entries(list: *mut ibv_sge, count: c_int) -> Vec<Entry> {
    (0..usize::try_from(count).unwrap_or(0))
        .map(|index| {
            // SAFETY: the caller's contract.
            let sge = unsafe { *list.add(index) };
            Entry { address: sge.addr, len: sge.length, lkey: sge.lkey }
        })
        .collect()
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut state = lock();
    // SAFETY: a queue pair of `ibv_create_qp`.
    let number = unsafe { (*qp).qp_num };
    state.doorbells += 1;
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the caller's list, linked until null.
        let request = unsafe { *next };
        // SAFETY: as above.
        let pieces = unsafe { entries(request.sg_list, request.num_sge) };
        let rc = match state.fault("post_send") {
            Some(errno) => errno,
            None => state.accept(number, &request, pieces),
        };
        if rc != 0 {
            // SAFETY: the caller's place.
            unsafe { *bad = next };
            wake();
            return rc;
        }
        next = request.next;
    }
    // In the error state everything that is posted completes immediately.
    if state.qps.get(&number).is_some_and(|qp| qp.state == IBV_QPS_ERR) {
        state.fail_qp(number);
    }
    drop(state);
    wake();
    0
}

impl State {
    fn accept(&mut self, number: u32, wr: &ibv_send_wr, entries: Vec<Entry>) -> c_int {
        let Some(qp) = self.qps.get_mut(&number) else { return libc::EINVAL };
        let known = wr.opcode <= IBV_WR_RDMA_READ;
        if !(qp.state == IBV_QPS_RTS || qp.state == IBV_QPS_ERR) || !known {
            return libc::EINVAL;
        }
        if entries.len() > qp.cap.max_send_sge as usize {
            return libc::EINVAL;
        }
        if qp.send_places >= qp.cap.max_send_wr {
            return libc::ENOMEM;
        }
        let len: usize = entries.iter().map(|entry| entry.len as usize).sum();
        let is_inline = wr.send_flags & IBV_SEND_INLINE != 0;
        let is_read = wr.opcode == IBV_WR_RDMA_READ;
        if (is_read && (is_inline || qp.reads_max == 0))
            || (is_inline && len > qp.cap.max_inline_data as usize)
        {
            return libc::EINVAL;
        }
        let inline = if is_inline {
            let own: Vec<Piece> = entries
                .iter()
                .map(|entry| Piece { pid: own_pid(), address: entry.address, len: entry.len as usize })
                .collect();
            match fetch(&own) {
                Some(bytes) => Some(bytes),
                None => return libc::EFAULT,
            }
        } else {
            None
        };
        qp.send_places += 1;
        self.requests += 1;
        self.signaled += u64::from(wr.send_flags & IBV_SEND_SIGNALED != 0);
        qp.requests.push_back(Request {
            id: wr.wr_id,
            opcode: wr.opcode,
            flags: wr.send_flags,
            entries,
            inline,
            remote_address: wr.remote_addr,
            rkey: wr.rkey,
            imm: wr.imm_data,
            len,
            phase: Phase::Waiting,
            attempts: 0,
        });
        0
    }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut state = lock();
    // SAFETY: a queue pair of `ibv_create_qp`.
    let number = unsafe { (*qp).qp_num };
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the caller's list, linked until null.
        let request = unsafe { *next };
        // SAFETY: as above.
        let pieces = unsafe { entries(request.sg_list, request.num_sge) };
        let fault = state.fault("post_recv");
        let rc = match (fault, state.qps.get_mut(&number)) {
            (Some(errno), _) => errno,
            (None, Some(qp)) if qp.state == IBV_QPS_RESET || qp.srq != 0 => libc::EINVAL,
            (None, Some(qp)) if pieces.len() > qp.cap.max_recv_sge as usize => libc::EINVAL,
            (None, Some(qp)) if qp.recv_places >= qp.cap.max_recv_wr => libc::ENOMEM,
            (None, Some(qp)) => {
                qp.recv_places += 1;
                qp.receives.push_back(Receive { id: request.wr_id, entries: pieces });
                0
            }
            (None, None) => libc::EINVAL,
        };
        if rc != 0 {
            // SAFETY: the caller's place.
            unsafe { *bad = next };
            return rc;
        }
        next = request.next;
    }
    if state.qps.get(&number).is_some_and(|qp| qp.state == IBV_QPS_ERR) {
        state.fail_qp(number);
    }
    drop(state);
    wake();
    0
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut state = lock();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the caller's list, linked until null.
        let request = unsafe { *next };
        // SAFETY: as above.
        let pieces = unsafe { entries(request.sg_list, request.num_sge) };
        let fault = state.fault("post_srq_recv");
        let rc = match (fault, state.srqs.get_mut(&(srq as usize))) {
            (Some(errno), _) => errno,
            (None, Some(srq)) if pieces.len() > srq.max_sge as usize => libc::EINVAL,
            (None, Some(srq)) if srq.places >= srq.capacity => libc::ENOMEM,
            (None, Some(srq)) => {
                srq.places += 1;
                srq.receives.push_back(Receive { id: request.wr_id, entries: pieces });
                0
            }
            (None, None) => libc::EINVAL,
        };
        if rc != 0 {
            // SAFETY: the caller's place.
            unsafe { *bad = next };
            return rc;
        }
        next = request.next;
    }
    drop(state);
    wake();
    0
}
