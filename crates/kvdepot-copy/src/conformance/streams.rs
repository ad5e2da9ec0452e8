//! The suite for engines of devices with streams: dumps see what compute wrote, and compute sees what was loaded (P3).
//!
//! Nothing here panics in an engine's threads, and all failures are returned as text: an engine with a deliberate
//! mistake must fail the suite, not abort it.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::Result;
use parking_lot::{Condvar, Mutex};

use crate::batch::{Direction, GroupSink};
use crate::conformance::DeviceMemory;
use crate::conformance::draw::{Draw, pattern};
use crate::conformance::work::Work;
use crate::pages::{PAGE, Pages};
use crate::{CopyEngine, DeviceEvent, PoolRegistration};

/// The byte that fills memory at the start.
const OLD: u8 = 0xEE;
/// The time limit for a group. It detects hangs and does not measure speed.
const HANG: Duration = Duration::from_secs(60);

/// A device with streams, as an engine's compute sees it.
pub trait StreamDevice: Send + Sync {
    /// The type of its memory.
    type Memory: DeviceMemory + Send + Sync;

    /// Allocates memory of `len` bytes.
    fn memory(&self, len: usize) -> Self::Memory;
    /// Makes a stream for compute.
    fn stream(&self) -> u64;
    /// Queues a write to `memory`, after other work where the device can.
    fn write_on(&self, stream: u64, memory: &Self::Memory, bytes: &[u8]);
    /// Queues a read of a part of `memory`; `readings` returns the bytes.
    fn read_on(&self, stream: u64, memory: &Self::Memory, offset: usize, len: usize);
    /// Waits for a stream. Returns the bytes read on it, in order.
    fn readings(&self, stream: u64) -> Vec<Vec<u8>>;
    /// Records an event after everything queued so far.
    fn record(&self, stream: u64) -> u64;
    /// Waits until the device is idle.
    fn settle(&self);
}

type Check = Result<(), String>;

fn ensure(good: bool, what: impl FnOnce() -> String) -> Check {
    if good { Ok(()) } else { Err(what()) }
}

/// Runs the suite for one seed.
pub fn check_streams<D: StreamDevice>(engine: &dyn CopyEngine, device: &D, seed: u64) -> Check {
    let run = |name: &str, check: &dyn Fn(&mut Draw) -> Check| {
        let outcome = check(&mut Draw::new(seed));
        // Everything that a faulty engine has left running must end before the memory is freed.
        outcome.map_err(|what| format!("{} engine, {name}, seed {seed}: {what}", engine.name()))
    };
    run("compute then dump", &|draw| compute_then_dump(engine, device, draw))?;
    run("load then compute", &|draw| load_then_compute(engine, device, draw))?;
    run("both at once", &|draw| both_at_once(engine, device, draw))
}

/// The check of a sink when a group ends.
type Look = Box<dyn Fn(usize) -> Check + Send + Sync>;
/// The check of a sink when a group was submitted to the device.
type Submitted = Box<dyn Fn(usize, &DeviceEvent) -> Check + Send + Sync>;

/// Checks each group at the moment when it ends.
struct Watcher {
    state: Mutex<WatcherState>,
    changed: Condvar,
    look: Look,
    submitted: Submitted,
}

#[derive(Default)]
struct WatcherState {
    ended: Vec<usize>,
    events: Vec<(usize, DeviceEvent)>,
    wrong: Vec<String>,
}

impl Watcher {
    fn new(look: Look, submitted: Submitted) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), look, submitted })
    }

    fn wait(&self, groups: usize) -> Check {
        let mut state = self.state.lock();
        while state.ended.len() < groups {
            if self.changed.wait_for(&mut state, HANG).timed_out() {
                return Err(format!("only {} of {groups} groups ended", state.ended.len()));
            }
        }
        if let Some(wrong) = state.wrong.first() {
            return Err(wrong.clone());
        }
        let order: Vec<usize> = (0..groups).collect();
        ensure(state.ended == order, || format!("groups ended as {:?}", state.ended))
    }
}

impl GroupSink for Watcher {
    fn group_submitted(&self, group: usize, event: DeviceEvent) {
        let outcome = (self.submitted)(group, &event);
        let mut state = self.state.lock();
        if state.ended.contains(&group) {
            state.wrong.push(format!("group {group} was submitted after it had ended"));
        }
        state.events.push((group, event));
        state.wrong.extend(outcome.err());
    }

