//! The world of a run: the machine, its commands and questions, and everything that waits for it.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{
    Ask, Command, Effects, Event, Job, Location, Machine, NamespaceHandle, Nanos, Opened, PoolConfig,
    RemovalId, Reply, Request, TierSet, Token,
};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId, eviction};

use crate::asked::{Asked, Waiting};
use crate::chosen::Wanted;
use crate::client::{Client, Hold, NO_HANDLE};
use crate::fail::{Fail, Rule, fail};
use crate::given::{Given, Placed};
use crate::interrupted::Interrupted;
use crate::ledger::SimLedger;
use crate::memory::Memory;
use crate::mistakes::Mistake;
use crate::model::{Model, name};
use crate::plan::{Feature, Plan, region_bytes};
use crate::rng::Rng;
use crate::specs;
use crate::tier::SimTier;
use crate::work::Running;

/// Time after which a write counts as hung.
pub(crate) const WRITE_PATIENCE: Nanos = 30_000_000_000;

/// A namespace of the run.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) root: NamespaceId,
    pub(crate) handle: NamespaceHandle,
    pub(crate) epoch: u32,
    pub(crate) id: NamespaceId,
    /// Ids that keys carried in epochs that this depot has left.
    pub(crate) earlier: Vec<NamespaceId>,
    /// Newest epoch that all tiers have acknowledged.
    pub(crate) acknowledged: u32,
    /// Number of leases granted when the current epoch began.
    pub(crate) leases_before: u64,
    pub(crate) pages: usize,
    /// Whether the depot knows it now. If not, `handle` is its former number.
    pub(crate) known: bool,
    /// Whether a tier has not stored its epoch yet.
    pub(crate) unstored: bool,
    /// Whether a tier has not answered about it, so that the depot has opened it provisionally.
    pub(crate) provisional: bool,
}

/// An answer to a question, in flight.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) ask: Ask,
    pub(crate) locations: Vec<Location>,
}

/// The state of a run.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) mistake: Option<Mistake>,
    pub(crate) rng: Rng,
    /// Draws which blocks tiers report that they will evict.
    pub(crate) cooling: Rng,
    /// Draws the tiers of claims.
    pub(crate) choices: Rng,
    pub(crate) machine: Machine,
    pub(crate) now: Nanos,
    /// The current operation.
    pub(crate) at: usize,
    /// Whether faults are disabled now.
    pub(crate) calm: bool,
    /// Whether the tier that leases blocks is switched off.
    pub(crate) lender_off: bool,
    /// Number of leases granted when this tier lost its memory, if it did.
    pub(crate) leases_before_loss: Option<u64>,
    pub(crate) memory: Memory,
    pub(crate) tiers: Vec<SimTier>,
    pub(crate) model: Model,
    pub(crate) spaces: Vec<Space>,
    pub(crate) clients: Vec<Client>,
    pub(crate) outbox: VecDeque<(u64, Command)>,
    pub(crate) commands_ever: u64,
    /// When each write was ordered.
    pub(crate) write_times: BTreeMap<u64, Nanos>,
    /// Ids under which namespaces were opened provisionally: tiers must never hear of them.
    pub(crate) provisional_ids: HashSet<NamespaceId>,
    /// Bytes that no tier had after the previous step.
    not_saved: u64,
    /// Whether slots of an earlier depot are being adopted. They were within the share then, or their client had
    /// stopped.
    pub(crate) adopting: bool,
    pub(crate) running: Vec<Running>,
    /// Reported ends of removals.
    pub(crate) removals_ended: Vec<(RemovalId, usize, BlockKey)>,
    pub(crate) forgotten: Vec<(usize, Vec<BlockKey>, bool)>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) interrupted: Interrupted,
    pub(crate) answers: Vec<Answer>,
    pub(crate) waiting: BTreeMap<Token, Waiting>,
    pub(crate) presence: HashSet<BlockKey>,
    /// What a next depot would find after a crash that keeps the pool.
    pub(crate) ledger: SimLedger,
    /// The hold on the pool, after a crash that clients have survived.
    pub(crate) hold: Option<Hold>,
    pub(crate) opened: Vec<Opened>,
    /// What the tiers were given.
    pub(crate) given: Given,
    /// What requests wanted from which tiers.
    pub(crate) wanted: Wanted,
    /// State that the tiers' placements depend on.
    pub(crate) placed: Placed,
    /// Blocks that a walk over the pool has found.
    pub(crate) listed: Vec<BlockKey>,
    pub(crate) next_listed: Option<usize>,
    /// The last request, and its reply.
    pub(crate) asking: Token,
    pub(crate) last_reply: Option<kvdepot_core::Result<kvdepot_core::machine::Reply>>,
    pub(crate) numbers: u64,
    pub(crate) steps: usize,
    pub(crate) trace: Option<Vec<String>>,
    pub(crate) fingerprint: u64,
    /// Kinds of events that happened, so that tests see that the run is not idle.
    pub(crate) reached: BTreeSet<&'static str>,
}

