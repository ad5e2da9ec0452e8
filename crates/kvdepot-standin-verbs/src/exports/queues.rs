//! Channels, completion queues, receive queues and queue pairs.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use kvdepot_verbs::sys::*;
use rustix::event::{EventfdFlags, eventfd};

use super::device::{COMPLETIONS_MAX, QUEUE_MAX, READS_MAX, SGES_MAX, reaches};
use super::{null, set_errno};
use crate::message::socket_of;
use crate::objects::{Channel, Cq, Qp, Srq};
use crate::state::{State, lock, wake};

/// Number of queue pair numbers that are tried.
const NUMBER_ATTEMPTS: u32 = 4096;
const INLINE_MAX: u32 = 1024;

const fn mutex() -> libc::pthread_mutex_t {
    libc::PTHREAD_MUTEX_INITIALIZER
}

const fn cond() -> libc::pthread_cond_t {
    libc::PTHREAD_COND_INITIALIZER
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_create_comp_channel") {
        return null(errno);
    }
    let Ok(fd) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE) else {
        return null(libc::EMFILE);
    };
    let channel = Box::into_raw(Box::new(ibv_comp_channel { context, fd: fd.as_raw_fd(), refcnt: 0 }));
    state.channels.insert(channel as usize, Channel { fd, events: VecDeque::new(), users: 0 });
    channel
}

#[unsafe(no_mangle)]
extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let mut state = lock();
    let Some(known) = state.channels.get(&(channel as usize)) else { return libc::EINVAL };
    if known.users > 0 {
        state.violation("a completion channel in use was destroyed".to_owned());
        return libc::EBUSY;
    }
    state.channels.remove(&(channel as usize));
    // SAFETY: made above, freed once, as the table says.
    drop(unsafe { Box::from_raw(channel) });
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    token: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_create_cq") {
        return null(errno);
    }
    if !(1..=COMPLETIONS_MAX).contains(&entries) {
        return null(libc::EINVAL);
    }
    if let Some(channel) = state.channels.get_mut(&(channel as usize)) {
        channel.users += 1;
    }
    let cq = Box::into_raw(Box::new(ibv_cq {
        context,
        channel,
        cq_context: token,
        handle: 0,
        cqe: entries,
        mutex: mutex(),
        cond: cond(),
        comp_events_completed: 0,
        async_events_completed: 0,
    }));
    let known = Cq {
        capacity: entries.cast_unsigned() as usize,
        queue: VecDeque::new(),
        overrun: false,
        armed: None,
        channel: channel as usize,
        token: token as usize,
        events: 0,
        acknowledged: 0,
        users: 0,
    };
    state.cqs.insert(cq as usize, known);
    cq
}

