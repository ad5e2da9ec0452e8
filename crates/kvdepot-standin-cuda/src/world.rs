//! One device: its streams, events and memory, behind one lock.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::LazyLock;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::code;
use crate::control::DEVICE_COUNT;
use crate::copy_engines::CopyEngines;
use crate::faults::Faults;
use crate::memory::Memory;
use crate::rng::Rng;
use crate::schedule::{Maker, Op, Stream};

/// In the set of hung streams: all of them, those to come included.
pub const EVERY_STREAM: u64 = u64::MAX;
/// Most lines that a world's log keeps.
const LOG_LINES_MAX: usize = 64;
/// Calls that a stream takes before the next one blocks inside the driver, and with it what other threads ask of it.
const QUEUE_DEPTH: usize = 1024;

pub(crate) struct World {
    pub(crate) state: Mutex<State>,
    /// Something ran or was queued.
    pub(crate) progress: Condvar,
}

#[derive(Default)]
pub(crate) struct Event {
    /// Times it was recorded; a wait captures this number.
    pub(crate) recorded: u64,
    /// Records that have been reached.
    pub(crate) completed: u64,
}

pub(crate) struct State {
    pub(crate) device: usize,
    pub(crate) retained: u32,
    pub(crate) rng: Rng,
    /// Chance in percent that a call runs some queued work before it returns.
    pub(crate) eagerness: u64,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) functions: HashMap<u64, crate::kernels::Kernel>,
    pub(crate) modules: HashMap<u64, ()>,
    pub(crate) memory: Memory,
    pub(crate) copy_engines: CopyEngines,
    /// Most bytes that were registered by one call.
    pub(crate) longest_registration: u64,
    /// Blocks, and threads of each, of the launch with most blocks of the copy kernel.
    pub(crate) largest_launch: [u64; 2],
    /// Whose copies bring a wrong byte.
    pub(crate) corrupts: Option<Maker>,
    pub(crate) faults: Faults,
    pub(crate) log: Vec<String>,
    /// Streams that make no progress; `EVERY_STREAM` stands for all.
    pub(crate) hung: HashSet<u64>,
    /// The code with which a lost context answers everything.
    pub(crate) lost: i32,
    handles: u64,
}

impl State {
    fn new(device: usize) -> Self {
        let mut state = Self {
            device,
            retained: 0,
            rng: Rng::new(0),
            eagerness: 0,
            streams: HashMap::new(),
            events: HashMap::new(),
            functions: HashMap::new(),
            modules: HashMap::new(),
            memory: Memory::default(),
            copy_engines: CopyEngines::default(),
            longest_registration: 0,
            largest_launch: [0; 2],
            corrupts: None,
            faults: Faults::default(),
            log: Vec::new(),
            hung: HashSet::new(),
            lost: code::SUCCESS,
            handles: 0,
        };
        state.streams.insert(0, Stream { weight: 8, queue: VecDeque::new() });
        state
    }

    /// Begins anew from a seed, with nothing allocated.
    pub(crate) fn reset(&mut self, seed: u64) {
        let (device, handles) = (self.device, self.handles);
        *self = Self::new(device);
        self.handles = handles;
        self.rng = Rng::new(seed);
        self.eagerness = [0, 5, 30, 80][self.rng.below(4) as usize];
    }

    /// A handle that says which world it belongs to.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 1;
        ((self.device as u64 + 1) << 40) | (self.handles << 4)
    }

    /// Writes down what a caller did wrong.
    pub(crate) fn violation(&mut self, what: String) {
        if self.log.len() < LOG_LINES_MAX {
            self.log.push(what);
        }
    }

    pub(crate) fn is_hung(&self, stream: u64) -> bool {
        self.hung.contains(&stream) || self.hung.contains(&EVERY_STREAM)
    }

    pub(crate) fn push(&mut self, stream: u64, op: Op) {
        self.copy_engines.queued(&op);
        let Some(stream) = self.streams.get_mut(&stream) else { return };
        stream.queue.push_back(op);
        if stream.queue.len() > QUEUE_DEPTH {
            self.violation(format!(
                "a call beyond {QUEUE_DEPTH} of one stream would block inside the driver, with its lock held"
            ));
        }
    }
}

static WORLDS: LazyLock<Vec<World>> = LazyLock::new(|| {
    let world = |device| World { state: Mutex::new(State::new(device)), progress: Condvar::new() };
    (0..DEVICE_COUNT).map(world).collect()
});

/// What CUDA starts every thread with: calls that could disturb a capture elsewhere make that capture fail.
pub(crate) const CAPTURE_MODE_GLOBAL: i32 = 0;
/// The mode in which they do not.
pub(crate) const CAPTURE_MODE_RELAXED: i32 = 2;

/// Calls that may disturb a capture of another thread; an engine may be capturing whenever kvdepot works.
const DISTURBING: [&str; 8] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuEventQuery",
    "cuModuleLoadData",
];

thread_local! {
    /// The capture mode of this thread.
    pub(crate) static CAPTURE_MODE: Cell<i32> = const { Cell::new(CAPTURE_MODE_GLOBAL) };
    /// Devices whose contexts were pushed by this thread.
    pub(crate) static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The world of a device.
pub(crate) fn world(device: usize) -> Option<&'static World> {
    WORLDS.get(device)
}

/// A context's handle.
pub(crate) fn context_handle(device: usize) -> u64 {
    (device as u64 + 1) << 40
}

/// The device of any handle.
pub(crate) fn device_of(handle: u64) -> Option<usize> {
    let device = (handle >> 40).checked_sub(1)? as usize;
    (device < DEVICE_COUNT).then_some(device)
}

/// A call in the world of the thread's current context: planned failures first.
pub(crate) fn call(
    name: &str,
    body: impl FnOnce(&'static World, &mut MutexGuard<'static, State>) -> Result<(), i32>,
) -> i32 {
    let Some(device) = CONTEXTS.with_borrow(|contexts| contexts.last().copied()) else {
        return code::INVALID_CONTEXT;
    };
    let Some(world) = world(device) else { return code::INVALID_CONTEXT };
    let mut state = world.state.lock();
    if let Some(code) = state.faults.called(name) {
        return code;
    }
    if state.lost != code::SUCCESS {
        return state.lost;
    }
    if state.retained == 0 {
        state.violation(format!("{name} in a context that was released"));
        return code::INVALID_CONTEXT;
    }
    if DISTURBING.contains(&name) && CAPTURE_MODE.get() != CAPTURE_MODE_RELAXED {
        state.violation(format!(
            "{name} would make an engine's capture fail: the thread's mode is not relaxed"
        ));
    }
    let answer = body(world, &mut state).map_or_else(|code| code, |()| code::SUCCESS);
    state.some_early();
    drop(state);
    world.progress.notify_all();
    answer
}
