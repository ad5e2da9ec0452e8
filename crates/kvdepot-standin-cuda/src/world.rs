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

/// In the set of hung streams: all streams, including future ones.
pub const EVERY_STREAM: u64 = u64::MAX;
/// Maximum number of lines in a world's log.
const LOG_LINES_MAX: usize = 64;
/// Number of calls that a stream queues before the next one blocks inside the driver, together with other threads'
/// calls.
const QUEUE_DEPTH: usize = 1024;

pub(crate) struct World {
    pub(crate) state: Mutex<State>,
    /// Signalled when work ran or was queued.
    pub(crate) progress: Condvar,
}

#[derive(Default)]
pub(crate) struct Event {
    /// Number of times that it was recorded; a wait captures this number.
    pub(crate) recorded: u64,
    /// Number of records that have been reached.
    pub(crate) completed: u64,
}

pub(crate) struct State {
    pub(crate) device: usize,
    pub(crate) retained: u32,
    pub(crate) rng: Rng,
    /// Chance, in percent, that a call runs some queued work before it returns.
    pub(crate) eagerness: u64,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) functions: HashMap<u64, crate::kernels::Kernel>,
    pub(crate) modules: HashMap<u64, ()>,
    pub(crate) memory: Memory,
    pub(crate) copy_engines: CopyEngines,
    /// Largest number of bytes registered by one call.
    pub(crate) longest_registration: u64,
    /// Numbers of blocks, and of threads per block, of the copy kernel's launch with the most blocks.
    pub(crate) largest_launch: [u64; 2],
    /// Kind of copies that transfer a wrong byte.
    pub(crate) corrupts: Option<Maker>,
    pub(crate) faults: Faults,
    pub(crate) log: Vec<String>,
    /// Streams that make no progress; `EVERY_STREAM` means all.
    pub(crate) hung: HashSet<u64>,
    /// The code that a lost context returns for everything.
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

    /// Resets the world to a seed, with nothing allocated.
    pub(crate) fn reset(&mut self, seed: u64) {
        let (device, handles) = (self.device, self.handles);
        *self = Self::new(device);
        self.handles = handles;
        self.rng = Rng::new(seed);
        self.eagerness = [0, 5, 30, 80][self.rng.below(4) as usize];
    }

    /// Returns a new handle that identifies its world.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 1;
        ((self.device as u64 + 1) << 40) | (self.handles << 4)
    }

    /// Records a caller's violation.
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

/// Default capture mode of threads: calls that could disturb a capture on another thread make that capture fail.
pub(crate) const CAPTURE_MODE_GLOBAL: i32 = 0;
/// The mode in which they do not.
pub(crate) const CAPTURE_MODE_RELAXED: i32 = 2;

/// Calls that may disturb a capture on another thread; an engine may capture at any time.
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

/// Returns the world of a device.
pub(crate) fn world(device: usize) -> Option<&'static World> {
    WORLDS.get(device)
}

/// Returns a context's handle.
pub(crate) fn context_handle(device: usize) -> u64 {
    (device as u64 + 1) << 40
}

/// Returns the device of any handle.
pub(crate) fn device_of(handle: u64) -> Option<usize> {
    let device = (handle >> 40).checked_sub(1)? as usize;
    (device < DEVICE_COUNT).then_some(device)
}

/// Makes a call in the world of the thread's current context, after checking for planned failures.
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