#[unsafe(no_mangle)]
extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let mut state = lock();
    let Some(known) = state.cqs.get(&(cq as usize)) else { return libc::EINVAL };
    let channel = known.channel;
    // Events that were not taken are dropped with the queue; one that was taken must be acknowledged. (The real library
    // would block here until it is.)
    let taken = known.events - known.acknowledged;
    let queued = state
        .channels
        .get(&channel)
        .map_or(0, |channel| channel.events.iter().filter(|&&e| e == cq as usize).count());
    if known.users > 0 || taken as usize > queued {
        state.violation(
            "a completion queue was destroyed in use, or with an event not acknowledged".to_owned(),
        );
        return libc::EBUSY;
    }
    if let Some(channel) = state.channels.get_mut(&channel) {
        channel.users -= 1;
        channel.events.retain(|&event| event != cq as usize);
        for _ in 0..queued {
            // The semaphore counts the events that were just dropped.
            let _ = rustix::io::read(&channel.fd, &mut [0u8; 8]);
        }
    }
    state.cqs.remove(&(cq as usize));
    // SAFETY: made above, freed once, as the table says.
    drop(unsafe { Box::from_raw(cq) });
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    token: *mut *mut c_void,
) -> c_int {
    let mut count = [0u8; 8];
    // SAFETY: an open channel. The read blocks unless its user made the descriptor non-blocking.
    let rc = unsafe { libc::read((*channel).fd, count.as_mut_ptr().cast(), 8) };
    if rc != 8 {
        return -1;
    }
    let mut state = lock();
    let event = state.channels.get_mut(&(channel as usize)).and_then(|channel| channel.events.pop_front());
    let Some(event) = event else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    let value = state.cqs.get(&event).map_or(0, |cq| cq.token);
    // SAFETY: the caller's places.
    unsafe {
        *cq = event as *mut ibv_cq;
        *token = value as *mut c_void;
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    if let Some(cq) = lock().cqs.get_mut(&(cq as usize)) {
        cq.acknowledged += count;
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_create_srq") {
        return null(errno);
    }
    // SAFETY: the caller's attributes.
    let (context, wanted) = unsafe { ((*pd).context, (*init).attr) };
    if wanted.max_wr > QUEUE_MAX || wanted.max_sge > SGES_MAX {
        return null(libc::EINVAL);
    }
    let srq = Box::into_raw(Box::new(ibv_srq {
        context,
        srq_context: std::ptr::null_mut(),
        pd,
        handle: 0,
        mutex: mutex(),
        cond: cond(),
        events_completed: 0,
    }));
    state.use_pd(pd, 1);
    let known = Srq {
        pd: pd as usize,
        capacity: wanted.max_wr,
        max_sge: wanted.max_sge,
        places: 0,
        receives: VecDeque::new(),
        users: 0,
    };
    state.srqs.insert(srq as usize, known);
    srq
}

#[unsafe(no_mangle)]
extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let mut state = lock();
    match state.srqs.get(&(srq as usize)) {
        Some(known) if known.users == 0 => {
            let pd = known.pd as *mut ibv_pd;
            state.srqs.remove(&(srq as usize));
            state.use_pd(pd, -1);
            // SAFETY: made above, freed once, as the table says.
            drop(unsafe { Box::from_raw(srq) });
            0
        }
        Some(_) => {
            state.violation("a shared receive queue in use was destroyed".to_owned());
            libc::EBUSY
        }
        None => libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_create_qp") {
        return null(errno);
    }
    // SAFETY: the caller's attributes, and its domain.
    let (context, init) = unsafe { ((*pd).context, *init) };
    let cap = init.cap;
    let too_much = cap.max_send_wr > QUEUE_MAX
        || cap.max_recv_wr > QUEUE_MAX
        || cap.max_send_sge > SGES_MAX
        || cap.max_recv_sge > SGES_MAX
        || cap.max_inline_data > INLINE_MAX;
    let known_cqs =
        state.cqs.contains_key(&(init.send_cq as usize)) && state.cqs.contains_key(&(init.recv_cq as usize));
    if init.qp_type != IBV_QPT_RC || too_much || !known_cqs {
        return null(libc::EINVAL);
    }
    let Some((number, socket)) = state.new_number() else { return null(libc::ENOMEM) };
    let qp = Box::into_raw(Box::new(ibv_qp {
        context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: number,
        qp_num: number,
        state: IBV_QPS_RESET,
        qp_type: init.qp_type,
        mutex: mutex(),
        cond: cond(),
        events_completed: 0,
    }));
    state.use_pd(pd, 1);
    for cq in [init.send_cq, init.recv_cq] {
        if let Some(cq) = state.cqs.get_mut(&(cq as usize)) {
            cq.users += 1;
        }
    }
    if let Some(srq) = state.srqs.get_mut(&(init.srq as usize)) {
        srq.users += 1;
    }
    let known = Qp {
        raw: qp as usize,
        pd: pd as usize,
        send_cq: init.send_cq as usize,
        recv_cq: init.recv_cq as usize,
        srq: init.srq as usize,
        cap,
        signal_all: init.sq_sig_all != 0,
        state: IBV_QPS_RESET,
        access: 0,
        dest: 0,
        address: ibv_ah_attr::default(),
        mtu: 0,
        rq_psn: 0,
        sq_psn: 0,
        rnr_retry: 0,
        retry: 0,
        reads_max: 0,
        dest_reads_max: 0,
        requests: VecDeque::new(),
        receives: VecDeque::new(),
        send_places: 0,
        recv_places: 0,
        silent: 0,
        cut: false,
        socket,
        inbound: VecDeque::new(),
        answers: VecDeque::new(),
    };
    state.qps.insert(number, known);
    qp
}

#[unsafe(no_mangle)]
extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let mut state = lock();
    // SAFETY: a queue pair of `ibv_create_qp`.
    let (number, pd) = unsafe { ((*qp).qp_num, (*qp).pd) };
    let Some(known) = state.qps.remove(&number) else { return libc::EINVAL };
    for key in [known.send_cq, known.recv_cq] {
        if let Some(cq) = state.cqs.get_mut(&key) {
            cq.users -= 1;
            cq.queue.retain(|completed| completed.qp != number);
        }
    }
    if let Some(srq) = state.srqs.get_mut(&known.srq) {
        srq.users -= 1;
    }
    state.use_pd(pd, -1);
    // SAFETY: made by `ibv_create_qp`, freed once, as the table says.
    drop(unsafe { Box::from_raw(qp) });
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_modify_qp") {
        return errno;
    }
    // SAFETY: a queue pair of `ibv_create_qp`, and the caller's attributes.
    let (number, attributes) = unsafe { ((*qp).qp_num, *attributes) };
    let rc = state.modify(number, &attributes, mask.cast_unsigned());
    if rc == 0 {
        if attributes.qp_state == IBV_QPS_ERR {
            state.fail_qp(number);
        }
        // SAFETY: as above.
        unsafe { (*qp).state = attributes.qp_state };
        wake();
    }
    rc
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let state = lock();
    // SAFETY: a queue pair of `ibv_create_qp`, and the caller's places.
    unsafe {
        let Some(known) = state.qps.get(&(*qp).qp_num) else { return libc::EINVAL };
        *attributes = ibv_qp_attr {
            qp_state: known.state,
            cur_qp_state: known.state,
            path_mtu: known.mtu,
            rq_psn: known.rq_psn,
            sq_psn: known.sq_psn,
            dest_qp_num: known.dest,
            qp_access_flags: known.access,
            cap: known.cap,
            ah_attr: known.address,
            max_rd_atomic: known.reads_max,
            max_dest_rd_atomic: known.dest_reads_max,
            retry_cnt: known.retry,
            rnr_retry: known.rnr_retry,
            port_num: 1,
            ..Default::default()
        };
        if !init.is_null() {
            *init = ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap: known.cap,
                qp_type: IBV_QPT_RC,
                sq_sig_all: known.signal_all.into(),
            };
        }
    }
    0
}

