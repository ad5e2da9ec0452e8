//! How a follower keeps in step with a depot, without I/O: what to ask next, and what an answer means.
//!
//! A *walk* reads all that the depot has of some namespaces, in pieces. It begins after the reader has a sequence number,
//! and events are read on between its pieces. A piece is at least as new as the events before it, so for a block whose last
//! event comes later that event decides, and otherwise the piece is right. When the walk is over and the reader has caught
//! up, every block that neither confirmed is gone.

use std::collections::{BTreeSet, VecDeque};

use kvdepot_core::BlockHash;

use super::view::View;
use crate::events::Event;

/// What to ask the depot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// To follow from now on.
    Begin,
    /// Events after this sequence number.
    Events(u64),
    /// A piece of what a place has of a namespace.
    Piece { space: usize, place: u8, from: u64 },
    /// The caller is to take what was told before more is read.
    Full,
}

#[derive(Debug, Default)]
struct Walk {
    /// What is left: namespace, place, where to go on.
    todo: VecDeque<(usize, u8, u64)>,
    spaces: Vec<usize>,
    /// Whether events come next: they are read between two pieces.
    events_next: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) view: View,
    /// Current id of each namespace, as far as it is known.
    ids: Vec<Option<[u8; 16]>>,
    /// What the view calls each of the depot's places.
    places: Vec<u8>,
    after: Option<u64>,
    walk: Option<Walk>,
    /// Namespaces to be walked over next.
    to_walk: Vec<usize>,
    /// Namespaces that the depot does not know now. They are not walked over.
    gone: BTreeSet<usize>,
    /// Whether the last answer had all events there were.
    caught_up: bool,
    /// Walks that were completed.
    pub(crate) walks: u64,
    /// Times that events were missed.
    pub(crate) gaps: u64,
}

impl Reader {
    pub(crate) fn new(blocks_max: usize) -> Self {
        Self {
            view: View::new(blocks_max),
            ids: Vec::new(),
            places: Vec::new(),
            after: None,
            walk: None,
            to_walk: Vec::new(),
            gone: BTreeSet::new(),
            caught_up: false,
            walks: 0,
            gaps: 0,
        }
    }

    /// Follows a group of namespaces, too. Returns the number of the first.
    pub(crate) fn add_group(&mut self, namespaces: usize) -> usize {
        let first = self.view.add_group(namespaces);
        self.ids.resize(self.view.spaces(), None);
        self.to_walk.extend(first..first + namespaces);
        first
    }

    /// Whether everything that was told is true now, as far as the depot has said.
    pub(crate) fn is_in_step(&self) -> bool {
        self.after.is_some() && self.walk.is_none() && self.to_walk.is_empty() && self.caught_up
    }

    /// Whether a walk is under way or to begin.
    pub(crate) fn is_walking(&self) -> bool {
        self.walk.is_some() || !self.to_walk.is_empty()
    }

    /// Walks over everything again, which finds what no event told.
    pub(crate) fn refresh(&mut self) {
        self.to_walk = (0..self.view.spaces()).filter(|space| !self.gone.contains(space)).collect();
    }

    /// The depot does not answer any more: nothing can be read.
    pub(crate) fn lost(&mut self) {
        self.suspend();
        (0..self.view.spaces()).for_each(|space| self.view.clear(space));
        self.ids.fill(None);
    }

    /// Another depot takes the pool over: what was told stays, and is compared with what that depot has.
    pub(crate) fn suspend(&mut self) {
        self.after = None;
        self.walk = None;
        self.caught_up = false;
        self.refresh();
    }

    /// A namespace is not known to the depot any more.
    pub(crate) fn space_lost(&mut self, space: usize) {
        self.gone.insert(space);
        self.forget(space);
    }

    fn forget(&mut self, space: usize) {
        self.view.clear(space);
        self.ids[space] = None;
        self.to_walk.retain(|other| *other != space);
        if let Some(walk) = &mut self.walk {
            walk.todo.retain(|(other, ..)| *other != space);
            walk.spaces.retain(|other| *other != space);
        }
    }

