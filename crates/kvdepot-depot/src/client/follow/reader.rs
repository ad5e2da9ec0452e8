//! The state machine that keeps a follower in step with a depot: what to request next, and what an answer means. No I/O.
//!
//! A *walk* reads all blocks of some namespaces, in pieces. It begins after the reader has a sequence number, and events are
//! read between its pieces. A piece is at least as new as the events before it. So if the last event of a block comes after
//! the piece, the event is right, and otherwise the piece is. When the walk is over and the reader has caught up, every
//! block that neither has confirmed is gone.

use std::collections::{BTreeSet, VecDeque};

use kvdepot_core::BlockHash;

use super::view::View;
use crate::events::Event;

/// The next request to the depot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Begin to follow.
    Begin,
    /// Events after this sequence number.
    Events(u64),
    /// A piece of the list of a namespace's blocks in a place.
    Piece { space: usize, place: u8, from: u64 },
    /// None: the caller must take changes before more is read.
    Full,
}

#[derive(Debug, Default)]
struct Walk {
    /// What is left: namespace, place, and position to continue at.
    todo: VecDeque<(usize, u8, u64)>,
    spaces: Vec<usize>,
    /// Whether to read events before the next piece.
    events_next: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) view: View,
    /// Current id of each namespace, as far as it is known.
    ids: Vec<Option<[u8; 16]>>,
    /// The view's number of each of the depot's places.
    places: Vec<u8>,
    after: Option<u64>,
    walk: Option<Walk>,
    /// Namespaces of the next walk.
    to_walk: Vec<usize>,
    /// Namespaces that the depot does not know now, which walks leave out.
    gone: BTreeSet<usize>,
    /// Whether the last answer had all remaining events.
    caught_up: bool,
    /// Number of completed walks.
    pub(crate) walks: u64,
    /// Number of times that events were missed.
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

    /// Adds a group of namespaces to follow. Returns the number of the first one.
    pub(crate) fn add_group(&mut self, namespaces: usize) -> usize {
        let first = self.view.add_group(namespaces);
        self.ids.resize(self.view.spaces(), None);
        self.to_walk.extend(first..first + namespaces);
        first
    }

    /// Returns whether everything reported so far is true, as far as the depot has answered.
    pub(crate) fn is_in_step(&self) -> bool {
        self.after.is_some() && self.walk.is_none() && self.to_walk.is_empty() && self.caught_up
    }

    /// Returns whether a walk is in progress or due.
    pub(crate) fn is_walking(&self) -> bool {
        self.walk.is_some() || !self.to_walk.is_empty()
    }

    /// Walks over everything again, which finds what no event reported.
    pub(crate) fn refresh(&mut self) {
        self.to_walk = (0..self.view.spaces()).filter(|space| !self.gone.contains(space)).collect();
    }

    /// Records that the depot does not answer any more: no block can be read.
    pub(crate) fn lost(&mut self) {
        self.suspend();
        (0..self.view.spaces()).for_each(|space| self.view.clear(space));
        self.ids.fill(None);
    }

    /// Records that another depot takes over the pool. What was reported stays, and is compared with that depot later.
    pub(crate) fn suspend(&mut self) {
        self.after = None;
        self.walk = None;
        self.caught_up = false;
        self.refresh();
    }

    /// Records that the depot does not know a namespace any more.
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

    /// Records that the depot knows a lost namespace again.
    pub(crate) fn walk_over(&mut self, space: usize) {
        self.gone.remove(&space);
        self.to_walk.push(space);
    }

    /// Forgets all groups. Call it after `lost`, when all removals have been reported.
    pub(crate) fn forget_groups(&mut self) {
        self.view.forget_groups();
        self.ids.clear();
        self.to_walk.clear();
        self.gone.clear();
        self.walk = None;
    }

    /// Returns the next request. `room` is the number of changes that the caller can still hold.
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

    /// Handles the answer to `Begin`. `places` are the view's numbers of the depot's places.
    pub(crate) fn followed(&mut self, upto: u64, places: Vec<u8>) {
        (self.after, self.places) = (Some(upto), places);
    }

    /// Handles the answer to `Events`. `ids`, and the namespaces of events, refer to `spaces`.
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

    /// Handles the answer to `Piece`.
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

    /// Compares a namespace's id. If it was reset, all its blocks are gone, and a new walk reads it.
    fn note_id(&mut self, space: usize, id: [u8; 16]) {
        if self.ids[space].is_some_and(|known| known != id) {
            self.forget(space);
            self.to_walk.push(space);
        }
    }
}
