//! Namespaces that come and go: more than the depot may know at a time, clients that open them, and resets that tiers
//! store late.

use std::sync::Arc;

use kvdepot_core::machine::{Command, Event, NamespaceHandle, Request, Reserve};
use kvdepot_core::{BlockHash, BlockKey, LeaseId, NamespaceId};

use crate::asked::Asked;
use crate::client::{NO_LEASE, Wish};
use crate::fail::{Fail, Rule, fail};
use crate::plan::Feature;
use crate::rng::Rng;
use crate::specs;
use crate::work::Work;
use crate::world::World;

impl World {
    /// Returns the number of namespaces of the run.
    pub(crate) fn namespaces(&self) -> usize {
        if self.has(Feature::Forgetting) { specs::all().len() } else { specs::LASTING }
    }

    /// Returns how many namespaces the depot may know at a time.
    pub(crate) fn namespaces_max(&self) -> usize {
        if self.has(Feature::Forgetting) { self.plan.shape.namespaces_max } else { specs::LASTING }
    }

    /// Returns a namespace of blocks, not of values.
    pub(crate) fn space_of_blocks(&mut self) -> usize {
        if self.has(Feature::Forgetting) && self.rng.chance(25) {
            return self.rng.between(specs::LASTING, specs::all().len() - 1);
        }
        self.rng.below(specs::VALUES)
    }

    /// Makes the depot know a namespace, usually by opening it if it is unknown. Returns whether the depot knows it.
    pub(crate) fn know(&mut self, client: Option<usize>, space: usize) -> Result<bool, Fail> {
        if !self.spaces[space].known && self.rng.chance(70) {
            self.open(client, space)?;
        }
        Ok(self.spaces[space].known)
    }

    /// Opens a namespace for a client, or for the depot itself. The depot may refuse it.
    pub(crate) fn open(&mut self, client: Option<usize>, number: usize) -> Result<(), Fail> {
        let (spec, was_known) = (&specs::all()[number], self.spaces[number].known);
        let mut stored = self.epoch_in_tiers(spec.root());
        // A known namespace is opened by its number.
        let mut use_known = was_known && self.rng.chance(50);
        let was_provisional = was_known && self.spaces[number].provisional;
        if was_provisional && !use_known && self.silent_tier(number).is_none() {
            // Opening it says that all tiers have stored its epoch, so one that lags has to do that first.
            stored = stored.max(self.spaces[number].epoch);
            use_known = !self.store_epoch(spec.root(), stored);
        }
        let silent = if use_known { None } else { self.silent_tier(number) };
        let request = match silent {
            _ if use_known => Request::UseNamespace { namespace: self.spaces[number].handle },
            Some(silent) => {
                let others = self.tiers.iter().enumerate().filter(|&(tier, _)| tier != silent);
                let epoch = others.map(|(_, tier)| tier.epoch(spec.root())).max().unwrap_or(0);
                let provisional = self.unused_id(0xDD);
                self.provisional_ids.insert(provisional);
                Request::OpenProvisionally { spec: Arc::clone(spec), epoch, provisional }
            }
            None => Request::OpenNamespace { spec: Arc::clone(spec), epoch: stored },
        };
        self.opened.clear();
        let leases = self.machine.leases_granted();
        self.request_of(client, request, Asked::Use)?;
        let Some(opened) = self.opened.pop() else { return Ok(()) };
        let provisional = self.provisional_ids.contains(&opened.id);
        let space = &mut self.spaces[number];
        if !self.tiers.is_empty() && opened.epoch < space.epoch && !provisional {
            return fail(
                Rule::Stale,
                format!("epoch {} is over, and {} came back with its namespace", space.epoch, opened.epoch),
            );
        }
        if opened.id != space.id {
            // Without a tier epochs start again: their earlier contents are lost.
            if self.tiers.is_empty() {
                self.model.forget_namespace(opened.id, leases);
            }
            let id = std::mem::replace(&mut space.id, opened.id);
            space.earlier.push(id);
            space.earlier.retain(|&id| id != opened.id);
            space.leases_before = leases;
        }
        (space.handle, space.epoch, space.known) = (opened.handle, opened.epoch.max(space.epoch), true);
        space.unstored &= !was_provisional || provisional;
        space.provisional = provisional;
        if let Some(client) = client {
            self.clients[client].uses.insert(number);
            if self.clients[client].uses.len() > self.share() {
                return fail(Rule::Caps, "a client uses more namespaces than its share");
            }
        }
        if !was_known {
            self.reached.insert("opened again");
        }
        Ok(())
    }

