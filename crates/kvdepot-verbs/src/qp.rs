//! Queue pairs of reliable connections, and shared receive queues.

use std::fmt;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::connect::{Endpoint, RcAttributes};
use crate::context::Pd;
use crate::cq::Cq;
use crate::failure;
use crate::port::Port;
use crate::region::Access;
use crate::sys::{
    IBV_QP_STATE, IBV_QPS_ERR, IBV_QPT_RC, TO_INIT, TO_RTR, TO_RTS, ibv_qp, ibv_qp_attr, ibv_qp_cap,
    ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};
use crate::work::{RecvList, SendList};

/// A shared receive queue for several queue pairs. Cheap to clone.
#[derive(Clone)]
pub struct Srq {
    inner: Arc<SrqInner>,
}

struct SrqInner {
    pd: Pd,
    srq: *mut ibv_srq,
}

// SAFETY: the library's calls on a shared receive queue are thread-safe.
unsafe impl Send for SrqInner {}
// SAFETY: as for Send.
unsafe impl Sync for SrqInner {}

impl Srq {
    /// Makes a queue of at least `max_requests` receives of `max_sges` pieces.
    pub fn new(pd: &Pd, max_requests: u32, max_sges: u32) -> Result<Self> {
        let attr = ibv_srq_attr { max_wr: max_requests, max_sge: max_sges, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: std::ptr::null_mut(), attr };
        // SAFETY: the domain is alive; the call reads and updates the attributes.
        let srq = unsafe { (pd.context().table().ibv_create_srq)(pd.raw(), &raw mut init) };
        if srq.is_null() {
            return Err(
                failure::last_os("ibv_create_srq", pd.context().name()).with("requests", max_requests)
            );
        }
        Ok(Self { inner: Arc::new(SrqInner { pd: pd.clone(), srq }) })
    }

