//! Follows a depot's events on its own thread, so that callers never wait for the depot.

mod reader;
mod view;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvdepot_core::limits::{FOLLOWED_BLOCKS_MAX, FOLLOWED_CHANGES_MAX, NAMESPACES_MAX};
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use parking_lot::{Condvar, Mutex};

use crate::client::attach::Attachment;
use crate::client::generation::Generation;
use crate::client::lane;
use crate::events::packed::unpack;
use crate::message::{KnownNamespace, NamespaceHandle, Request, Response};

pub(crate) use reader::{Next, Reader};
pub use view::Delta;

/// Time between two requests to a depot that has nothing new.
const POLL: Duration = Duration::from_millis(50);
/// Time between two walks over everything, which find what no event reports.
const REFRESH: Duration = Duration::from_secs(60);
/// Time between two pieces of such a walk, so that it costs little.
const REFRESH_PAUSE: Duration = Duration::from_millis(2);
/// Time between two searches for new namespaces, when all are followed.
const LIST: Duration = Duration::from_secs(1);
/// Maximum wait for an answer. The thread has nothing else to do.
const CALL: Duration = Duration::from_secs(5);

/// What is followed.
#[derive(Clone, Debug)]
pub enum Followed {
    /// Groups of namespaces. A block counts if all namespaces of a group have it.
    Groups(Vec<Vec<Arc<NamespaceSpec>>>),
    /// Every namespace of the depot, each as its own group, in the order in which they are found.
    All,
}

/// Counters of a follower, and whether it is in step with the depot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowerState {
    /// Whether everything that the depot had at the last request was reported.
    pub is_in_step: bool,
    /// Number of tracked blocks.
    pub blocks: u64,
    /// Number of blocks that were not reported because there were too many.
    pub left_out: u64,
    /// Number of times that events were missed and everything was read again.
    pub gaps: u64,
    /// Number of walks over everything.
    pub walks: u64,
}

