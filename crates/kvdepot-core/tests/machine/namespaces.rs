//! Namespaces that come and go: unused ones shut no client out, and endless resets leave nothing behind (P1, P7).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;

use crate::lab::pool;
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::machine::{
    Command, Effects, Event, Location, Machine, NamespaceHandle, Opened, Outcome, Reply, Request, Reserve,
    ShardSet, Stored,
};
use kvdepot_core::{
    BlockHash, BlockKey, BlockLayout, ErrorKind, LeaseId, NamespaceId, NamespaceSpec, Result,
};

const BLOCK: u64 = 4096;

/// A machine whose tiers do what the test scripts.
struct Lab {
    machine: Machine,
    tokens: u64,
    commands: Vec<Command>,
    forgotten: Vec<NamespaceHandle>,
}

impl Lab {
    fn new(blocks: u64, tiers: usize, namespaces_max: usize) -> Self {
        let pool = pool(blocks, "lru", true);
        let machine = Machine::new(pool, tiers).with_namespaces_max(namespaces_max);
        Self { machine, tokens: 0, commands: Vec::new(), forgotten: Vec::new() }
    }

    fn feed(&mut self, event: Event) -> Vec<(u64, Result<Reply>)> {
        let (mut replies, mut todo) = (Vec::new(), vec![event]);
        while let Some(event) = todo.pop() {
            let mut out = Effects::default();
            self.machine.step(0, event, &mut out);
            self.commands.extend(out.commands);
            self.forgotten.extend(out.forgotten.iter().map(|forgotten| forgotten.handle));
            replies.extend(out.replies.into_iter().map(|(token, reply)| (token, reply.map(Reply::listed))));
            todo.extend(out.questions.into_iter().map(|question| Event::Located {
                ask: question.ask,
                locations: vec![Location::Absent; question.keys.len()],
            }));
            todo.extend(out.again.into_iter().map(Event::Continue));
        }
        replies
    }

    fn ask(&mut self, owner: u64, request: Request) -> Result<Reply> {
        self.tokens += 1;
        let token = self.tokens;
        let replies = self.feed(Event::Request { token, owner, request });
        replies.into_iter().find(|(other, _)| *other == token).unwrap().1
    }

    fn open(&mut self, owner: u64, name: usize) -> Result<Opened> {
        match self.ask(owner, Request::OpenNamespace { spec: spec(name), epoch: 0 })? {
            Reply::Namespace(opened) => Ok(opened),
            other => panic!("{other:?}"),
        }
    }

    fn open_provisionally(&mut self, owner: u64, name: usize, provisional: NamespaceId) -> Opened {
        let request = Request::OpenProvisionally { spec: spec(name), epoch: 0, provisional };
        match self.ask(owner, request).unwrap() {
            Reply::Namespace(opened) => opened,
            other => panic!("{other:?}"),
        }
    }

    fn reserve(&mut self, owner: u64, namespace: NamespaceHandle) -> Result<LeaseId> {
        self.reserve_as(owner, namespace, Reserve::Block)
    }