    fn group_ended(&self, group: usize, outcome: Result<()>) {
        let looked =
            outcome.map_err(|e| format!("group {group} failed: {e}")).and_then(|()| (self.look)(group));
        let mut state = self.state.lock();
        state.ended.push(group);
        state.wrong.extend(looked.err());
        self.changed.notify_all();
    }
}

impl Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}

/// Registers all of the pages, a part of them, or nothing, and waits for it or not.
fn register(engine: &dyn CopyEngine, pages: &Pages, draw: &mut Draw) -> Result<PoolRegistration, String> {
    let count = pages.len() / PAGE;
    let (first, end) = match draw.below(4) {
        0 => return Ok(PoolRegistration::none()),
        1 => (0, count),
        _ => {
            let first = draw.below(count);
            (first, first + 1 + draw.below(count - first))
        }
    };
    // SAFETY: the pages outlive the registration, which the caller drops when its batch has ended.
    let registration =
        unsafe { engine.register_pool(pages.address().add(first * PAGE), (end - first) * PAGE) }
            .map_err(|e| format!("registration refused: {e}"))?;
    if draw.one_in(2) {
        ensure(registration.wait(HANG), || "registration never ended".into())?;
        ensure(registration.failure().is_none(), || format!("{:?}", registration.failure()))?;
    }
    Ok(registration)
}

fn differs(what: &str, group: usize, found: &[u8], wanted: &[u8]) -> Check {
    match found.iter().zip(wanted).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(format!(
            "{what} of group {group}: byte {at} of {} is {:#x}, not {:#x}",
            wanted.len(),
            found[at],
            wanted[at]
        )),
    }
}

/// Compute writes and the dump waits for its event. When a group ends, its bytes have arrived, and compute may
/// overwrite the source without damaging them.
fn compute_then_dump<D: StreamDevice>(engine: &dyn CopyEngine, device: &D, draw: &mut Draw) -> Check {
    let groups = draw.below(9);
    let work = Arc::new(Work::draw(draw, groups, 5));
    let new = Arc::new(pattern(work.device_len, 1 + draw.below(1000) as u64));
    let memory = device.memory(work.device_len);
    memory.write(&vec![OLD; work.device_len]);
    let host = Arc::new(Pages::new(&vec![OLD; work.host_len]));
    let registration = register(engine, &host, draw)?;
    let compute = device.stream();
    device.write_on(compute, &memory, &new);
    let mut batch = work.batch(Direction::ToHost, memory.address(), &host);
    batch.wait_event = device.record(compute);
    batch.decoding = draw.one_in(2);
    let (work_then, new_then, host_then) = (Arc::clone(&work), Arc::clone(&new), Arc::clone(&host));
    let look: Look = Box::new(move |group| {
        work_then.groups[group].iter().try_for_each(|place| {
            let wanted = &new_then[place.device..place.device + place.len];
            differs("host bytes", group, &host_then.read(place.host, place.len), wanted)
        })
    });
    let watcher =
        Watcher::new(look, Box::new(|group, _| Err(format!("group {group} of a dump has an event"))));
    // SAFETY: the memory lives until `settle`; compute writes the source again only after the last group.
    let run = unsafe { engine.run(batch, Arc::clone(&watcher) as Arc<dyn GroupSink>) };
    let outcome = run.map_err(|e| e.to_string()).and_then(|()| watcher.wait(groups));
    device.write_on(compute, &memory, &vec![OLD; work.device_len]);
    device.settle();
    outcome?;
    let mut wanted = vec![OLD; work.host_len];
    work.expect(&mut wanted, &new, Direction::ToHost);
    drop(registration);
    differs("host memory at the end", groups, &host.read(0, work.host_len), &wanted)
}