/// What the thread shares with the caller.
#[derive(Debug, Default)]
struct Shared {
    out: Mutex<VecDeque<Delta>>,
    /// Names of the namespaces by group, when all are followed.
    names: Mutex<Vec<NamespaceId>>,
    places: Mutex<Vec<String>>,
    state: Mutex<FollowerState>,
    control: Mutex<Control>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Control {
    stop: bool,
    /// What to follow from now on.
    target: Option<Followed>,
}

/// See the module. Dropping it ends its thread, but does not wait for the end.
pub struct Follower {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Follower {
    /// Begins to follow.
    pub fn start(attachment: &Arc<Attachment>, followed: Followed) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.control.lock().target = Some(followed);
        let mut thread = Thread::new(Arc::clone(attachment), Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("kvdepot-follow".to_owned())
            .spawn(move || thread.run())
            .map_err(|e| Error::io("cannot start a thread", e))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Follows something else. Everything reported as stored is reported as removed first.
    pub fn follow(&self, followed: Followed) {
        self.shared.control.lock().target = Some(followed);
        self.shared.wake.notify_all();
    }

    /// Takes the oldest changes, at most `most`. Never waits.
    pub fn take(&self, most: usize) -> Vec<Delta> {
        let mut out = self.shared.out.lock();
        let count = most.min(out.len());
        out.drain(..count).collect()
    }

    /// Returns the names of the known places. The list grows when a depot with other tiers is attached.
    pub fn places(&self) -> Vec<String> {
        self.shared.places.lock().clone()
    }

    /// Returns the name of each group's namespace, when all are followed.
    pub fn names(&self) -> Vec<NamespaceId> {
        self.shared.names.lock().clone()
    }

    /// Returns counters. `is_in_step` also means that the caller has taken all changes.
    pub fn state(&self) -> FollowerState {
        let mut state = *self.shared.state.lock();
        state.is_in_step &= self.shared.out.lock().is_empty();
        state
    }

    /// Tells the thread to end.
    fn stop(&self) {
        self.shared.control.lock().stop = true;
        self.shared.wake.notify_all();
    }

    /// Ends the thread and waits for it, which may take as long as a call to the depot.
    pub fn close(&self) {
        self.stop();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Follower {
    /// Does not wait: the thread may be waiting for a depot that hangs, and a caller may hold a lock, such as Python's.
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Follower({:?})", self.state())
    }
}

/// The connection that the depot records events for.
struct Link {
    generation: Arc<Generation>,
    lane: lane::Lane,
}

struct Thread {
    attachment: Arc<Attachment>,
    shared: Arc<Shared>,
    reader: Reader,
    link: Option<Link>,
    followed: Followed,
    /// What to follow once everything reported so far is reported as removed.
    next: Option<Followed>,
    /// Whether another depot is taking over the last one's pool.
    awaits_heir: bool,
    /// Whether the failure to read was logged.
    is_in_trouble: bool,
    /// When all are followed: what is known about each namespace, by its number here.
    known: Vec<KnownNamespace>,
    listed: Option<Instant>,
    refreshed: Instant,
    /// Whether the current walk only searches for what no event reported.
    is_refresh: bool,
}

impl Thread {
    fn new(attachment: Arc<Attachment>, shared: Arc<Shared>) -> Self {
        Self {
            attachment,
            shared,
            reader: Reader::new(FOLLOWED_BLOCKS_MAX),
            link: None,
            followed: Followed::Groups(Vec::new()),
            next: None,
            awaits_heir: false,
            is_in_trouble: false,
            known: Vec::new(),
            listed: None,
            refreshed: Instant::now(),
            is_refresh: false,
        }
    }

    fn run(&mut self) {
        loop {
            let pause = self.step();
            self.publish();
            let mut control = self.shared.control.lock();
            if !pause.is_zero() && !control.stop && control.target.is_none() {
                self.shared.wake.wait_for(&mut control, pause);
            }
            if control.stop {
                return;
            }
        }
    }

    /// Does one thing. Returns how long to wait before the next.
    fn step(&mut self) -> Duration {
        if let Some(target) = self.shared.control.lock().target.take() {
            self.next = Some(target);
        }
        if let Some(target) = self.next.take() {
            self.reader.lost();
            if !self.told_all() {
                // The caller must take the removals first.
                self.next = Some(target);
                return POLL;
            }
            self.retarget(target);
        }
        self.try_step().unwrap_or_else(|error| {
            if !std::mem::replace(&mut self.is_in_trouble, true) {
                tracing::debug!("events cannot be read now: {error}");
            }
            self.listed = None;
            if error.kind() != ErrorKind::NotFound {
                self.unlink();
            }
            POLL
        })
    }

    /// Records that the depot does not answer. While another depot takes over its pool, nothing is reported as removed.
    fn unlink(&mut self) {
        self.awaits_heir |= self.link.take().is_some_and(|link| link.generation.is_handed_over());
        self.awaits_heir &= self.attachment.attached();
        if self.awaits_heir {
            self.reader.suspend();
        } else {
            self.reader.lost();
        }
    }

    /// Reports pending removals. Returns whether none is left.
    fn told_all(&mut self) -> bool {
        let room = self.room();
        self.reader.view.settle(room)
    }

    fn retarget(&mut self, target: Followed) {
        self.reader.forget_groups();
        self.known.clear();
        self.listed = None;
        self.shared.names.lock().clear();
        if let Followed::Groups(groups) = &target {
            groups.iter().for_each(|group| {
                self.reader.add_group(group.len());
            });
        }
        self.followed = target;
    }

    fn room(&self) -> usize {
        FOLLOWED_CHANGES_MAX.saturating_sub(self.shared.out.lock().len() + self.reader.view.out.len())
    }

    /// Publishes changes and counters for the caller.
    fn publish(&mut self) {
        let view = &mut self.reader.view;
        self.shared.out.lock().extend(view.out.drain(..));
        let (blocks, left_out) = (view.blocks() as u64, view.left_out);
        let is_in_step = self.reader.is_in_step();
        let (gaps, walks) = (self.reader.gaps, self.reader.walks);
        *self.shared.state.lock() = FollowerState { is_in_step, blocks, left_out, gaps, walks };
    }

    fn try_step(&mut self) -> Result<Duration> {
        if self.link.as_ref().is_some_and(|link| link.generation.is_lost()) {
            return Err(Error::new(ErrorKind::Unavailable, "the depot was lost"));
        }
        if !self.told_all() {
            return Ok(POLL);
        }
        self.list_if_due()?;
        let room = self.room();
        match self.reader.next(room) {
            Next::Full => Ok(POLL),
            Next::Begin => self.begin(),
            Next::Events(after) => self.events(after),
            Next::Piece { space, place, from } => self.piece(space, place, from),
        }
    }

    fn begin(&mut self) -> Result<Duration> {
        let request = Request::Events { namespaces: Vec::new(), after: None };
        let Response::Followed { upto, places } = self.call(request)? else { return Err(lane::unexpected()) };
        let numbers = numbered(&mut self.shared.places.lock(), places);
        self.reader.followed(upto, numbers);
        self.awaits_heir = false;
        Ok(Duration::ZERO)
    }

    fn events(&mut self, after: u64) -> Result<Duration> {
        let (spaces, namespaces): (Vec<usize>, Vec<NamespaceHandle>) = self.handles()?.into_iter().unzip();
        let answer = self.call(Request::Events { namespaces, after: Some(after) })?;
        let Response::Events { upto, is_gap, has_more, ids, events } = answer else {
            return Err(lane::unexpected());
        };
        self.is_in_trouble = false;
        self.reader.events(&spaces, &ids, &unpack(&events)?, upto, is_gap, has_more);
        if is_gap {
            self.is_refresh = false;
        }
        if has_more || (self.reader.is_walking() && !self.is_refresh) {
            return Ok(Duration::ZERO);
        }
        if self.reader.is_walking() {
            return Ok(REFRESH_PAUSE);
        }
        if self.refreshed.elapsed() >= REFRESH {
            self.is_refresh = true;
            self.refreshed = Instant::now();
            self.reader.refresh();
        } else {
            self.is_refresh = false;
        }
        Ok(POLL)
    }

    fn piece(&mut self, space: usize, place: u8, from: u64) -> Result<Duration> {
        let namespace = self.handle(space)?;
        let answer = self.call(Request::Snapshot { namespace, place, from })?;
        let Response::Snapshot { id, hashes, next } = answer else { return Err(lane::unexpected()) };
        let hashes = hashes.as_chunks::<16>().0.iter().map(|hash| BlockHash(*hash));
        self.reader.piece(id, hashes, next);
        self.refreshed = Instant::now();
        Ok(Duration::ZERO)
    }

    /// Returns the depot's number of a namespace.
    fn handle(&self, space: usize) -> Result<NamespaceHandle> {
        let found = self.handles()?.into_iter().find(|(other, _)| *other == space);
        found
            .map(|(_, handle)| handle)
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "the depot does not know this namespace any more"))
    }