impl World {
    pub(crate) fn new(plan: &Plan, mistake: Option<Mistake>, trace: bool) -> Self {
        let shape = &plan.shape;
        let mut tiers: Vec<SimTier> = shape
            .tiers
            .iter()
            .map(|&tier| {
                let shy = tier.shy && plan.features.has(Feature::ShyTiers);
                SimTier::new(crate::plan::TierShape { shy, ..tier })
            })
            .collect();
        tiers.iter_mut().for_each(|tier| tier.loses_epochs = mistake == Some(Mistake::EpochLost));
        Self {
            plan: plan.clone(),
            mistake,
            rng: Rng::new(plan.seed),
            cooling: Rng::new(plan.seed ^ 0xC001_DEED),
            choices: Rng::new(plan.seed ^ 0x7_1E45),
            machine: machine(plan, mistake),
            given: Given::new(plan.shape.tiers.len()),
            now: 1_000_000_000,
            at: 0,
            calm: false,
            lender_off: false,
            leases_before_loss: None,
            memory: Memory::new(shape.pool_pages_max),
            tiers,
            model: Model::default(),
            spaces: Vec::new(),
            clients: Vec::new(),
            outbox: VecDeque::new(),
            commands_ever: 0,
            write_times: BTreeMap::new(),
            provisional_ids: HashSet::new(),
            not_saved: 0,
            adopting: false,
            running: Vec::new(),
            removals_ended: Vec::new(),
            forgotten: Vec::new(),
            jobs: Vec::new(),
            interrupted: Interrupted::default(),
            answers: Vec::new(),
            waiting: BTreeMap::new(),
            presence: HashSet::new(),
            ledger: SimLedger::default(),
            hold: None,
            opened: Vec::new(),
            wanted: Wanted::default(),
            placed: Placed::default(),
            listed: Vec::new(),
            next_listed: None,
            asking: 0,
            last_reply: None,
            numbers: 0,
            steps: 0,
            trace: trace.then(Vec::new),
            fingerprint: 0,
            reached: BTreeSet::new(),
        }
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>4}  {}", self.at, line()));
        }
    }

    pub(crate) const fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn has(&self, feature: Feature) -> bool {
        self.plan.features.has(feature)
    }

    /// Decides whether something happens now that the feature allows in `percent` of 100 cases.
    pub(crate) fn luck(&mut self, feature: Feature, percent: usize) -> bool {
        let happens = self.rng.chance(percent);
        happens && !self.calm && self.has(feature)
    }

    pub(crate) fn key(&self, space: usize, hash: BlockHash) -> BlockKey {
        BlockKey { namespace: self.spaces[space].id, hash }
    }

    /// Returns the space whose current epoch a key belongs to.
    pub(crate) fn live_space(&self, key: &BlockKey) -> Option<usize> {
        self.spaces.iter().position(|space| space.id == key.namespace)
    }

    /// Like `live_space`, for a namespace that the depot knows.
    pub(crate) fn known_space(&self, key: &BlockKey) -> Option<usize> {
        self.live_space(key).filter(|&space| self.spaces[space].known)
    }

    /// Opens namespaces at a new machine, in epochs not before `at_least`.
    pub(crate) fn open_spaces(
        &mut self,
        at_least: &[u32],
        which: impl Fn(usize) -> bool,
    ) -> Result<(), Fail> {
        for space in &mut self.spaces {
            // Its number belonged to another depot.
            (space.known, space.unstored, space.handle) = (false, false, NO_HANDLE);
        }
        // Part of the pool is populated before it is used.
        let upto_bytes = self.rng.below(self.plan.shape.pool_pages) as u64 * BLOCK_ALIGN_BYTES;
        self.feed(Event::Populated { upto_bytes })?;
        self.begin_lending()?;
        for (number, spec) in specs::all().iter().enumerate().take(self.namespaces()) {
            if !which(number) {
                continue;
            }
            let root = spec.root();
            let stored = self.epoch_in_tiers(root);
            let epoch = stored.max(at_least.get(number).copied().unwrap_or(0));
            let request = Request::OpenNamespace { spec: Arc::clone(spec), epoch };
            self.request_of(None, request, Asked::Done)?;
            let Some(opened) = self.opened.pop() else {
                return fail(Rule::Replies, "no namespace was opened");
            };
            let acknowledged = self.spaces.get(number).map_or(0, |space| space.acknowledged);
            if !self.tiers.is_empty() && opened.epoch < acknowledged {
                return fail(
                    Rule::Stale,
                    format!("epoch {acknowledged} was acknowledged, and {} came back", opened.epoch),
                );
            }
            let space = Space {
                root,
                handle: opened.handle,
                epoch: opened.epoch,
                id: opened.id,
                earlier: Vec::new(),
                acknowledged: opened.epoch,
                leases_before: 0,
                pages: spec.layout().shard_count(),
                known: true,
                unstored: false,
                provisional: false,
            };
            if number < self.spaces.len() {
                self.spaces[number] = space;
            } else {
                self.spaces.push(space);
            }
        }
        Ok(())
    }

    /// Makes one step of the machine, and everything that must follow immediately.
    pub(crate) fn feed(&mut self, event: Event) -> Result<(), Fail> {
        self.note(|| show_event(&event));
        self.interrupted.step(&event, &self.jobs);
        let mut out = Effects::default();
        self.machine.step(self.now, event, &mut out);
        self.steps += 1;
        self.mark(&out);
        for (key, visible) in std::mem::take(&mut out.visible) {
            let changed = if visible { self.presence.insert(key) } else { self.presence.remove(&key) };
            if !changed {
                return fail(Rule::Presence, format!("{} became visible={visible} twice", name(&key)));
            }
            if visible {
                self.wanted_has_come(&key);
            }
        }
        self.check_missed(&out)?;
        self.write_ledger(out.proofs)?;
        for forgotten in out.forgotten {
            self.check_forgotten(forgotten.handle)?;
        }
        self.opened.extend(out.namespaces);
        let mut written = Vec::new();
        for command in out.commands {
            self.commands_ever += 1;
            if let Command::Write { tier, slot, key, runs } = &command {
                written.push((*tier, *slot, *key, runs.iter().map(|run| run.len).sum()));
                self.write_times.insert(self.commands_ever, self.now);
            }
            self.note(|| format!("      command {}", show_command(&command)));
            self.check_wanted(&command)?;
            self.outbox.push_back((self.commands_ever, command));
        }
        for question in out.questions {
            self.check_question(question.tiers, &question.keys)?;
            let locations = self.locate_to_read(&question.keys, question.tiers);
            self.answers.push(Answer { ask: question.ask, locations });
        }
        self.jobs.extend(out.again);
        self.check_gauges()?;
        if self.plan.shape.pool_pages <= 12 || self.steps.is_multiple_of(4) {
            self.machine.check().or_else(|what| fail(Rule::Totals, what))?;
        }
        for (token, reply) in out.replies {
            self.replied(token, reply.map(Reply::listed))?;
        }
        if self.machine.counters().over_budget_blocks > 0 {
            self.reached.insert("over budget");
        }
        // After the replies, because they show what was stored as a value.
        written.into_iter().try_for_each(|(tier, slot, key, bytes)| {
            self.check_budget(tier, slot, &key, bytes)?;
            self.check_placed(tier, &key)
        })
    }

    /// Feeds an event and answers the questions that it caused, now or later.
    pub(crate) fn feed_and_answer(&mut self, event: Event) -> Result<(), Fail> {
        self.feed(event)?;
        while !self.answers.is_empty() && !self.luck(Feature::StaleAnswers, 20) {
            let answer = self.answers.remove(0);
            self.feed(Event::Located { ask: answer.ask, locations: answer.locations })?;
        }
        Ok(())
    }

    pub(crate) fn locate(&self, keys: &[BlockKey]) -> Vec<Location> {
        keys.iter().map(|key| crate::tier::locate(&self.tiers, key, |_| true)).collect()
    }

    /// Like `locate`, without the tier that answers no reads now.
    fn locate_to_read(&self, keys: &[BlockKey], among: TierSet) -> Vec<Location> {
        let answers = |tier| among.has(tier) && self.answers_reads(tier);
        let of = |key| crate::tier::locate(&self.tiers, key, answers);
        keys.iter().map(of).collect()
    }

    /// Mixes a step's effects into the fingerprint.
    fn mark(&mut self, out: &Effects) {
        let mut mix = |value: u64| {
            self.fingerprint = (self.fingerprint ^ value).wrapping_mul(0x100_0000_01B3).rotate_left(17);
        };
        out.replies.iter().for_each(|(token, reply)| mix(token << 1 | u64::from(reply.is_ok())));
        out.visible
            .iter()
            .for_each(|(key, visible)| mix(u64::from(key.hash.0[1]) << 1 | u64::from(*visible)));
        for command in &out.commands {
            mix(match command {
                Command::Read { tier, slot, .. } => 1 << 40 | u64::from(*slot) << 8 | *tier as u64,
                Command::Write { tier, slot, .. } => 2 << 40 | u64::from(*slot) << 8 | *tier as u64,
                Command::Remove { tier, key, .. } => 3 << 40 | u64::from(key.hash.0[1]) << 8 | *tier as u64,
                Command::Probe { tier, keys, .. } => 4 << 40 | (keys.len() as u64) << 8 | *tier as u64,
                Command::Touch { keys } => 5 << 40 | keys.len() as u64,
                Command::Lease { tier, slot, .. } => 6 << 40 | u64::from(*slot) << 8 | *tier as u64,
                Command::EndLeases { places, .. } => 7 << 40 | places.len() as u64,
            });
        }
        mix(out.questions.len() as u64);
        mix(out.again.len() as u64);
    }

    fn check_gauges(&mut self) -> Result<(), Fail> {
        let gauges = self.machine.gauges();
        let held = gauges.held;
        let max = self.plan.shape.pool_pages_max as u64 * BLOCK_ALIGN_BYTES;
        if gauges.pool_bytes > max
            || held.pinned > gauges.pool_bytes
            || gauges.pool_free_bytes > gauges.pool_bytes
            || gauges.namespaces > self.namespaces_max()
        {
            return fail(Rule::Caps, format!("{gauges:?} of at most {max}"));
        }
        let not_saved = held.filling + held.dirty;
        let grew = std::mem::replace(&mut self.not_saved, not_saved) < not_saved;
        // A stopped client does not count; when it resumes, more than the share may be dirty for a while.
        let stopped = gauges.stopped_bytes;
        if grew
            && !self.adopting
            && !self.tiers.is_empty()
            && not_saved.saturating_sub(stopped) > max.saturating_sub(stopped) * 70 / 100
        {
            return fail(Rule::Caps, format!("more than the share that may be dirty: {held:?}"));
        }
        self.check_dirty(held.dirty)?;
        self.check_lent(&gauges)?;
        self.note_room(&gauges);
        let failures = self.machine.counters().failures.iter().filter(|failure| failure.0 == "claim");
        let cut = failures.map(|failure| failure.2).sum();
        let at_once = !self.has(Feature::SmallSteps) && !self.has(Feature::StaleAnswers);
        if self.interrupted.claims_cut(cut) && at_once {
            return fail(Rule::Claims, "a claim was admitted, and found no room");
        }
        Ok(())
    }

    /// Crashes the depot. Tiers keep what they have stored; everything else is reset.
    pub(crate) fn crash(&mut self) -> Result<(), Fail> {
        self.note(|| "CRASH and restart".to_owned());
        self.reached.insert("crash");
        let running = std::mem::take(&mut self.running);
        for operation in running {
            self.crash_running(operation);
        }
        for tier in &mut self.tiers {
            tier.crash(&mut self.rng);
        }
        // Versions that a tier still has may come back.
        for (_, tags) in self.tiers.iter().flat_map(SimTier::kept) {
            tags.iter().for_each(|tag| self.model.come_back((tag >> 8) as usize));
        }
        self.ledger.clear();
        self.outbox.clear();
        self.forgotten.clear();
        self.jobs.clear();
        self.answers.clear();
        self.waiting.clear();
        self.presence.clear();
        self.opened.clear();
        self.clients.clear();
        self.hold = None;
        self.replace_machine();
        self.memory = Memory::new(self.plan.shape.pool_pages_max);
        self.open_spaces(&[], |_| true)
    }
}

