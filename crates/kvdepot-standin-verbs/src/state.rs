//! The complete state of the stand-in, behind one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use crate::config::Config;
use crate::memory::{Posted, Region};
use crate::objects::{Channel, Cq, Qp, Srq};
use crate::rng::Rng;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) rng: Rng,
    pub(crate) contexts: u32,
    /// Number of each open context's device.
    pub(crate) device_of: HashMap<usize, usize>,
    /// Number of users of each protection domain.
    pub(crate) pds: HashMap<usize, u32>,
    /// Regions by local key.
    pub(crate) regions: HashMap<u32, Region>,
    pub(crate) lkey_of_rkey: HashMap<u32, u32>,
    /// Writes to other devices in flight, in order.
    pub(crate) posted: VecDeque<Posted>,
    pub(crate) channels: HashMap<usize, Channel>,
    pub(crate) cqs: HashMap<usize, Cq>,
    pub(crate) srqs: HashMap<usize, Srq>,
    /// Queue pairs by number; ordered, so that a seed always means the same.
    pub(crate) qps: BTreeMap<u32, Qp>,
    pub(crate) next_key: u32,
    pub(crate) next_qp: u32,
    pub(crate) faults: Vec<Fault>,
    pub(crate) violations: Vec<String>,
    pub(crate) doorbells: u64,
    pub(crate) requests: u64,
    pub(crate) signaled: u64,
    pub(crate) bytes: u64,
    pub(crate) steps: u64,
    pub(crate) lost_receives: u64,
    pub(crate) engine_started: bool,
}

/// A planned failure of a call.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) call: String,
    pub(crate) skip: u64,
    pub(crate) times: u64,
    /// An errno; for `completion` a status.
    pub(crate) code: i32,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));
static WAKE: LazyLock<OwnedFd> = LazyLock::new(|| {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event descriptor can be made")
});

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock()
}

/// Wakes the engine's thread.
pub(crate) fn wake() {
    // A full counter means that a wake-up is already pending.
    let _ = rustix::io::write(WAKE.as_fd(), &1u64.to_le_bytes());
}

pub(crate) fn wake_fd() -> &'static OwnedFd {
    &WAKE
}

impl State {
    fn new() -> Self {
        let config = Config::from_environment();
        Self {
            rng: Rng::new(config.seed),
            config,
            contexts: 0,
            device_of: HashMap::new(),
            pds: HashMap::new(),
            regions: HashMap::new(),
            lkey_of_rkey: HashMap::new(),
            posted: VecDeque::new(),
            channels: HashMap::new(),
            cqs: HashMap::new(),
            srqs: HashMap::new(),
            qps: BTreeMap::new(),
            next_key: 1,
            next_qp: 0,
            faults: Vec::new(),
            violations: Vec::new(),
            doorbells: 0,
            requests: 0,
            signaled: 0,
            bytes: 0,
            steps: 0,
            lost_receives: 0,
            engine_started: false,
        }
    }

    /// Returns the code with which this call must fail, if any.
    pub(crate) fn fault(&mut self, call: &str) -> Option<i32> {
        let fault = self.faults.iter_mut().find(|fault| fault.call == call && fault.times > 0)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        fault.times -= 1;
        Some(fault.code)
    }

    /// Records a violation of a rule that a device would not detect.
    pub(crate) fn violation(&mut self, what: String) {
        eprintln!("kvdepot-standin-verbs: {what}");
        self.violations.push(what);
    }

    pub(crate) fn objects(&self) -> u64 {
        let all =
            self.pds.len() + self.regions.len() + self.channels.len() + self.cqs.len() + self.srqs.len();
        (all + self.qps.len()) as u64 + u64::from(self.contexts)
    }
}