/// The load waits for compute that uses the old bytes. Compute waits for each group's event on the device and uses the
/// new bytes; no thread waits for anything.
fn load_then_compute<D: StreamDevice>(engine: &dyn CopyEngine, device: &D, draw: &mut Draw) -> Check {
    let groups = draw.below(7);
    let work = Arc::new(Work::draw(draw, groups, 4));
    let bytes = pattern(work.host_len, 1 + draw.below(1000) as u64);
    let host = Arc::new(Pages::new(&bytes));
    let memory = Arc::new(device.memory(work.device_len));
    memory.write(&vec![OLD; work.device_len]);
    let registration = register(engine, &host, draw)?;
    let (before, after) = (device.stream(), device.stream());
    device.read_on(before, &memory, 0, work.device_len);
    let mut batch = work.batch(Direction::ToDevice, memory.address(), &host);
    batch.wait_event = device.record(before);
    batch.decoding = draw.one_in(2);
    let mut wanted = vec![OLD; work.device_len];
    work.expect(&mut wanted, &bytes, Direction::ToDevice);
    let watcher = Watcher::new(
        Box::new(|_| Ok(())),
        Box::new(move |_, event| event.wait_on_stream(after).map_err(|e| e.to_string())),
    );
    // SAFETY: the memory lives until `settle`; nothing writes the source.
    let run = unsafe { engine.run(batch, Arc::clone(&watcher) as Arc<dyn GroupSink>) };
    device.read_on(after, &memory, 0, work.device_len);
    let (old, new) = (device.readings(before), device.readings(after));
    let outcome = run.map_err(|e| e.to_string()).and_then(|()| watcher.wait(groups));
    device.settle();
    outcome?;
    let submitted = watcher.state.lock().events.iter().map(|&(group, _)| group).collect::<Vec<_>>();
    let order: Vec<usize> = (0..groups).collect();
    ensure(submitted == order, || format!("groups were submitted as {submitted:?}"))?;
    drop(registration);
    ensure(old[0].iter().all(|&byte| byte == OLD), || "a load did not wait for compute".into())?;
    if groups > 0 {
        differs("device bytes that compute saw", 0, &new[0], &wanted)?;
    }
    differs("device memory at the end", groups, &memory.read(), &wanted)
}

/// A load and a dump at the same time. Each group's bytes are complete at the moment when it is reported.
fn both_at_once<D: StreamDevice>(engine: &dyn CopyEngine, device: &D, draw: &mut Draw) -> Check {
    let counts = [20 + draw.below(20), 20 + draw.below(20)];
    let works = counts.map(|groups| Arc::new(Work::draw(draw, groups, 2)));
    let directions = [Direction::ToHost, Direction::ToDevice];
    let new = Arc::new(pattern(works[0].device_len, 77));
    let loaded = pattern(works[1].host_len, 78);
    let memories = works.each_ref().map(|work| Arc::new(device.memory(work.device_len)));
    memories[0].write(&new);
    memories[1].write(&vec![OLD; works[1].device_len]);
    let hosts = [Arc::new(Pages::new(&vec![OLD; works[0].host_len])), Arc::new(Pages::new(&loaded))];
    let registrations = [register(engine, &hosts[0], draw)?, register(engine, &hosts[1], draw)?];
    let (work, new_then, host) = (Arc::clone(&works[0]), Arc::clone(&new), Arc::clone(&hosts[0]));
    let dumped: Look = Box::new(move |group| {
        work.groups[group].iter().try_for_each(|place| {
            let wanted = &new_then[place.device..place.device + place.len];
            differs("host bytes", group, &host.read(place.host, place.len), wanted)
        })
    });
    let watchers = [
        Watcher::new(dumped, Box::new(|_, _| Ok(()))),
        Watcher::new(Box::new(|_| Ok(())), Box::new(|_, _| Ok(()))),
    ];
    let runs = std::thread::scope(|scope| {
        let run = |side: usize| {
            let batch = works[side].batch(directions[side], memories[side].address(), &hosts[side]);
            let sink = Arc::clone(&watchers[side]) as Arc<dyn GroupSink>;
            // SAFETY: the memory lives until `settle`, and no byte is in two copies.
            let run = unsafe { engine.run(batch, sink) };
            run.map_err(|e| e.to_string()).and_then(|()| watchers[side].wait(counts[side]))
        };
        let other = scope.spawn(move || run(1));
        let outcome = run(0);
        outcome.and(other.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    });
    let seen = memories[1].read();
    device.settle();
    runs?;
    drop(registrations);
    let mut wanted = vec![OLD; works[1].device_len];
    works[1].expect(&mut wanted, &loaded, Direction::ToDevice);
    differs("device memory when the load had ended", counts[1], &seen, &wanted)
}
