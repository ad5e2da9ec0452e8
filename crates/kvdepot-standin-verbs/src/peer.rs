//! Requests between two processes. The requester sends one at a time. The other side checks it against its own regions
//! and queues, moves the bytes, and answers.

use kvdepot_verbs::sys::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM,
};

use crate::completion::Arrival;
use crate::memory::{Piece, fetch, own_pid, place};
use crate::message::{Inbound, Kind, Message, exists, is_full};
use crate::request::{Phase, Request};
use crate::state::State;

/// Number of checks of a queue pair that is not ready, a millisecond apart, before the requester is told.
const ATTEMPTS_MAX: u32 = 60_000;

impl State {
    /// Sends a request to the peer's process.
    pub(crate) fn send_away(&mut self, number: u32, request: &mut Request) -> Phase {
        let Some(qp) = self.qps.get(&number) else { return Phase::Done(IBV_WC_RETRY_EXC_ERR) };
        let pieces = match &request.inline {
            Some(bytes) => vec![(bytes.as_ptr() as u64, bytes.len() as u64)],
            None => match self.local(qp.pd, &request.entries, 0, request.len, request.is_read()) {
                Ok(pieces) => pieces.iter().map(|piece| (piece.address, piece.len as u64)).collect(),
                Err(status) => return Phase::Done(status),
            },
        };
        let message = Message {
            kind: Kind::Ask,
            from: number,
            to: qp.dest,
            pid: own_pid(),
            psn: qp.sq_psn,
            opcode: request.opcode,
            status: u32::from(qp.rnr_retry),
            imm: request.imm,
            solicited: request.is_solicited(),
            remote_address: request.remote_address,
            rkey: request.rkey,
            pieces,
        };
        match message.send(&qp.socket) {
            Ok(()) => Phase::Away,
            Err(errno) if is_full(errno) => Phase::Waiting,
            Err(_) => Phase::Done(IBV_WC_RETRY_EXC_ERR),
        }
    }

    /// Receives messages for every queue pair. Returns true if there were any.
    pub(crate) fn receive_messages(&mut self) -> bool {
        let mut any = false;
        let numbers: Vec<u32> = self.qps.keys().copied().collect();
        for number in numbers {
            while let Some(message) = self.qps.get(&number).and_then(|qp| Message::receive(&qp.socket)) {
                any = true;
                match message.kind {
                    Kind::Answer => self.answered(number, message.status),
                    Kind::Ask => {
                        let retries = message.status;
                        let attempts_left = if retries >= 7 { u32::MAX } else { retries + 1 };
                        if let Some(qp) = self.qps.get_mut(&number) {
                            qp.inbound.push_back(Inbound { message, attempts_left });
                        }
                    }
                }
            }
            any |= self.serve(number);
            self.send_answers(number);
        }
        any
    }

    /// Sends the answers of `number`, in order. If the requester's queue is full they stay for the next turn.
    fn send_answers(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        while let Some(answer) = qp.answers.front() {
            if answer.send(&qp.socket).is_err_and(is_full) {
                return;
            }
            // It was sent, or the requester has exited and needs no answer.
            qp.answers.pop_front();
        }
    }

    fn answered(&mut self, number: u32, status: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        if let Some(request) = qp.requests.iter_mut().find(|request| matches!(request.phase, Phase::Away)) {
            request.phase = Phase::Done(status);
            self.bytes += qp.requests.front().map_or(0, |request| request.len as u64);
        }
    }

    /// Carries out other processes' requests to `number`. Returns true if it did any.
    fn serve(&mut self, number: u32) -> bool {
        let mut any = false;
        while let Some(mut inbound) = self.qps.get_mut(&number).and_then(|qp| qp.inbound.pop_front()) {
            let Some(status) = self.carry_out(number, &mut inbound) else {
                if let Some(qp) = self.qps.get_mut(&number) {
                    qp.inbound.push_front(inbound);
                }
                return any;
            };
            any = true;
            let ask = inbound.message;
            let answer = Message {
                kind: Kind::Answer,
                from: number,
                to: ask.from,
                pid: own_pid(),
                status,
                pieces: Vec::new(),
                ..ask
            };
            if let Some(qp) = self.qps.get_mut(&number) {
                qp.answers.push_back(answer);
            }
        }
        any
    }