    fn reserve_as(&mut self, owner: u64, namespace: NamespaceHandle, how: Reserve) -> Result<LeaseId> {
        let hashes = vec![BlockHash([1; 16])];
        let request = Request::Reserve { namespace, id: None, hashes, how, runs_max: usize::MAX };
        match self.ask(owner, request)? {
            Reply::Slots(outcomes) => match &outcomes[0] {
                Outcome::Leased(leased) => Ok(leased.lease),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn dump(&mut self, owner: u64, namespace: NamespaceHandle) {
        let lease = self.reserve(owner, namespace).unwrap();
        self.ask(owner, Request::Commit { leases: vec![lease], shards: ShardSet::All, crc64: None }).unwrap();
    }

    fn loads(&mut self, owner: u64, namespace: NamespaceHandle) -> Result<bool> {
        let hashes = vec![BlockHash([1; 16])];
        let request = Request::Load {
            namespace,
            id: None,
            hashes,
            fetch_deadline: 1,
            last: true,
            runs_max: usize::MAX,
            in_place: false,
        };
        match self.ask(owner, request)? {
            Reply::Slots(outcomes) => match &outcomes[0] {
                Outcome::Leased(leased) => {
                    self.ask(owner, Request::Release { leases: vec![leased.lease] }).unwrap();
                    Ok(true)
                }
                _ => Ok(false),
            },
            other => panic!("{other:?}"),
        }
    }

    fn end(&mut self, owner: u64) {
        self.feed(Event::OwnerEnded { owner });
    }

    /// Opens other namespaces until the depot has to forget all that it may.
    fn crowd(&mut self, first: usize, count: usize) {
        (first..first + count).for_each(|name| drop(self.open(0, name)));
    }
}

fn spec(name: usize) -> Arc<NamespaceSpec> {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    Arc::new(NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap())
}

#[test]
fn ten_thousand_namespaces_of_clients_that_come_and_go() {
    let mut lab = Lab::new(64, 0, NAMESPACES_MAX);
    for name in 0..10_000 {
        let owner = 1 + name as u64;
        let namespace = lab.open(owner, name).unwrap().handle;
        lab.dump(owner, namespace);
        assert!(lab.loads(owner, namespace).unwrap());
        lab.end(owner);
    }
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.namespaces, gauges.spaces), (NAMESPACES_MAX, NAMESPACES_MAX));
    assert_eq!(lab.forgotten, (0..10_000 - NAMESPACES_MAX as u64).collect::<Vec<_>>(), "the oldest first");
}

#[test]
fn the_number_of_a_forgotten_namespace_names_nothing() {
    let mut lab = Lab::new(64, 0, 2);
    let old = lab.open(1, 0).unwrap().handle;
    lab.dump(1, old);
    lab.end(1);
    lab.crowd(1, 2);
    assert_eq!(lab.forgotten, [old]);
    for name in 3..6 {
        let other = lab.open(2, name).unwrap().handle;
        lab.dump(2, other);
        lab.end(2);
        assert_eq!(lab.loads(3, old).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(lab.reserve(3, old).unwrap_err().kind(), ErrorKind::NotFound);
    }
    let again = lab.open(3, 0).unwrap().handle;
    assert!(again != old && !lab.loads(3, again).unwrap(), "its blocks went with it");
}

#[test]
fn a_greedy_client_is_refused_while_others_still_open() {
    let mut lab = Lab::new(64, 0, NAMESPACES_MAX);
    let refused = (0..NAMESPACES_MAX).find_map(|name| lab.open(1, name).err().map(|error| (name, error)));
    let (name, error) = refused.unwrap();
    assert_eq!((name, error.kind()), (NAMESPACES_MAX / 2, ErrorKind::NoSpace));
    assert!(error.to_string().contains("namespaces_per_client_max=2048"), "{error}");
    assert!(lab.open(1, 7).is_ok(), "it has this one");
    for name in 10_000..15_000 {
        lab.open(2 + name as u64, name).unwrap();
        lab.end(2 + name as u64);
    }
    assert!(lab.loads(1, 7).is_ok(), "what the greedy one uses is not forgotten");
    lab.end(1);
    assert!(lab.open(1, 20_000).is_ok());
}

#[test]
fn a_full_table_is_refused_with_what_to_do() {
    let mut lab = Lab::new(64, 0, 4);
    for name in 0..4 {
        lab.open(1 + name as u64, name).unwrap();
    }
    let error = lab.open(9, 9).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("namespaces_max=4"), "{error}");
    assert_eq!(lab.machine.may_open(9).unwrap_err().kind(), ErrorKind::NoSpace);
    lab.end(3);
    lab.open(9, 9).unwrap();
    assert_eq!(lab.forgotten, [2]);
}

#[test]
fn a_namespace_is_kept_while_anything_is_under_way_in_it() {
    let mut lab = Lab::new(64, 1, 3);
    let kept = lab.open(1, 0).unwrap().handle;
    let lease = lab.reserve(2, kept).unwrap();
    lab.end(1);
    lab.crowd(1, 5);
    assert!(!lab.forgotten.contains(&kept), "a client fills a slot");
    lab.ask(2, Request::Commit { leases: vec![lease], shards: ShardSet::All, crc64: None }).unwrap();
    lab.crowd(10, 5);
    assert!(!lab.forgotten.contains(&kept), "its block is dirty");
    let [Command::Write { tier, slot, key, .. }] = lab.commands[..] else { panic!("{:?}", lab.commands) };
    lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    let request = Request::Remove { keys: vec![key], locations: vec![Location::Tier(0)] };
    assert_eq!(lab.feed(Event::Request { token: 1 << 40, owner: 0, request }).len(), 0);
    lab.crowd(20, 5);
    assert!(!lab.forgotten.contains(&kept), "a tier removes its block");
    let Some(&Command::Remove { id, .. }) = lab.commands.last() else { panic!("{:?}", lab.commands) };
    lab.feed(Event::Removed { id, tier, key, outcome: Ok(()) });
    lab.crowd(30, 3);
    assert!(lab.forgotten.contains(&kept));
}

#[test]
fn a_reset_that_is_not_stored_is_not_forgotten() {
    let mut lab = Lab::new(64, 1, 3);
    let kept = lab.open(1, 0).unwrap().handle;
    lab.end(1);
    let provisional = NamespaceId([9; 16]);
    lab.ask(0, Request::BeginAdvance { namespace: kept, provisional }).unwrap();
    lab.crowd(1, 5);
    assert!(!lab.forgotten.contains(&kept), "it is being reset");
    lab.ask(0, Request::EndAdvance { namespace: kept, epoch: 1, stored: false }).unwrap();
    lab.crowd(10, 5);
    assert!(!lab.forgotten.contains(&kept), "a tier has not stored it");
    lab.ask(0, Request::FollowEpoch { namespace: kept, epoch: 0, stored: true }).unwrap();
    lab.crowd(20, 5);
    assert!(!lab.forgotten.contains(&kept), "that was of an earlier epoch");
    lab.ask(0, Request::FollowEpoch { namespace: kept, epoch: 1, stored: true }).unwrap();
    lab.crowd(30, 3);
    assert!(lab.forgotten.contains(&kept));
}

/// A tier that does not answer may know of a reset. So the pool serves, and tiers neither serve nor get anything, under an
/// id that no epoch has.
#[test]
fn a_provisional_namespace_has_the_pool_only() {
    const PROVISIONAL: NamespaceId = NamespaceId([9; 16]);
    let key = |namespace| BlockKey { namespace, hash: BlockHash([1; 16]) };
    let mut lab = Lab::new(64, 2, 8);
    let opened = lab.open_provisionally(1, 0, PROVISIONAL);
    let namespace = opened.handle;
    assert_eq!((opened.id, opened.epoch), (PROVISIONAL, 0));
    assert!(!lab.loads(1, namespace).unwrap());
    lab.dump(1, namespace);
    (0..3).for_each(|_| assert!(lab.loads(1, namespace).unwrap(), "the pool has it"));
    lab.feed(Event::Tick);
    assert!(lab.commands.is_empty(), "{:?}", lab.commands);
    assert_eq!(lab.machine.gauges().dirty_blocks, 0, "it waits for no tier");

    let error = lab.reserve_as(1, namespace, Reserve::Value).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "a tier may have an earlier value");
    let remove =
        |namespace| Request::Remove { keys: vec![key(namespace)], locations: vec![Location::Tier(0)] };
    match lab.ask(1, remove(PROVISIONAL)).unwrap() {
        Reply::Removed { was_there, left } => assert_eq!((was_there, left), (vec![true], 1), "not in tiers"),
        other => panic!("{other:?}"),
    }
    assert!(!lab.loads(1, namespace).unwrap() && lab.commands.is_empty(), "{:?}", lab.commands);