impl World {
    /// Starts another depot, which numbers everything from scratch.
    pub(crate) fn replace_machine(&mut self) {
        self.machine = machine(&self.plan, self.mistake);
        self.given = Given::new(self.plan.shape.tiers.len());
        self.interrupted = Interrupted::default();
        self.wanted = Wanted::default();
        self.clients.iter_mut().for_each(|client| client.near = None);
        self.removals_ended.clear();
    }
}

fn machine(plan: &Plan, mistake: Option<Mistake>) -> Machine {
    let pool = PoolConfig {
        pool_bytes: plan.shape.pool_pages as u64 * BLOCK_ALIGN_BYTES,
        pool_bytes_max: plan.shape.pool_pages_max as u64 * BLOCK_ALIGN_BYTES,
        grow_step_bytes: 2 * BLOCK_ALIGN_BYTES,
        policy: eviction::by_name(plan.shape.policy).expect("a known policy"),
        keeps: plan.shape.keeps,
        seed: plan.seed,
    };
    let placements: Vec<_> = plan.shape.tiers.iter().map(|tier| tier.placement).collect();
    // The first tier has two servers.
    let part_of = |tier: usize, key: &BlockKey| if tier == 0 { usize::from(key.hash.0[1] % 2) } else { 0 };
    let budgets: Vec<u64> = plan.shape.tiers.iter().map(|tier| tier.write_bytes_per_day).collect();
    let mut machine = Machine::new(pool, placements.len())
        .with_placements(&placements)
        .with_write_budgets(&budgets)
        .with_parts(Arc::new(part_of));
    machine = machine.with_regions(&region_bytes(&plan.shape.regions));
    if plan.features.has(Feature::Forgetting) {
        machine = machine.with_namespaces_max(plan.shape.namespaces_max);
    }
    if plan.features.has(Feature::Hangs) {
        machine = machine.with_write_patience(WRITE_PATIENCE);
    }
    if plan.features.has(Feature::SmallSteps) {
        machine.set_pace(kvdepot_core::machine::Pace::small(plan.seed));
    }
    if let Some(flaw) = mistake.and_then(Mistake::flaw) {
        machine.set_flaw(flaw);
    }
    machine.keep_ledger();
    machine
}