impl State {
    fn use_pd(&mut self, pd: *mut ibv_pd, change: i32) {
        if let Some(users) = self.pds.get_mut(&(pd as usize)) {
            *users = users.saturating_add_signed(change);
        }
    }

    /// Returns a number that no process on this machine uses, with its socket.
    fn new_number(&mut self) -> Option<(u32, std::os::fd::OwnedFd)> {
        // Neighbouring processes and private copies of this library start at different numbers.
        let place = std::ptr::from_ref(self) as u64;
        let base = crate::rng::Rng::new(place ^ u64::from(std::process::id())).next() as u32;
        (0..NUMBER_ATTEMPTS).find_map(|_| {
            self.next_qp = self.next_qp.wrapping_add(1);
            let number = base.wrapping_add(self.next_qp) & 0x00ff_ffff;
            // 0 and 1 are reserved for the fabric.
            if number < 2 { None } else { socket_of(number).map(|socket| (number, socket)) }
        })
    }

    /// Changes the state of a queue pair, with a driver's checks.
    fn modify(&mut self, number: u32, wanted: &ibv_qp_attr, mask: u32) -> c_int {
        let config = &self.config;
        let Some(qp) = self.qps.get_mut(&number) else { return libc::EINVAL };
        if mask & IBV_QP_STATE == 0 {
            return libc::EINVAL;
        }
        let (from_ok, needed) = match wanted.qp_state {
            IBV_QPS_RESET | IBV_QPS_ERR => (true, IBV_QP_STATE),
            IBV_QPS_INIT => (qp.state == IBV_QPS_RESET || qp.state == IBV_QPS_INIT, TO_INIT),
            IBV_QPS_RTR => (qp.state == IBV_QPS_INIT, TO_RTR),
            IBV_QPS_RTS => (qp.state == IBV_QPS_RTR, TO_RTS),
            _ => (false, 0),
        };
        if !from_ok || mask & needed != needed {
            return libc::EINVAL;
        }
        match wanted.qp_state {
            IBV_QPS_INIT => {
                if wanted.port_num != 1 || wanted.pkey_index != 0 {
                    return libc::EINVAL;
                }
                qp.access = wanted.qp_access_flags;
            }
            IBV_QPS_RTR => {
                let address = wanted.ah_attr;
                let reachable = if address.is_global != 0 {
                    reaches(config, address.grh.sgid_index, address.grh.dgid.raw) && address.grh.hop_limit > 0
                } else {
                    !config.ethernet() && address.dlid == 1
                };
                let mtu_ok = (1..=IBV_MTU_4096).contains(&wanted.path_mtu);
                let reads_ok = wanted.max_dest_rd_atomic <= READS_MAX;
                if !reachable || !mtu_ok || !reads_ok || wanted.rq_psn >> 24 != 0 {
                    return libc::EINVAL;
                }
                qp.address = address;
                qp.mtu = wanted.path_mtu;
                qp.dest = wanted.dest_qp_num;
                qp.rq_psn = wanted.rq_psn;
                qp.dest_reads_max = wanted.max_dest_rd_atomic;
            }
            IBV_QPS_RTS => {
                let counts_ok = wanted.retry_cnt <= 7 && wanted.rnr_retry <= 7 && wanted.timeout < 32;
                if !counts_ok || wanted.max_rd_atomic > READS_MAX || wanted.sq_psn >> 24 != 0 {
                    return libc::EINVAL;
                }
                qp.sq_psn = wanted.sq_psn;
                qp.rnr_retry = wanted.rnr_retry;
                qp.retry = wanted.retry_cnt;
                qp.reads_max = wanted.max_rd_atomic;
            }
            IBV_QPS_RESET => {
                qp.requests.clear();
                qp.receives.clear();
                (qp.send_places, qp.recv_places, qp.silent) = (0, 0, 0);
            }
            _ => {}
        }
        qp.state = wanted.qp_state;
        0
    }
}