    lab.dump(1, namespace);
    lab.ask(0, Request::FollowEpoch { namespace, epoch: 2, stored: false }).unwrap();
    assert!(lab.loads(1, namespace).unwrap(), "one tier has still not answered");
    // Another client opens it, and another one knows more.
    assert_eq!(lab.open_provisionally(2, 0, NamespaceId([8; 16])).id, PROVISIONAL);
    lab.ask(0, Request::FollowEpoch { namespace, epoch: 2, stored: true }).unwrap();
    assert!(!lab.loads(1, namespace).unwrap(), "what was dumped before is lost");
    lab.dump(1, namespace);
    let writes = lab.commands.iter().filter_map(|command| match command {
        Command::Write { key, .. } => Some(*key),
        _ => None,
    });
    assert_eq!(writes.collect::<Vec<_>>(), [key(spec(0).id(2)); 2], "both tiers get what came after");
}

#[test]
fn opening_a_provisional_namespace_with_all_answers_moves_it_to_its_epoch() {
    let mut lab = Lab::new(64, 2, 8);
    let provisional = lab.open_provisionally(1, 0, NamespaceId([9; 16]));
    let opened = lab.open(2, 0).unwrap();
    assert_eq!((opened.handle, opened.id), (provisional.handle, spec(0).id(0)));
    // One that is known is not made provisional.
    assert_eq!(lab.open_provisionally(3, 0, NamespaceId([8; 16])).id, spec(0).id(0));
}

#[test]
fn a_provisional_namespace_without_users_is_forgotten() {
    let mut lab = Lab::new(64, 2, 3);
    let opened = lab.open_provisionally(1, 0, NamespaceId([9; 16]));
    lab.dump(1, opened.handle);
    lab.end(1);
    lab.crowd(1, 5);
    assert!(lab.forgotten.contains(&opened.handle));
    let again = lab.open_provisionally(1, 0, NamespaceId([8; 16]));
    assert!(!lab.loads(1, again.handle).unwrap(), "its blocks had a key that nothing has");
}

#[test]
fn a_hundred_thousand_resets_leave_nothing_behind() {
    let mut lab = Lab::new(64, 1, NAMESPACES_MAX);
    let namespace = lab.open(1, 0).unwrap().handle;
    for epoch in 1..=100_000 {
        lab.dump(1, namespace);
        let written = lab.commands.pop();
        lab.ask(0, Request::FollowEpoch { namespace, epoch, stored: true }).unwrap();
        // The write of the previous epoch is still in flight.
        assert_eq!(lab.machine.gauges().spaces, 2);
        let Some(Command::Write { tier, slot, key, .. }) = written else { panic!("{written:?}") };
        assert_eq!(key, BlockKey { namespace: spec(0).id(epoch - 1), hash: BlockHash([1; 16]) });
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
        assert_eq!(lab.machine.gauges().spaces, 1);
    }
}
