//! A poller, pass by pass over the stand-in: the tests decide what is in its queue at which pass.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_depot::values::Values;
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_standin_verbs::StandIn;
use kvdepot_verbs::{
    Access, Buffer, Context, Endpoint, Flags, Operation, Payload, Pd, Port, PortChoice, Qp, QpConfig,
    RcAttributes, Verbs,
};
use kvdepot_wire::infini::{RemoteMeta, op};
use tokio::sync::Notify;

use super::*;
use crate::wire::rdma::link::Counted;

const POOL_BYTES: u64 = 4 << 20;
const RECEIVES: u32 = 2;
const MESSAGE_BYTES: usize = 1024;
const REQUESTS_MAX: u32 = 64;
const COMPLETIONS_MAX: usize = 128;
/// Number of passes within which everything here must have happened: each does some of the device's work.
const PASSES_MAX: usize = 10_000;

struct Stage {
    poller: Poller,
    mailbox: Arc<Mailbox>,
    links: Arc<AtomicUsize>,
    depot: Depot,
    values: Values,
    context: Context,
    pd: Pd,
    port: Port,
    standin: StandIn,
    seed: u64,
}

struct Client {
    qp: Qp,
    outbox: Buffer,
}

impl Client {
    /// Requests the value `key`.
    fn ask(&self, key: &str) {
        let (rkey, addresses) = (self.outbox.mr().rkey(), vec![self.outbox.mr().remote(0).address]);
        let meta =
            RemoteMeta { op: op::RDMA_READ, keys: vec![key.as_bytes()], block_bytes: 8, rkey, addresses };
        let bytes = meta.encode();
        self.outbox.write(MESSAGE_BYTES, &bytes);
        let sge = [self.outbox.mr().sge(MESSAGE_BYTES, bytes.len() as u32)];
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Sges(&sge)), Flags::SIGNALED);
        self.qp.post_send(&mut list).unwrap();
    }
}

impl Stage {
    fn open(seed: u64) -> Self {
        let standin = StandIn::new(seed);
        let verbs = Verbs::load_from(standin.path()).unwrap();
        let (context, port) = PortChoice::default().open(&verbs).unwrap();
        let pd = Pd::new(&context).unwrap();
        let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL_BYTES, "timeout_ms": 10_000});
        let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let values = Values::open(depot.direct(), POOL_BYTES, 16_384).unwrap();
        values.reserve(Values::hash(b"key"), 8).unwrap().publish().unwrap();
        let (mailbox, commands) = Mailbox::new().unwrap();
        let channel = CompletionChannel::new(&context).unwrap();
        let plan = Plan {
            cq: Cq::with_events(&channel, COMPLETIONS_MAX as u32, 0).unwrap(),
            channel,
            inboxes: Inboxes::new(&pd, RECEIVES, MESSAGE_BYTES).unwrap(),
            regions: Regions::open(&pd, &depot, POOL_BYTES).unwrap().0,
            counters: Arc::new(Counters::new()),
            finder: crossbeam_channel::unbounded().0,
            mailbox: Arc::clone(&mailbox),
            link_requests_max: REQUESTS_MAX,
            requests_max: REQUESTS_MAX,
            completions_max: COMPLETIONS_MAX,
            sges_max: 4,
            bytes_max: 1 << 20,
            put_wait: Duration::ZERO,
            stall: Duration::from_secs(3600),
        };
        let (poller, links) = (Poller::new(plan, commands), Arc::default());
        Self { poller, mailbox, links, depot, values, context, pd, port, standin, seed }
    }

    /// Connects a client, which has no receive for its answers.
    fn connect(&self, serial: u64) -> Client {
        let plan = &self.poller.plan;
        let (generation, srq) = plan.inboxes.current().lock().clone();
        let config = QpConfig { srq: Some(srq), ..QpConfig::new(&plan.cq, REQUESTS_MAX, 0) };
        let here = Qp::new(&self.pd, config).unwrap();
        let cq = Cq::new(&self.context, 8).unwrap();
        let there = Qp::new(&self.pd, QpConfig::new(&cq, 4, 4)).unwrap();
        let ends = (Endpoint::new(&here, &self.port, 11), Endpoint::new(&there, &self.port, 12));
        let attributes = RcAttributes::default();
        here.connect(&self.port, Access::READ_ONLY, &ends.0, &ends.1, &attributes).unwrap();
        there.connect(&self.port, Access::ALL, &ends.1, &ends.0, &attributes).unwrap();
        let counted = Counted::one_of(8, &self.links).unwrap();
        let link = Link::new(serial, here, generation, self.values.clone(), Arc::new(Notify::new()), counted);
        self.mailbox.tell(Command::Open(Box::new(link))).unwrap();
        let outbox = Buffer::new(&self.pd, 2 * MESSAGE_BYTES, Access::ALL).unwrap();
        Client { qp: there, outbox }
    }

    /// Runs a pass that finds `others` completions of other connections beside those in the queue.
    fn pass(&mut self, others: usize) {
        let of_another = Completion {
            id: 1,
            status: WcStatus::SUCCESS,
            done: Done::Write,
            len_bytes: 0,
            imm: None,
            qp_number: u32::MAX,
            vendor_error: 0,
        };
        self.poller.pass(&mut vec![of_another; others]).unwrap().unwrap();
    }

    /// Runs passes until a condition holds.
    fn pass_until(&mut self, others: usize, what: &str, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..PASSES_MAX {
            if is_so(self) {
                return;
            }
            self.pass(others);
        }
        panic!("not within {PASSES_MAX} passes, seed {}: {what}", self.seed);
    }

    fn leased_bytes(&self) -> u64 {
        self.depot.direct().stats()["pool_leased_bytes"].as_u64().unwrap()
    }

    fn links(&self) -> usize {
        self.links.load(Ordering::Acquire)
    }
}

