//! A device with connections.

use std::time::{Duration, Instant};

use kvdepot_standin_verbs::StandIn;
use kvdepot_verbs::{
    Access, Buffer, Completion, CompletionChannel, Context, Cq, Endpoint, Pd, Port, PortChoice, Qp, QpConfig,
    RcAttributes, Verbs, WcStatus,
};

/// Number of the stand-in's schedules that every test runs under.
const SEEDS: u64 = 40;
/// Longer than any machine needs. Reached only when something hangs.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) struct Lab {
    pub(crate) standin: Option<StandIn>,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) port: Port,
    pub(crate) attributes: RcAttributes,
    pub(crate) seed: u64,
}

/// Prints the seed of the failed schedule.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}", self.0);
        }
    }
}

/// Runs `test` on a fresh device for every schedule, or once on the machine's.
pub(crate) fn each(test: impl Fn(&Lab)) {
    if std::env::var("KVDEPOT_TEST_VERBS").is_ok_and(|which| which == "system") {
        let verbs = Verbs::load().expect("the machine has a libibverbs");
        let lab = Lab::open(None, &verbs, 0);
        test(&lab);
        return;
    }
    let mut standin = StandIn::new(0);
    let verbs = Verbs::load_from(standin.path()).expect("the stand-in loads");
    for seed in 0..SEEDS {
        let _named = Named(seed);
        standin.reset(seed);
        standin.set("ethernet", seed % 2);
        let lab = Lab::open(Some(standin), &verbs, seed);
        test(&lab);
        standin = lab.close();
        assert_eq!(standin.get("violations"), 0, "the rules of the library were broken");
        assert_eq!(standin.get("objects"), 0, "something was left behind");
    }
}

/// Runs `test` only on the stand-in, for behaviour that no real device can be made to show.
pub(crate) fn each_standin(test: impl Fn(&Lab, &StandIn)) {
    each(|lab| {
        if let Some(standin) = &lab.standin {
            test(lab, standin);
        }
    });
}

impl Lab {
    fn open(standin: Option<StandIn>, verbs: &Verbs, seed: u64) -> Self {
        let (context, port) = PortChoice::default().open(verbs).expect("a port is up");
        let pd = Pd::new(&context).expect("a domain");
        // A software device on an emulated processor is slow to answer.
        let timeout = if standin.is_some() { 14 } else { 20 };
        let attributes = RcAttributes { timeout, ..RcAttributes::default() };
        Self { standin, context, pd, port, attributes, seed }
    }

    fn close(self) -> StandIn {
        let Self { standin, context, pd, .. } = self;
        drop((context, pd));
        standin.expect("only called with one")
    }

    pub(crate) fn cq(&self, entries: u32) -> Cq {
        Cq::new(&self.context, entries).expect("a completion queue")
    }

    pub(crate) fn event_cq(&self, entries: u32) -> Cq {
        let channel = CompletionChannel::new(&self.context).expect("a channel");
        Cq::with_events(&channel, entries, 7).expect("a completion queue with events")
    }

    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.pd, len, Access::ALL).expect("a registered buffer")
    }

    pub(crate) fn qp(&self, config: QpConfig) -> Qp {
        Qp::new(&self.pd, config).expect("a queue pair")
    }

    /// A queue pair connected to itself.
    pub(crate) fn loopback(&self, cq: &Cq) -> Qp {
        let qp = self.qp(QpConfig::new(cq, 64, 16));
        let own = Endpoint::new(&qp, &self.port, 77);
        qp.connect(&self.port, Access::ALL, &own, &own, &self.attributes).expect("connects to itself");
        qp
    }

    /// Two connected queue pairs, each with its own completion queue.
    pub(crate) fn pair(&self, left: &Cq, right: &Cq) -> (Qp, Qp) {
        let make = |cq: &Cq| self.qp(QpConfig { max_inline_bytes: 64, ..QpConfig::new(cq, 64, 16) });
        let (a, b) = (make(left), make(right));
        self.join(&a, &b, &self.attributes);
        (a, b)
    }

    pub(crate) fn join(&self, a: &Qp, b: &Qp, attributes: &RcAttributes) {
        let (a_end, b_end) =
            (Endpoint::new(a, &self.port, 0x0012_3456), Endpoint::new(b, &self.port, 0x00ab_cdef));
        a.connect(&self.port, Access::ALL, &a_end, &b_end, attributes).expect("connects");
        b.connect(&self.port, Access::ALL, &b_end, &a_end, attributes).expect("connects");
    }
}

/// Polls until there are `count` completions.
pub(crate) fn gather(cq: &Cq, count: usize) -> Vec<Completion> {
    let (mut out, until) = (Vec::new(), Instant::now() + DEADLINE);
    while out.len() < count {
        cq.poll(&mut out).expect("the queue can be polled");
        assert!(Instant::now() < until, "only {} of {count} completions came: {out:?}", out.len());
    }
    assert_eq!(out.len(), count, "more completions than asked for: {out:?}");
    out
}

/// Polls until there are `count` completions, all successful.
pub(crate) fn gather_ok(cq: &Cq, count: usize) -> Vec<Completion> {
    let out = gather(cq, count);
    assert!(out.iter().all(|completion| completion.status == WcStatus::SUCCESS), "{out:?}");
    out
}

pub(crate) fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(31) ^ (i >> 8).wrapping_mul(seed + 7)) as u8).collect()
}

pub(crate) fn content(buffer: &Buffer, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(offset, &mut bytes);
    bytes
}