    /// Returns an id that no epoch has, nor another call has returned.
    fn unused_id(&mut self, fill: u8) -> NamespaceId {
        let mut id = [fill; 16];
        id[..8].copy_from_slice(&self.number().to_le_bytes());
        NamespaceId(id)
    }

    /// Returns the highest epoch of a namespace that any tier has.
    pub(crate) fn epoch_in_tiers(&self, root: NamespaceId) -> u32 {
        self.tiers.iter().map(|tier| tier.epoch(root)).max().unwrap_or(0)
    }

    /// Has the tiers that lag store an epoch. Returns whether all have it now.
    fn store_epoch(&mut self, root: NamespaceId, epoch: u32) -> bool {
        self.tiers
            .iter_mut()
            .fold(true, |stored, tier| stored & (tier.epoch(root) >= epoch || tier.set_epoch(root, epoch)))
    }

    /// Draws the tier that does not answer about a namespace, if one does not. A namespace of values is not opened then.
    fn silent_tier(&self, number: usize) -> Option<usize> {
        // Random numbers of its own, so that the plan's do not change.
        let mut rng = Rng::new(self.plan.seed ^ (self.at as u64) << 8 ^ number as u64 ^ 0x51_1E47);
        // Only in some runs, so that others stay as they were.
        let may =
            number != specs::VALUES && self.tiers.len() > 1 && self.has(Feature::Forgetting) && !self.calm;
        let is_such_a_run = Rng::new(self.plan.seed ^ 0x51_1E4A).chance(50);
        (may && is_such_a_run && rng.chance(40)).then(|| rng.below(self.tiers.len()))
    }

    /// The silent tiers answer about a namespace that the depot has opened provisionally.
    pub(crate) fn settle_provisional(&mut self, number: usize) -> Result<(), Fail> {
        let (space, leases) = (&self.spaces[number], self.machine.leases_granted());
        if !(space.known && space.provisional) {
            return Ok(());
        }
        let (namespace, root, acknowledged) = (space.handle, space.root, space.acknowledged);
        let epoch = self.epoch_in_tiers(root).max(space.epoch);
        let stored = self.store_epoch(root, epoch);
        self.opened.clear();
        self.request_of(None, Request::FollowEpoch { namespace, epoch, stored }, Asked::Done)?;
        let Some(opened) = self.opened.pop().filter(|opened| opened.epoch >= acknowledged) else {
            return fail(
                Rule::Stale,
                format!("epoch {acknowledged} was acknowledged, and an earlier one came"),
            );
        };
        let provisional = self.provisional_ids.contains(&opened.id);
        if provisional == stored {
            return fail(
                Rule::Replies,
                format!("all tiers have answered: {stored}, provisional: {provisional}"),
            );
        }
        let space = &mut self.spaces[number];
        (space.epoch, space.unstored, space.provisional) = (opened.epoch, !stored, provisional);
        if stored {
            let id = std::mem::replace(&mut space.id, opened.id);
            space.earlier.push(id);
            space.leases_before = leases;
            self.reached.insert("provisional settled");
        }
        Ok(())
    }

    /// Returns how many namespaces one client may use.
    fn share(&self) -> usize {
        if self.has(Feature::Forgetting) { self.namespaces_max().div_ceil(2) } else { usize::MAX }
    }

    /// Checks that the depot had a reason to refuse a client a namespace.
    pub(crate) fn use_refused(&self, client: Option<usize>) -> Result<(), Fail> {
        let greedy = client.is_some_and(|client| self.clients[client].uses.len() >= self.share());
        if greedy || self.machine.gauges().namespaces >= self.namespaces_max() {
            return Ok(());
        }
        fail(Rule::Replies, "a namespace was not opened although there is room for it")
    }

    pub(crate) fn use_namespace(&mut self) -> Result<(), Fail> {
        let (client, space) = (self.someone(), self.rng.below(self.spaces.len()));
        self.settle_provisional(self.at % self.spaces.len())?;
        if self.rng.chance(25) {
            return self.close_namespace(client, space);
        }
        self.open(Some(client), space)
    }