    /// Returns the depot's numbers of all namespaces that are followed. Fails while one is not open yet.
    fn handles(&self) -> Result<Vec<(usize, NamespaceHandle)>> {
        match &self.followed {
            Followed::All => {
                let alive = self.known.iter().enumerate().filter(|(_, known)| known.handle != GONE);
                Ok(alive.map(|(space, known)| (space, known.handle)).collect())
            }
            Followed::Groups(groups) => {
                let generation = match &self.link {
                    Some(link) => Arc::clone(&link.generation),
                    None => self.attachment.generation()?,
                };
                let specs = groups.iter().flatten().enumerate();
                let handle = |(space, spec): (usize, &Arc<NamespaceSpec>)| {
                    let missing = |_| Error::new(ErrorKind::NotFound, "a namespace is not open yet");
                    Ok((space, self.attachment.handle(&generation, spec).map_err(missing)?))
                };
                specs.map(handle).collect()
            }
        }
    }

    /// Searches for namespaces that are new, or that the depot has forgotten.
    fn list_if_due(&mut self) -> Result<()> {
        if !matches!(self.followed, Followed::All) || self.listed.is_some_and(|at| at.elapsed() < LIST) {
            return Ok(());
        }
        let (mut found, mut after) = (HashMap::new(), None);
        loop {
            let Response::Namespaces(some) = self.call(Request::Namespaces { after })? else {
                return Err(lane::unexpected());
            };
            let Some(last) = some.last() else { break };
            after = Some(last.handle);
            found.extend(some.iter().map(|known| (known.root, *known)));
        }
        for (space, known) in self.known.iter_mut().enumerate() {
            let handle = found.remove(&known.root).map_or(GONE, |now| now.handle);
            if handle == GONE && known.handle != GONE {
                self.reader.space_lost(space);
            } else if handle != GONE && known.handle == GONE {
                self.reader.walk_over(space);
            }
            known.handle = handle;
        }
        let mut new: Vec<KnownNamespace> = found.into_values().collect();
        new.sort_unstable_by_key(|known| known.handle);
        for known in new {
            if self.known.len() == NAMESPACES_MAX {
                break;
            }
            self.reader.add_group(1);
            self.known.push(known);
            self.shared.names.lock().push(NamespaceId(known.root));
        }
        self.listed = Some(Instant::now());
        Ok(())
    }

    /// Makes a request on the follower's own connection.
    fn call(&mut self, request: Request<'_>) -> Result<Response> {
        let attachment = &self.attachment;
        if self.link.is_none() {
            let generation = attachment.generation()?;
            let lane = attachment.lane_of_its_own(&generation)?;
            self.link = Some(Link { generation, lane });
        }
        let Some(link) = &mut self.link else { return Err(lane::unexpected()) };
        let named = request.followed();
        let generation = Arc::clone(&link.generation);
        let outcome = link.lane.call(request, Instant::now() + CALL);
        if link.lane.is_handed_over_after(&outcome) {
            attachment.hands_over(&generation);
        }
        generation.checked(&named, outcome?)
    }
}

/// Returns a number for each place of a depot: its position among the names of all places of all depots so far. So a
/// reported number never changes its meaning.
fn numbered(known: &mut Vec<String>, places: Vec<String>) -> Vec<u8> {
    let mut numbers = Vec::with_capacity(places.len());
    for name in places {
        let is_it = |&(at, other): &(usize, &String)| *other == name && !numbers.contains(&(at as u8));
        let at = known.iter().enumerate().find(is_it).map(|(at, _)| at);
        let at = at.unwrap_or_else(|| {
            known.push(name);
            known.len() - 1
        });
        numbers.push(u8::try_from(at).unwrap_or(u8::MAX));
    }
    numbers
}

/// Stands for the number of a namespace that the depot does not know now.
const GONE: NamespaceHandle = NamespaceHandle::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_s_number_means_the_same_at_the_next_depot() {
        let places = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let mut known = Vec::new();
        assert_eq!(numbered(&mut known, places(&["pool", "Posix", "Posix"])), [0, 1, 2]);
        assert_eq!(numbered(&mut known, places(&["pool", "Slab", "Posix"])), [0, 3, 1]);
        assert_eq!(known, ["pool", "Posix", "Posix", "Slab"]);
    }
}