    /// Posts receives, all or up to the first that is refused.
    pub fn post_recv(&self, list: &mut RecvList) -> Result<(), PostError> {
        let first = list.link();
        if first.is_null() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue and its context are alive; the list is linked and does not move.
        let rc = unsafe {
            match (*(*self.inner.srq).context).ops.post_srq_recv {
                Some(post) => post(self.inner.srq, first, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if rc == 0 {
            Ok(())
        } else {
            Err(refused("ibv_post_srq_recv", &self.inner.pd, list.position(bad), rc))
        }
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // SAFETY: created, and destroyed once; queue pairs that use it hold it, so none is left.
        unsafe { (self.pd.context().table().ibv_destroy_srq)(self.srq) };
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Srq({})", self.inner.pd.context().name())
    }
}

/// A list that was posted only in part.
#[derive(Debug)]
pub struct PostError {
    /// Number of requests at the front of the list that were posted and will be executed.
    pub posted: usize,
    /// Why the next one was refused.
    pub error: Error,
}

impl From<PostError> for Error {
    fn from(refused: PostError) -> Self {
        refused.error.with("posted", refused.posted)
    }
}

/// The configuration of a queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// The completion queue of the send queue.
    pub send_cq: Cq,
    /// The completion queue of receives.
    pub recv_cq: Cq,
    /// The shared receive queue, if the pair has no own receives.
    pub srq: Option<Srq>,
    /// Largest number of outstanding requests.
    pub max_send_requests: u32,
    /// Largest number of outstanding receives; unused with a shared receive queue.
    pub max_recv_requests: u32,
    /// Largest number of pieces of local memory in a request.
    pub max_send_sges: u32,
    /// Largest number of pieces of local memory in a receive.
    pub max_recv_sges: u32,
    /// Largest number of inline bytes in a request.
    pub max_inline_bytes: u32,
}

impl QpConfig {
    /// One completion queue for both directions, one piece for each request, no inline bytes.
    pub fn new(cq: &Cq, max_send_requests: u32, max_recv_requests: u32) -> Self {
        Self {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            max_send_requests,
            max_recv_requests,
            max_send_sges: 1,
            max_recv_sges: 1,
            max_inline_bytes: 0,
        }
    }
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// New.
    Reset,
    /// Accepts receives.
    Init,
    /// Answers its peer.
    ReadyToReceive,
    /// Answers and sends.
    ReadyToSend,
    /// Failed or stopped: every request completes as flushed.
    Error,
    /// A state that reliable connections do not use.
    Other(u32),
}

/// A queue pair of a reliable connection. After the drop the device touches no more memory for it, and unpolled
/// requests are forgotten.
pub struct Qp {
    pd: Pd,
    config: QpConfig,
    qp: *mut ibv_qp,
}

// SAFETY: the library's calls on a queue pair are thread-safe.
unsafe impl Send for Qp {}
// SAFETY: as for Send.
unsafe impl Sync for Qp {}

impl Qp {
    /// Makes a queue pair in state `Reset`.
    pub fn new(pd: &Pd, config: QpConfig) -> Result<Self> {
        let own_receives = config.srq.is_none();
        let mut init = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: config.send_cq.raw(),
            recv_cq: config.recv_cq.raw(),
            srq: config.srq.as_ref().map_or(std::ptr::null_mut(), |srq| srq.inner.srq),
            cap: ibv_qp_cap {
                max_send_wr: config.max_send_requests,
                max_recv_wr: if own_receives { config.max_recv_requests } else { 0 },
                max_send_sge: config.max_send_sges,
                max_recv_sge: if own_receives { config.max_recv_sges } else { 0 },
                max_inline_data: config.max_inline_bytes,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive, and held by the pair; the call reads and updates the attributes.
        let qp = unsafe { (pd.context().table().ibv_create_qp)(pd.raw(), &raw mut init) };
        if qp.is_null() {
            return Err(failure::last_os("ibv_create_qp", pd.context().name())
                .with("send_requests", config.max_send_requests)
                .with("recv_requests", config.max_recv_requests)
                .with("inline_bytes", config.max_inline_bytes));
        }
        Ok(Self { pd: pd.clone(), config, qp })
    }

    /// Returns its number, by which a peer addresses it.
    pub fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { (*self.qp).qp_num }
    }

    /// Returns its domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Returns its configuration.
    pub fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Moves to `Init` on a port, after which receives can be posted. `access` is what peers may do through it.
    pub fn init(&self, port: &Port, access: Access) -> Result<()> {
        let attributes = ibv_qp_attr {
            qp_state: QpState::Init.raw(),
            pkey_index: 0,
            port_num: port.number,
            qp_access_flags: access.flags(),
            ..Default::default()
        };
        self.modify(attributes, TO_INIT)
    }

    /// Moves to `ReadyToReceive`, connected to `peer`.
    pub fn ready_to_receive(&self, port: &Port, peer: &Endpoint, attributes: &RcAttributes) -> Result<()> {
        self.modify(attributes.to_receive(port, peer)?, TO_RTR)
    }

    /// Moves to `ReadyToSend`; `psn` is the one that the peer was given.
    pub fn ready_to_send(&self, psn: u32, attributes: &RcAttributes) -> Result<()> {
        self.modify(attributes.to_send(psn), TO_RTS)
    }

    /// Takes all steps from `Reset` to `ReadyToSend`. `own` is the endpoint that the peer was given. To connect a pair
    /// to itself, pass it as `peer` too.
    pub fn connect(
        &self,
        port: &Port,
        access: Access,
        own: &Endpoint,
        peer: &Endpoint,
        attributes: &RcAttributes,
    ) -> Result<()> {
        self.init(port, access)?;
        self.ready_to_receive(port, peer, attributes)?;
        self.ready_to_send(own.psn, attributes)
    }

    /// Moves to `Error`: every outstanding request completes as flushed.
    pub fn stop(&self) -> Result<()> {
        self.modify(ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() }, IBV_QP_STATE)
    }

    fn modify(&self, mut attributes: ibv_qp_attr, mask: u32) -> Result<()> {
        let table = self.pd.context().table();
        // SAFETY: alive; the call reads the attributes.
        let rc = unsafe { (table.ibv_modify_qp)(self.qp, &raw mut attributes, mask.cast_signed()) };
        match rc {
            0 => Ok(()),
            rc => Err(failure::from_errno("ibv_modify_qp", self.pd.context().name(), rc)
                .with("qp_number", self.number())
                .with("to", format_args!("{:?}", QpState::from_raw(attributes.qp_state)))),
        }
    }

    /// Queries the state from the device.
    pub fn state(&self) -> Result<QpState> {
        let mut attributes = ibv_qp_attr::default();
        let mut init = std::mem::MaybeUninit::<ibv_qp_init_attr>::zeroed();
        let table = self.pd.context().table();
        let mask = IBV_QP_STATE.cast_signed();
        // SAFETY: alive; the call fills both structures.
        let rc = unsafe { (table.ibv_query_qp)(self.qp, &raw mut attributes, mask, init.as_mut_ptr()) };
        match rc {
            0 => Ok(QpState::from_raw(attributes.qp_state)),
            rc => Err(failure::from_errno("ibv_query_qp", self.pd.context().name(), rc)),
        }
    }

    /// Posts requests with one ring of the doorbell, all or up to the first that is refused. The list can be posted
    /// again.
    pub fn post_send(&self, list: &mut SendList) -> Result<(), PostError> {
        let first = list.link();
        if first.is_null() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair and its context are alive; the list is linked and does not move. The device checks
        // registered memory, and inline bytes are inside of the list.
        let rc = unsafe {
            match (*(*self.qp).context).ops.post_send {
                Some(post) => post(self.qp, first, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        list.unlink();
        if rc == 0 { Ok(()) } else { Err(refused("ibv_post_send", &self.pd, list.position(bad), rc)) }
    }

    /// Posts receives, all or up to the first that is refused.
    pub fn post_recv(&self, list: &mut RecvList) -> Result<(), PostError> {
        let first = list.link();
        if first.is_null() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: as for `post_send`.
        let rc = unsafe {
            match (*(*self.qp).context).ops.post_recv {
                Some(post) => post(self.qp, first, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if rc == 0 { Ok(()) } else { Err(refused("ibv_post_recv", &self.pd, list.position(bad), rc)) }
    }
}

impl QpState {
    fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::ReadyToReceive,
            3 => Self::ReadyToSend,
            6 => Self::Error,
            other => Self::Other(other),
        }
    }

    fn raw(self) -> u32 {
        match self {
            Self::Reset => 0,
            Self::Init => 1,
            Self::ReadyToReceive => 2,
            Self::ReadyToSend => 3,
            Self::Error => 6,
            Self::Other(other) => other,
        }
    }
}

fn refused(call: &'static str, pd: &Pd, posted: usize, rc: i32) -> PostError {
    let errno =
        if rc == -1 { std::io::Error::last_os_error().raw_os_error().unwrap_or(rc) } else { rc.abs() };
    let error = match errno {
        libc::ENOMEM => {
            Error::new(ErrorKind::Busy, "the queue of an RDMA connection is full; poll its completions")
                .with("call", call)
                .with("device", pd.context().name())
                .with("errno", errno)
        }
        errno => failure::from_errno(call, pd.context().name(), errno),
    };
    PostError { posted, error }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: created, and destroyed once, before the queues that it reports to, which are its fields.
        unsafe { (self.pd.context().table().ibv_destroy_qp)(self.qp) };
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qp({} on {})", self.number(), self.pd.context().name())
    }
}