    /// A namespace that was lost is known again.
    pub(crate) fn walk_over(&mut self, space: usize) {
        self.gone.remove(&space);
        self.to_walk.push(space);
    }

    /// Forgets all groups, once `lost` was called and everything was told.
    pub(crate) fn forget_groups(&mut self) {
        self.view.forget_groups();
        self.ids.clear();
        self.to_walk.clear();
        self.gone.clear();
        self.walk = None;
    }

    /// What to ask next. `room`: how many changes the caller can still take.
    pub(crate) fn next(&mut self, room: usize) -> Next {
        if !self.view.settle(room) || room == 0 {
            self.caught_up = false;
            return Next::Full;
        }
        let Some(after) = self.after else { return Next::Begin };
        if self.walk.is_none() && !self.to_walk.is_empty() {
            let spaces = std::mem::take(&mut self.to_walk);
            spaces.iter().for_each(|&space| self.view.begin_walk(space));
            let pairs = spaces
                .iter()
                .flat_map(|&space| (0..self.places.len()).map(move |place| (space, place as u8, 0)));
            self.walk = Some(Walk { todo: pairs.collect(), spaces, events_next: false });
        }
        match &mut self.walk {
            Some(walk) if !walk.events_next => match walk.todo.front() {
                Some(&(space, place, from)) => Next::Piece { space, place, from },
                None => Next::Events(after),
            },
            _ => Next::Events(after),
        }
    }

    /// The answer to `Begin`: what the view is to call each of the depot's places.
    pub(crate) fn followed(&mut self, upto: u64, places: Vec<u8>) {
        (self.after, self.places) = (Some(upto), places);
    }

    /// The answer to `Events`: `ids` and the numbers of events are those of `spaces`.
    pub(crate) fn events(
        &mut self,
        spaces: &[usize],
        ids: &[[u8; 16]],
        events: &[Event],
        upto: u64,
        is_gap: bool,
        has_more: bool,
    ) {
        self.after = Some(upto);
        self.caught_up = !has_more;
        for (&space, &id) in spaces.iter().zip(ids) {
            self.note_id(space, id);
        }
        if is_gap {
            self.gaps += 1;
            self.walk = None;
            self.refresh();
        }
        for event in events {
            // Events of a namespace that was reset are ignored until it has been walked over.
            if let Some(&space) = spaces.get(usize::from(event.space))
                && self.ids[space].is_some()
                && let Some(&place) = self.places.get(usize::from(event.place))
            {
                self.view.set(space, place, event.is_stored, event.hash);
            }
        }
        self.end_walk_if_over(has_more);
    }

    fn end_walk_if_over(&mut self, has_more: bool) {
        if let Some(walk) = &mut self.walk {
            walk.events_next = false;
            if walk.todo.is_empty() && !has_more {
                walk.spaces.iter().for_each(|&space| self.view.end_walk(space));
                self.walk = None;
                self.walks += 1;
            }
        }
    }

    /// The answer to `Piece`.
    pub(crate) fn piece(&mut self, id: [u8; 16], hashes: impl Iterator<Item = BlockHash>, next: Option<u64>) {
        let Some((space, place, _)) = self.walk.as_mut().and_then(|walk| walk.todo.pop_front()) else {
            return;
        };
        if self.ids[space].is_some_and(|known| known != id) {
            self.note_id(space, id);
            return;
        }
        self.ids[space] = Some(id);
        let Some(&place) = self.places.get(usize::from(place)) else { return };
        hashes.for_each(|hash| self.view.set(space, place, true, hash));
        if let Some(walk) = &mut self.walk {
            walk.events_next = true;
            if let Some(next) = next {
                walk.todo.push_front((space, place, next));
            }
        }
    }

    /// A namespace that was reset has none of its blocks any more, and is walked over again.
    fn note_id(&mut self, space: usize, id: [u8; 16]) {
        if self.ids[space].is_some_and(|known| known != id) {
            self.forget(space);
            self.to_walk.push(space);
        }
    }
}