    /// A client closes a namespace, whether it uses it or not, and whatever it has in flight there.
    fn close_namespace(&mut self, client: usize, space: usize) -> Result<(), Fail> {
        let namespace = self.spaces[space].handle;
        self.request_of(Some(client), Request::CloseNamespace { namespace }, Asked::Done)?;
        if self.clients.get_mut(client).is_some_and(|client| client.uses.remove(&space)) {
            self.reached.insert("closed");
        }
        Ok(())
    }

    /// Sends a request with the number that a forgotten namespace had.
    pub(crate) fn ask_as_before(
        &mut self,
        client: usize,
        space: usize,
        hashes: Vec<BlockHash>,
    ) -> Result<(), Fail> {
        let namespace = self.spaces[space].handle;
        let request = match self.rng.below(4) {
            0 => Request::Reserve { namespace, id: None, hashes, how: Reserve::Block, runs_max: usize::MAX },
            1 => Request::Prefetch { namespace, blocks: Vec::new(), deadline: self.now },
            2 => Request::FollowEpoch { namespace, epoch: 9, stored: true },
            _ => Request::Load {
                namespace,
                id: None,
                hashes,
                fetch_deadline: self.now + 1_000_000_000,
                last: true,
                runs_max: usize::MAX,
                in_place: false,
            },
        };
        self.request_of(Some(client), request, Asked::Forgotten)?;
        Ok(())
    }

    /// Checks that a forgotten namespace was unused, and that nothing was in flight in it.
    pub(crate) fn check_forgotten(&mut self, handle: NamespaceHandle) -> Result<(), Fail> {
        let known = self.spaces.iter().position(|space| space.known && space.handle == handle);
        let Some(number) = known else {
            return fail(Rule::Forgetting, format!("namespace {handle} is forgotten, and was not known"));
        };
        let id = self.spaces[number].id;
        // A slot that a client has been copying since before a take-over belongs to no namespace any more.
        let of_it = |key: &BlockKey, lease: LeaseId| key.namespace == id && lease != NO_LEASE;
        let why = if self.clients.iter().any(|client| client.uses.contains(&number)) {
            Some("a client uses it")
        } else if self.clients.iter().any(|client| {
            client.fills.iter().any(|fill| of_it(&fill.key, fill.lease))
                || client.readings.iter().any(|reading| of_it(&reading.key, reading.lease))
        }) {
            Some("a client copies blocks of it")
        } else if self.is_commanded(id) {
            Some("a tier has not ended a command of it")
        } else if self.spaces[number].unstored {
            Some("a tier has not stored its epoch")
        } else {
            None
        };
        if let Some(why) = why {
            return fail(Rule::Forgetting, format!("namespace {handle} is forgotten, and {why}"));
        }
        self.spaces[number].known = false;
        self.reached.insert("forgotten");
        Ok(())
    }

    /// Returns whether a tier has an uncompleted read, write or removal of a block of a namespace.
    fn is_commanded(&self, id: NamespaceId) -> bool {
        let running = self.running.iter().any(|running| match &running.work {
            Work::Read { key, .. }
            | Work::Lease { key, .. }
            | Work::Write { key, .. }
            | Work::Remove { key, .. } => key.namespace == id,
            Work::Probe { .. } => false,
        });
        running
            || self.outbox.iter().any(|(_, command)| match command {
                Command::Read { key, .. }
                | Command::Lease { key, .. }
                | Command::Write { key, .. }
                | Command::Remove { key, .. } => key.namespace == id,
                Command::Probe { .. } | Command::Touch { .. } | Command::EndLeases { .. } => false,
            })
    }

    /// Resets a namespace as an engine does: the pool first, then every tier. A tier that cannot store it is told again
    /// later.
    pub(crate) fn reset(&mut self) -> Result<(), Fail> {
        let number = self.rng.below(self.spaces.len());
        self.reset_one(number)
    }