/// P4, however busy others keep the thread: passes that find the queue empty behind some completions, and, after the
/// connection is over, passes that never see it empty.
#[test]
fn what_a_dead_connection_held_comes_back_though_the_thread_is_busy() {
    for (seed, others) in (0..12).zip([1, TURN - 1, TURN].into_iter().cycle()) {
        let mut stage = Stage::open(seed);
        let client = stage.connect(1);
        client.ask("key");
        stage.pass_until(0, "its value is leased", |stage| stage.leased_bytes() > 0);
        stage.mailbox.tell(Command::Close(1)).unwrap();
        stage.pass_until(others.min(TURN - 1), "its marker", |stage| {
            stage.poller.links.get(&1).is_none_or(|link| link.is_over(Instant::now()))
        });
        stage.pass_until(others, "its end", |stage| stage.links() == 0);
        assert_eq!(stage.leased_bytes(), 0, "seed {seed}");
        assert!(stage.poller.ending.is_empty() && stage.poller.over.is_empty());
        assert_eq!(stage.poller.free, REQUESTS_MAX, "its work requests count no more");
        assert_eq!(stage.standin.get("violations"), 0);
    }
}

/// Destroying a queue pair takes its completions off the queue, and receives among them would be lost for all.
#[test]
fn a_connection_stays_until_its_receives_are_off_the_queue() {
    let mut stage = Stage::open(5);
    let (dead, alive) = (stage.connect(1), stage.connect(2));
    stage.pass(0);
    let steps = |stage: &Stage| stage.standin.get("steps");
    // Both receives are taken, and the queue was not polled yet.
    for _ in 0..RECEIVES {
        dead.ask("none");
    }
    let mut before = steps(&stage) + 1;
    let idle = Cq::new(&stage.context, 1).unwrap();
    let mut quiet = 0;
    while quiet < 100 {
        idle.poll(&mut Vec::new()).unwrap();
        let now = steps(&stage);
        quiet = if now == before { quiet + 1 } else { 0 };
        before = now;
    }
    // The device refuses to stop it, so it is over immediately, and enough other completions came for the queue to be
    // drained.
    stage.standin.fail("ibv_modify_qp", 0, 1, Errno::IO.raw_os_error());
    stage.mailbox.tell(Command::Close(1)).unwrap();
    stage.pass(TURN);
    assert_eq!(stage.links(), 2, "its receives are in the queue yet");
    stage.pass_until(0, "its end", |stage| stage.links() == 1);
    alive.ask("key");
    stage.pass_until(0, "the receives came back", |stage| stage.leased_bytes() > 0);
    assert_eq!(stage.standin.get("violations"), 0);
}

/// A peer that dies in the middle of a message takes its receive with it, and nothing tells which one it was. New
/// connections are served nevertheless, and those that share an exhausted queue are ended (P2, P4).
#[test]
fn peers_that_die_in_the_middle_of_a_message_leave_receives_for_others() {
    let mut stage = Stage::open(7);
    stage.standin.set("loses_receives", 1);
    let idle = Cq::new(&stage.context, 1).unwrap();
    let _witness = stage.connect(1);
    for serial in 2.. {
        if stage.standin.get("lost_receives") > u64::from(RECEIVES) {
            break;
        }
        assert!(serial < 1000, "no message was cut");
        let dead = stage.connect(serial);
        stage.pass(0);
        dead.ask("none");
        // Some of the device's work, usually less than the message.
        idle.poll(&mut Vec::new()).unwrap();
        dead.qp.stop().unwrap();
        drop(dead);
        stage.mailbox.tell(Command::Close(serial)).unwrap();
        stage.pass_until(0, "its end", |stage| !stage.poller.links.contains_key(&serial));
    }
    // As after the time that stalled peers get.
    stage.poller.plan.stall = Duration::ZERO;
    stage.poller.look_over(Instant::now());
    stage.pass_until(0, "the end of the one beside them", |stage| stage.links() == 0);
    stage.poller.plan.stall = Duration::from_secs(3600);
    let alive = stage.connect(1000);
    alive.ask("key");
    stage.pass_until(0, "it is served", |stage| stage.leased_bytes() > 0);
    assert_eq!(stage.standin.get("violations"), 0);
}

/// A receive that completes is not lost, however many connections have ended.
#[test]
fn completions_show_which_receives_are_not_lost() {
    let stage = Stage::open(8);
    let mut inbox = Inbox::new(&stage.pd, 3, 4, MESSAGE_BYTES).unwrap();
    let completed = |index: u64| Completion {
        id: 1 << 63 | 3 << 32 | index,
        status: WcStatus::SUCCESS,
        done: Done::Receive,
        len_bytes: 0,
        imm: None,
        qp_number: 1,
        vendor_error: 0,
    };
    let now = Instant::now();
    for _ in 0..9 {
        inbox.buried_one(now);
    }
    assert!(inbox.is_worn() && inbox.is_starved(now, Duration::ZERO));
    assert!(!inbox.is_starved(now, Duration::from_secs(1)), "there is time for something to come");
    inbox.give_back(&completed(0));
    assert!(inbox.is_worn() && !inbox.is_starved(now, Duration::ZERO), "three may be lost");
    for index in 1..4 {
        assert_eq!(Inbox::generation_of(&completed(index)), 3);
        inbox.give_back(&completed(index));
    }
    assert!(!inbox.is_worn(), "none is lost");
    inbox.buried_one(now);
    assert!(!inbox.is_worn(), "one may be lost");
}