    /// Returns the status of the answer; `None` if the request must wait.
    fn carry_out(&mut self, number: u32, inbound: &mut Inbound) -> Option<u32> {
        let ask = inbound.message.clone();
        let qp = self.qps.get(&number)?;
        if qp.state == IBV_QPS_INIT {
            inbound.attempts_left = inbound.attempts_left.min(ATTEMPTS_MAX).checked_sub(1)?;
            return (inbound.attempts_left == 0).then_some(IBV_WC_RETRY_EXC_ERR);
        }
        let connected = (IBV_QPS_RTR..=IBV_QPS_RTS).contains(&qp.state) && qp.dest == ask.from && !qp.cut;
        if !connected || qp.rq_psn != ask.psn {
            return Some(IBV_WC_RETRY_EXC_ERR);
        }
        let (pd, access) = (qp.pd, qp.access);
        let theirs: Vec<Piece> = ask
            .pieces
            .iter()
            .map(|&(address, len)| Piece { pid: ask.pid, address, len: len as usize })
            .collect();
        let len: usize = theirs.iter().map(|piece| piece.len).sum();
        let is_read = ask.opcode == IBV_WR_RDMA_READ;
        let is_write = ask.opcode == IBV_WR_RDMA_WRITE || ask.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        let need = if is_read { IBV_ACCESS_REMOTE_READ } else { IBV_ACCESS_REMOTE_WRITE };
        if (is_read || is_write) && access & need == 0 {
            self.fail_qp(number);
            return Some(IBV_WC_REM_INV_REQ_ERR);
        }
        let takes_receive = !is_read && ask.opcode != IBV_WR_RDMA_WRITE;
        let receive = if takes_receive { self.next_receive(number) } else { None };
        if takes_receive && receive.is_none() {
            if inbound.attempts_left == u32::MAX {
                return None;
            }
            inbound.attempts_left = inbound.attempts_left.saturating_sub(1);
            return (inbound.attempts_left == 0).then_some(IBV_WC_RNR_RETRY_EXC_ERR);
        }
        let mut done = true;
        if is_read || is_write {
            match self.remote(pd, ask.remote_address, len, ask.rkey, is_write) {
                Ok(own) if is_read => done = fetch(&[own]).is_some_and(|bytes| place(&theirs, &bytes)),
                Ok(own) => done = fetch(&theirs).is_some_and(|bytes| place(&[own], &bytes)),
                Err(status) => {
                    self.fail_qp(number);
                    return Some(status);
                }
            }
        } else if let Some(receive) = &receive {
            if receive.len() < len {
                self.fail_receive(number, receive, IBV_WC_LOC_LEN_ERR);
                self.fail_qp(number);
                return Some(IBV_WC_REM_INV_REQ_ERR);
            }
            match self.local(pd, &receive.entries, 0, len, true) {
                Ok(own) => done = fetch(&theirs).is_some_and(|bytes| place(&own, &bytes)),
                Err(_) => {
                    self.fail_receive(number, receive, IBV_WC_LOC_PROT_ERR);
                    self.fail_qp(number);
                    return Some(IBV_WC_REM_OP_ERR);
                }
            }
        }
        if !done {
            return Some(if is_read { IBV_WC_LOC_PROT_ERR } else { IBV_WC_REM_ACCESS_ERR });
        }
        if let Some(receive) = receive {
            let has_imm = ask.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || ask.opcode == IBV_WR_SEND_WITH_IMM;
            let arrival = Arrival {
                status: IBV_WC_SUCCESS,
                len,
                imm: has_imm.then_some(ask.imm),
                solicited: ask.solicited,
                is_write,
            };
            self.end_receive(number, &receive, arrival);
        }
        Some(IBV_WC_SUCCESS)
    }

    /// Fails requests whose peer's process has exited.
    pub(crate) fn look_for_the_dead(&mut self) {
        for qp in self.qps.values_mut() {
            for request in &mut qp.requests {
                if matches!(request.phase, Phase::Away) && !exists(qp.dest) {
                    request.phase = Phase::Done(IBV_WC_RETRY_EXC_ERR);
                }
            }
        }
    }

    /// Returns whether a queue pair's peer is in another process, so that only the thread can serve it.
    pub(crate) fn has_foreign_peers(&self) -> bool {
        self.qps.values().any(|qp| qp.dest != 0 && !self.qps.contains_key(&qp.dest))
    }
}