fn show_event(event: &Event) -> String {
    match event {
        Event::Request { token, owner, request } => {
            format!("#{token} owner {owner}: {}", show_request(request))
        }
        Event::Located { ask, locations } => format!("located {ask:?} {locations:?}"),
        Event::TierForgot { tier, keys, lost } => {
            let keys: Vec<String> = keys.iter().map(name).collect();
            format!("tier {tier} forgot {} lost={lost}", keys.join(" "))
        }
        Event::TierCooling { tier, keys } => {
            let keys: Vec<String> = keys.iter().map(name).collect();
            format!("tier {tier} will evict {}", keys.join(" "))
        }
        Event::Removed { id, tier, key, outcome } => {
            format!("tier {tier} ended removal {id} of {} ok={}", name(key), outcome.is_ok())
        }
        other => format!("{other:?}"),
    }
}

fn show_command(command: &Command) -> String {
    match command {
        Command::Read { tier, slot, key, .. } => format!("read tier {tier} slot {slot} {}", name(key)),
        Command::Write { tier, slot, key, .. } => format!("write tier {tier} slot {slot} {}", name(key)),
        Command::Remove { id, tier, key } => format!("removal {id} tier {tier} {}", name(key)),
        Command::Probe { tier, ask, keys } => format!("probe tier {tier} {ask:?} {} keys", keys.len()),
        Command::Touch { keys } => format!("touch {}", keys.len()),
        Command::Lease { tier, slot, key, .. } => format!("lease tier {tier} slot {slot} {}", name(key)),
        Command::EndLeases { tier, places } => format!("end leases tier {tier} {places:?}"),
    }
}

fn show_request(request: &Request) -> String {
    match request {
        Request::OpenProvisionally { spec, epoch, .. } => {
            format!("OpenProvisionally {} epoch {epoch}", spec.canonical())
        }
        Request::OpenNamespace { spec, epoch } => format!("OpenNamespace {} epoch {epoch}", spec.canonical()),
        Request::Publish { lease, others } => {
            format!(
                "Publish lease {} others {}",
                lease.0,
                others.iter().map(name).collect::<Vec<_>>().join(" ")
            )
        }
        Request::Remove { keys, locations } => {
            format!("Remove {} at {locations:?}", keys.iter().map(name).collect::<Vec<_>>().join(" "))
        }
        Request::LeaseNow { keys } => {
            format!("LeaseNow {}", keys.iter().map(name).collect::<Vec<_>>().join(" "))
        }
        other => format!("{other:?}").replace("abababababababababababababab", "").replace("BlockHash", ""),
    }
}