    fn reset_one(&mut self, number: usize) -> Result<(), Fail> {
        if !self.know(None, number)? {
            return Ok(());
        }
        self.settle_provisional(number)?;
        if self.spaces[number].provisional {
            return Ok(());
        }
        let (namespace, epoch) = (self.spaces[number].handle, self.spaces[number].epoch + 1);
        let leases = self.machine.leases_granted();
        let (root, earlier) = (self.spaces[number].root, self.spaces[number].id);
        let by_advance = self.rng.chance(50);
        if by_advance {
            let provisional = self.unused_id(0xEE);
            self.request_of(None, Request::BeginAdvance { namespace, provisional }, Asked::Done)?;
        } else {
            self.request_of(None, Request::FollowEpoch { namespace, epoch, stored: false }, Asked::Done)?;
        }
        let mut stored = true;
        for tier in &mut self.tiers {
            stored &= tier.set_epoch(root, epoch);
        }
        if by_advance {
            self.request_of(None, Request::EndAdvance { namespace, epoch, stored }, Asked::Done)?;
        } else if stored {
            self.request_of(None, Request::FollowEpoch { namespace, epoch, stored }, Asked::Done)?;
        }
        let Some(opened) = self.opened.pop().filter(|opened| opened.epoch == epoch) else {
            return fail(Rule::Replies, "a reset without a new epoch");
        };
        let space = &mut self.spaces[number];
        space.earlier.push(earlier);
        (space.epoch, space.id, space.leases_before) = (epoch, opened.id, leases);
        space.unstored = !stored;
        if stored {
            space.acknowledged = epoch;
        }
        self.reached.insert("reset");
        Ok(())
    }

    /// Resets the namespaces that are closed in a tier, so that they are usable again.
    pub(crate) fn reset_closed(&mut self) -> Result<(), Fail> {
        if self.machine.gauges().removals_closed == 0 {
            return Ok(());
        }
        self.reached.insert("tier closed");
        for number in 0..self.spaces.len() {
            if self.spaces[number].known {
                self.reset_one(number)?;
            }
        }
        self.settle_down()?;
        for _ in 0..300 {
            if self.machine.gauges().removals_closed == 0 {
                break;
            }
            self.feed_and_answer(Event::Tick)?;
        }
        match self.machine.gauges().removals_closed {
            0 => Ok(()),
            closed => fail(Rule::Progress, format!("all were reset, and {closed} are closed")),
        }
    }

    /// Sends tiers the epochs again that they have not stored.
    pub(crate) fn store_epochs(&mut self) -> Result<(), Fail> {
        for number in 0..self.spaces.len() {
            let space = &self.spaces[number];
            if !space.unstored {
                continue;
            }
            if space.provisional {
                self.settle_provisional(number)?;
                continue;
            }
            let (root, epoch, namespace) = (space.root, space.epoch, space.handle);
            let stored = self.store_epoch(root, epoch);
            if stored {
                self.spaces[number].unstored = false;
                self.spaces[number].acknowledged = epoch;
                let request = Request::FollowEpoch { namespace, epoch, stored };
                self.request_of(None, request, Asked::Done)?;
            }
        }
        Ok(())
    }

    /// Tells a depot that has taken over a pool which epochs tiers have not stored.
    pub(crate) fn tell_unstored(&mut self, before: &[bool]) -> Result<(), Fail> {
        for (number, &unstored) in before.iter().enumerate() {
            let space = &mut self.spaces[number];
            let (namespace, epoch) = (space.handle, space.epoch);
            if unstored && self.tiers.iter().any(|tier| tier.epoch(space.root) < epoch) {
                space.unstored = true;
                let request = Request::FollowEpoch { namespace, epoch, stored: false };
                self.request_of(None, request, Asked::Done)?;
            }
        }
        Ok(())
    }

    /// Makes the depot know all namespaces of a claim, while there are no other requests.
    pub(crate) fn know_all(&mut self, wish: &Wish) -> Result<(), Fail> {
        self.store_epochs()?;
        self.clients.iter_mut().for_each(|client| client.alive = false);
        while !self.clients.is_empty() {
            self.end_killed()?;
        }
        // The ones that were opened here already are the last to be forgotten.
        for _ in 0..3 {
            for space in wish.ranks() {
                if !self.spaces[space].known {
                    self.open(None, space)?;
                    self.settle_down()?;
                }
            }
        }
        match wish.ranks().iter().find(|&&space| !self.spaces[space].known) {
            None => Ok(()),
            Some(space) => fail(Rule::Forgetting, format!("nobody uses any, and {space} cannot be opened")),
        }
    }
}
