//! The stand-in's queue pairs, queues and channels. The C objects are boxes whose addresses are the keys.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use kvdepot_verbs::sys::{ibv_ah_attr, ibv_qp_cap, ibv_wc};

use crate::message::{Inbound, Message};
use crate::request::{Receive, Request};

/// A completion, and what is freed when it is polled.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) wc: ibv_wc,
    pub(crate) qp: u32,
    pub(crate) send_places: u32,
    pub(crate) recv_places: u32,
}

#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) capacity: usize,
    pub(crate) queue: VecDeque<Completed>,
    /// More completions came than it has entries: its content is invalid.
    pub(crate) overrun: bool,
    /// `Some(solicited only)` if an event is requested.
    pub(crate) armed: Option<bool>,
    pub(crate) channel: usize,
    pub(crate) token: usize,
    pub(crate) events: u32,
    pub(crate) acknowledged: u32,
    pub(crate) users: u32,
}

#[derive(Debug)]
pub(crate) struct Channel {
    /// A semaphore that is readable as often as there are events.
    pub(crate) fd: OwnedFd,
    pub(crate) events: VecDeque<usize>,
    pub(crate) users: u32,
}

#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) pd: usize,
    pub(crate) capacity: u32,
    pub(crate) max_sge: u32,
    pub(crate) places: u32,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) users: u32,
}

#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) raw: usize,
    pub(crate) pd: usize,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) srq: usize,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signal_all: bool,
    pub(crate) state: u32,
    pub(crate) access: u32,
    pub(crate) dest: u32,
    pub(crate) address: ibv_ah_attr,
    pub(crate) mtu: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) rnr_retry: u8,
    pub(crate) retry: u8,
    pub(crate) reads_max: u8,
    pub(crate) dest_reads_max: u8,
    pub(crate) requests: VecDeque<Request>,
    pub(crate) receives: VecDeque<Receive>,
    /// Used entries of the send queue; they are freed when a completion is polled.
    pub(crate) send_places: u32,
    pub(crate) recv_places: u32,
    /// Requests that completed without a completion since the last one.
    pub(crate) silent: u32,
    /// The link was cut: everything that is posted ends unanswered.
    pub(crate) cut: bool,
    pub(crate) socket: OwnedFd,
    /// Requests from other processes that wait for a receive.
    pub(crate) inbound: VecDeque<Inbound>,
    /// Answers to other processes that are not sent yet.
    pub(crate) answers: VecDeque<Message>,
}
