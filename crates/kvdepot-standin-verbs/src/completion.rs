//! Completions of requests, events, and the consequences of failures.

use std::os::fd::AsFd;

use kvdepot_verbs::sys::{
    IBV_QPS_ERR, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS, IBV_WC_WITH_IMM,
    IBV_WC_WR_FLUSH_ERR, ibv_qp, ibv_wc,
};

use crate::objects::Completed;
use crate::request::{Receive, Request};
use crate::state::State;

/// Content that arrived in a receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) status: u32,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    pub(crate) solicited: bool,
    pub(crate) is_write: bool,
}

impl State {
    fn push(&mut self, cq_key: usize, completed: Completed, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(&cq_key) else { return };
        if cq.queue.len() >= cq.capacity {
            cq.overrun = true;
            let capacity = cq.capacity;
            self.violation(format!("a completion queue of {capacity} entries overran"));
            return;
        }
        let failed = completed.wc.status != IBV_WC_SUCCESS;
        cq.queue.push_back(completed);
        let wanted = cq.armed.is_some_and(|solicited_only| !solicited_only || solicited || failed);
        if wanted {
            cq.armed = None;
            cq.events += 1;
            let channel = cq.channel;
            if let Some(channel) = self.channels.get_mut(&channel) {
                channel.events.push_back(cq_key);
                // The counter cannot overflow: every count is an event in memory.
                let _ = rustix::io::write(channel.fd.as_fd(), &1u64.to_le_bytes());
            }
        }
    }

    /// Completes the first request of `qp`.
    pub(crate) fn complete_head(&mut self, qp_number: u32) {
        let status = self.fault("completion").map(i32::cast_unsigned);
        let Some(qp) = self.qps.get_mut(&qp_number) else { return };
        let Some(request) = qp.requests.pop_front() else { return };
        let status = status.unwrap_or(match request.phase {
            crate::request::Phase::Done(status) => status,
            _ => IBV_WC_WR_FLUSH_ERR,
        });
        self.end_request(qp_number, &request, status);
        if status != IBV_WC_SUCCESS {
            self.fail_qp(qp_number);
        }
    }

    fn end_request(&mut self, qp_number: u32, request: &Request, status: u32) {
        let Some(qp) = self.qps.get_mut(&qp_number) else { return };
        if status == IBV_WC_SUCCESS && !request.is_signaled() && !qp.signal_all {
            qp.silent += 1;
            return;
        }
        let send_places = std::mem::take(&mut qp.silent) + 1;
        let (cq, wc) = (
            qp.send_cq,
            ibv_wc {
                wr_id: request.id,
                status,
                opcode: request.completion_opcode(),
                byte_len: request.len as u32,
                qp_num: qp_number,
                ..Default::default()
            },
        );
        self.push(cq, Completed { wc, qp: qp_number, send_places, recv_places: 0 }, false);
    }

    /// Completes a receive of `qp`.
    pub(crate) fn end_receive(&mut self, qp_number: u32, receive: &Receive, arrival: Arrival) {
        let Some(qp) = self.qps.get(&qp_number) else { return };
        let wc = ibv_wc {
            wr_id: receive.id,
            status: arrival.status,
            opcode: if arrival.is_write { IBV_WC_RECV_RDMA_WITH_IMM } else { IBV_WC_RECV },
            byte_len: arrival.len as u32,
            imm_data: arrival.imm.unwrap_or(0),
            qp_num: qp_number,
            src_qp: qp.dest,
            wc_flags: if arrival.imm.is_some() { IBV_WC_WITH_IMM } else { 0 },
            ..Default::default()
        };
        let completed = Completed { wc, qp: qp_number, send_places: 0, recv_places: 1 };
        self.push(qp.recv_cq, completed, arrival.solicited);
    }

    /// Moves the queue pair to the error state: everything posted to it completes as flushed.
    pub(crate) fn fail_qp(&mut self, qp_number: u32) {
        let Some(qp) = self.qps.get_mut(&qp_number) else { return };
        qp.state = IBV_QPS_ERR;
        // SAFETY: the box lives as long as its entry in the table.
        unsafe { (*(qp.raw as *mut ibv_qp)).state = IBV_QPS_ERR };
        let requests: Vec<Request> = qp.requests.drain(..).collect();
        let receives: Vec<Receive> = qp.receives.drain(..).collect();
        for mut request in requests {
            let held = match &mut request.phase {
                crate::request::Phase::Moving { receive, .. } => receive.take(),
                _ => None,
            };
            self.end_request(qp_number, &request, IBV_WC_WR_FLUSH_ERR);
            if let Some(receive) = held {
                self.give_back(qp_number, receive);
            }
        }
        for receive in receives {
            let arrival =
                Arrival { status: IBV_WC_WR_FLUSH_ERR, len: 0, imm: None, solicited: false, is_write: false };
            self.end_receive(qp_number, &receive, arrival);
        }
    }

    /// Handles a receive whose sender failed in the middle of a message: it is returned to the receiver, or lost.
    fn give_back(&mut self, sender: u32, receive: Receive) {
        if self.config.loses_receives {
            self.lost_receives += 1;
            return;
        }
        let Some(peer) = self.qps.get(&sender).map(|qp| qp.dest) else { return };
        let Some(qp) = self.qps.get_mut(&peer) else { return };
        match self.srqs.get_mut(&qp.srq) {
            Some(srq) => srq.receives.push_front(receive),
            None => qp.receives.push_front(receive),
        }
    }

    /// Takes completions off a queue; `None` if it overran.
    pub(crate) fn poll(&mut self, cq_key: usize, max: usize) -> Option<Vec<ibv_wc>> {
        let cq = self.cqs.get_mut(&cq_key)?;
        if cq.overrun {
            return None;
        }
        let count = max.min(cq.queue.len());
        let taken: Vec<Completed> = cq.queue.drain(..count).collect();
        for completed in &taken {
            let Some(qp) = self.qps.get_mut(&completed.qp) else { continue };
            qp.send_places = qp.send_places.saturating_sub(completed.send_places);
            match self.srqs.get_mut(&qp.srq) {
                Some(srq) => srq.places = srq.places.saturating_sub(completed.recv_places),
                None => qp.recv_places = qp.recv_places.saturating_sub(completed.recv_places),
            }
        }
        Some(taken.into_iter().map(|completed| completed.wc).collect())
    }
}
