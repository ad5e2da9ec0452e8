//! A depot that is lost and found again, dies, or has too many connections: what the client keeps mapped, and what it
//! considers lost (P4, P6).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_copy::pool::Registration;
use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink, PoolRegistration};
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec, DeviceEngine, Store};
use kvdepot_depot::message::{PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{PoolMapping, PoolRegion};
use rustix::net::{Shutdown, shutdown};

const POOL: u64 = 1 << 20;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Door {
    /// The depot's number.
    id: u64,
    connections: Vec<OwnedFd>,
    accepted: usize,
    /// Whether connections are closed without an answer, and drains are not answered.
    is_full: bool,
    is_draining: bool,
    /// Whether only new connections are answered.
    is_hung: bool,
    /// Number of namespace handles given out, and the one up to which they are forgotten.
    opened: u64,
    forgotten: u64,
    /// Whether resets, and openings of namespaces called late, are not answered, and how many openings were not.
    opens_late: bool,
    late: usize,
    /// Whether the depot says that a tier's memory can be mapped. It never passes it.
    has_memory: bool,
}

/// A depot that answers every request, and ends connections or itself when told to.
struct Depot {
    path: PathBuf,
    listener: Arc<SeqPacket>,
    door: Arc<Mutex<Door>>,
    pool: Arc<PoolMapping>,
    acceptor: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Depot {
    fn start() -> Self {
        Self::with(Door::default())
    }

    fn with(door: Door) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("depot.sock");
        let listener = Arc::new(SeqPacket::listen(&path, 8).unwrap());
        let door = Arc::new(Mutex::new(door));
        let pool = Arc::new(PoolMapping::create(POOL).unwrap());
        let (accepting, at, memory) = (Arc::clone(&listener), Arc::clone(&door), Arc::clone(&pool));
        let acceptor = std::thread::spawn(move || {
            while let Ok(fd) = rustix::net::accept(accepting.as_fd()) {
                let mut door = at.lock().unwrap();
                door.accepted += 1;
                if door.is_full {
                    continue;
                }
                door.connections.push(fd.try_clone().unwrap());
                let (memory, door) = (Arc::clone(&memory), Arc::clone(&at));
                std::thread::spawn(move || serve(SeqPacket::from_fd(fd), &memory, &door));
            }
        });
        Self { path, listener, door, pool, acceptor: Some(acceptor), _directory: directory }
    }

    /// Ends all connections; new ones are accepted.
    fn hang_up(&self) {
        for connection in self.door.lock().unwrap().connections.drain(..) {
            let _ = shutdown(&connection, Shutdown::Both);
        }
    }

    fn die(&mut self) {
        let _ = shutdown(self.listener.as_fd(), Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().unwrap();
        }
        let _ = std::fs::remove_file(&self.path);
        self.hang_up();
    }

    fn accepted(&self) -> usize {
        self.door.lock().unwrap().accepted
    }

    /// How often the pool's memory is mapped in this process, including the depot's own mapping.
    fn mappings(&self) -> usize {
        let fd = self.pool.fd().unwrap();
        let inode = rustix::fs::fstat(fd).unwrap().st_ino.to_string();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_ours = |line: &&str| {
            line.contains("kvdepot-pool") && line.split_whitespace().nth(4) == Some(inode.as_str())
        };
        maps.lines().filter(is_ours).count()
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        self.die();
    }
}

fn serve(mut socket: SeqPacket, pool: &PoolMapping, door: &Mutex<Door>) {
    let mut buffer = FrameBuffer::default();
    while socket.recv(&mut buffer, None).is_ok() {
        let (id, request) = decode::<Request<'_>>(&buffer).unwrap();
        let is_hello = matches!(request, Request::Hello { .. });
        while !is_hello && door.lock().unwrap().is_hung {
            std::thread::yield_now();
        }
        let response = match request {
            Request::Hello { .. } => {
                let door = door.lock().unwrap();
                Response::Welcome {
                    version: PROTOCOL_VERSION,
                    depot: door.id,
                    pid: 1,
                    regions: vec![PoolRegion::memory(POOL, None)],
                    timeout_ms: 1000,
                    waiting_queue_depth: 1,
                    running_queue_depth: 1,
                    has_memory: door.has_memory,
                }
            }
            Request::OpenNamespace { canonical } => {
                let mut door = door.lock().unwrap();
                if door.opens_late && canonical.contains("late") {
                    door.late += 1;
                    continue;
                }
                door.opened += 1;
                Response::Namespace { handle: door.opened, id: [1; 16], epoch: 0 }
            }
            Request::ClaimOpen { groups, .. }
                if groups[0].namespaces[0] <= door.lock().unwrap().forgotten =>
            {
                Response::from_error(&Error::new(ErrorKind::NotFound, "no such namespace"))
            }
            Request::ClaimOpen { .. } => {
                Response::Claim { claim: 1, settled: true, units: 1, units_from_tier: 0, arriving: None }
            }
            Request::Reset { .. } if door.lock().unwrap().opens_late => continue,
            Request::Drain { .. } => {
                door.lock().unwrap().is_draining = true;
                while door.lock().unwrap().is_full {
                    std::thread::yield_now();
                }
                Response::Drained(true)
            }
            Request::Goodbye => return,
            _ => Response::Ok,
        };
        // The other side may have gone.
        let _ = socket.send(&encode(id, &response).unwrap(), pool.fd().filter(|_| is_hello));
    }
}

/// A device that counts what it is told about pools.
#[derive(Debug, Default)]
struct Device {
    registered: AtomicUsize,
    ended: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Kept(Arc<AtomicUsize>);

impl Registration for Kept {
    fn registered_bytes(&self) -> u64 {
        POOL
    }

    fn wait(&self, _timeout: Duration) -> bool {
        true
    }

    fn failure(&self) -> Option<Error> {
        None
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl CopyEngine for Device {
    fn name(&self) -> &'static str {
        "counts"
    }

    unsafe fn run(&self, _batch: CopyBatch, _sink: Arc<dyn GroupSink>) -> Result<()> {
        unreachable!("nothing is copied here")
    }

    unsafe fn register_pool(&self, _base: *mut u8, _len: usize) -> Result<PoolRegistration> {
        self.registered.fetch_add(1, Ordering::SeqCst);
        Ok(PoolRegistration::new(Box::new(Kept(Arc::clone(&self.ended)))))
    }
}

fn spec(name: &str) -> Arc<NamespaceSpec> {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    Arc::new(NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap())
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come true");
        std::thread::yield_now();
    }
}

fn claim(attachment: &Arc<Attachment>, spec: &Arc<NamespaceSpec>) -> Claim {
    let group = ClaimGroupSpec { namespaces: vec![Arc::clone(spec)], window_blocks: 0, hashes_per_block: 1 };
    Claim::open(attachment, &[group], &[BlockHash([1; 16])], 0, 1, "").unwrap()
}

struct Lab {
    depot: Depot,
    attachment: Arc<Attachment>,
    device: Arc<Device>,
    engine: Arc<DeviceEngine>,
    spec: Arc<NamespaceSpec>,
    store: Store,
}

impl Lab {
    fn new() -> Self {
        Self::with_calls_of(HANG)
    }

    fn with_calls_of(call_timeout: Duration) -> Self {
        let depot = Depot::start();
        let attachment = Attachment::connect(depot.path.clone(), None, HANG, call_timeout).unwrap();
        let device = Arc::new(Device::default());
        let engine = DeviceEngine::new(Arc::clone(&device) as Arc<dyn CopyEngine>);
        let spec = spec("first");
        let store = Store::new(&attachment, Arc::clone(&spec), Arc::clone(&engine), HANG).unwrap();
        Self { depot, attachment, device, engine, spec, store }
    }

    fn counts(&self) -> (usize, usize) {
        (self.device.registered.load(Ordering::SeqCst), self.device.ended.load(Ordering::SeqCst))
    }
}

#[test]
fn a_depot_that_is_attached_again_keeps_its_mapping_and_registration() {
    let lab = Lab::new();
    assert_eq!((lab.counts(), lab.depot.mappings()), ((1, 0), 2));
    for life in 1..4 {
        let accepted = lab.depot.accepted();
        lab.depot.hang_up();
        eventually("attached again", || lab.depot.accepted() > accepted && lab.attachment.attached());
        // A store tells its device about the pool, as a copy does.
        let name = format!("life {life}");
        let _store = Store::new(&lab.attachment, spec(&name), Arc::clone(&lab.engine), HANG).unwrap();
        assert_eq!((lab.counts(), lab.depot.mappings()), ((1, 0), 2), "life {life}");
    }
}

/// As it happens to a process that has no descriptor left.
#[test]
fn a_depot_whose_memory_does_not_arrive_is_attached_without_it() {
    let depot = Depot::with(Door { has_memory: true, ..Door::default() });
    let attachment = Attachment::connect(depot.path.clone(), None, HANG, HANG).unwrap();
    assert!(attachment.attached());
    let spec = spec("first");
    attachment.register(&spec).unwrap();
    assert_eq!(claim(&attachment, &spec).poll(), (true, 1, 0));
}

#[test]
fn a_namespace_that_the_depot_has_forgotten_is_a_miss_until_it_is_opened_again() {
    let lab = Lab::new();
    drop(claim(&lab.attachment, &lab.spec));
    let opened = {
        let mut door = lab.depot.door.lock().unwrap();
        door.forgotten = door.opened;
        door.opened
    };
    let hit = || claim(&lab.attachment, &lab.spec).poll().1;
    assert_eq!(hit(), 0, "its old number is a miss");
    eventually("opened again", || hit() == 1);
    assert!(lab.depot.door.lock().unwrap().opened > opened && lab.attachment.attached());
}

#[test]
fn the_pool_of_a_dead_depot_is_given_up_although_nothing_is_copied() {
    let mut lab = Lab::new();
    // As an engine keeps one for its requests.
    let _claim = claim(&lab.attachment, &lab.spec);
    assert_eq!((lab.counts(), lab.depot.mappings()), ((1, 0), 2));
    lab.depot.die();
    eventually("unregistered and unmapped", || (lab.counts(), lab.depot.mappings()) == ((1, 1), 1));
    assert!(!lab.attachment.attached());
}

#[test]
fn the_pool_of_an_attachment_that_was_closed_is_given_up() {
    let lab = Lab::new();
    lab.attachment.close();
    eventually("unregistered and unmapped", || (lab.counts(), lab.depot.mappings()) == ((1, 1), 1));
}

/// P2: a depot that answers nobody is lost after the time of a call, not at the task's deadline.
#[test]
fn a_dump_to_a_depot_that_hangs_ends_long_before_its_deadline() {
    let (lab, memory) = (Lab::with_calls_of(Duration::from_millis(500)), vec![0_u8; 4096]);
    // SAFETY: the memory lives longer than the task.
    unsafe { lab.store.register_pages(vec![memory.as_ptr() as u64], vec![4096], 1) }.unwrap();
    lab.depot.door.lock().unwrap().is_hung = true;
    // SAFETY: as above, and nothing writes it.
    let task = unsafe { lab.store.dump_pages(vec![BlockHash([1; 16])], &[0], 0) }.unwrap();
    assert!(task.wait(Some(HANG / 2)), "the task ends at its deadline only");
    assert_eq!(task.failed().len(), 1);
    lab.depot.door.lock().unwrap().is_hung = false;
}

/// P6: a tier that hangs may keep the depot from answering about one namespace.
#[test]
fn a_depot_that_is_late_with_a_namespace_is_not_lost_for_the_others() {
    let lab = Lab::with_calls_of(Duration::from_secs(1));
    lab.depot.door.lock().unwrap().opens_late = true;
    let (other, hit) = (spec("late"), |spec| claim(&lab.attachment, spec).poll().1);
    lab.attachment.register(&other).unwrap();
    assert!(
        lab.attachment.attached() && lab.depot.door.lock().unwrap().late > 0,
        "{}",
        lab.attachment.trouble()
    );
    assert_eq!((hit(&lab.spec), hit(&other)), (1, 0));
    lab.depot.door.lock().unwrap().opens_late = false;
    eventually("the other namespace is open", || hit(&other) == 1);
}

/// P6: a tier may take as long for a reset as the client waits.
#[test]
fn a_depot_that_is_late_with_a_reset_is_not_lost() {
    let lab = Lab::with_calls_of(Duration::from_secs(1));
    lab.depot.door.lock().unwrap().opens_late = true;
    let late = lab.attachment.reset(&[Arc::clone(&lab.spec)]).unwrap_err();
    assert!(late.kind() == ErrorKind::Timeout && lab.attachment.attached(), "{late}");
    assert_eq!(claim(&lab.attachment, &lab.spec).poll().1, 1);
}

/// P2, P6: a client that attaches waits for one of them, and those that can be opened are open.
#[test]
fn namespaces_that_cannot_be_opened_delay_neither_the_attachment_nor_others() {
    let lab = Lab::with_calls_of(Duration::from_secs(1));
    lab.depot.door.lock().unwrap().opens_late = true;
    std::thread::scope(|scope| {
        for name in ["late 1", "late 2", "late 3"] {
            let attachment = &lab.attachment;
            scope.spawn(move || attachment.register(&spec(name)).unwrap());
        }
    });
    let working = spec("working");
    lab.attachment.register(&working).unwrap();
    lab.depot.hang_up();
    lab.depot.door.lock().unwrap().late = 0;
    let late = || lab.depot.door.lock().unwrap().late;
    eventually("lost", || !lab.attachment.attached());
    eventually("attached again", || lab.attachment.attached());
    assert!(late() < 3, "it waited for all that are late");
    assert_eq!(claim(&lab.attachment, &working).poll().1, 1, "it is behind those that are late");
}

#[test]
fn a_refused_lane_is_no_lost_depot() {
    // While its pool is mapped here, no lane is used to say in the background that copies to other pools have ended.
    let other = Depot::with(Door { id: 1, ..Door::default() });
    let _attached = Attachment::connect(other.path.clone(), None, HANG, HANG).unwrap();
    let lab = Lab::new();
    lab.depot.door.lock().unwrap().is_full = true;
    let accepted = lab.depot.accepted();
    std::thread::scope(|scope| {
        // Takes the lane that opening the namespace has left; the other one belongs to the claims.
        let drained = scope.spawn(|| lab.attachment.drain(HANG));
        eventually("a drain under way", || lab.depot.door.lock().unwrap().is_draining);
        let refused = lab.attachment.reset(&[Arc::clone(&lab.spec)]).unwrap_err();
        assert_eq!((refused.kind(), lab.depot.accepted()), (ErrorKind::Busy, accepted + 1), "{refused}");
        assert!(lab.attachment.attached());
        assert_eq!(claim(&lab.attachment, &lab.spec).poll(), (true, 1, 0));
        lab.depot.door.lock().unwrap().is_full = false;
        assert!(drained.join().unwrap().unwrap());
    });
}
