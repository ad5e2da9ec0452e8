//! Resets that a server could not be told of: no block from before the reset is ever readable after it (P1).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::pool_server::waits::{PATIENCE, until};
use crate::pool_server::{Fault, PoolServer, Speaks, Store};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{RemoteConfig, RemoteTier, Tier};
use parking_lot::Mutex;

const BOTH: [Speaks; 2] = [Speaks::Own, Speaks::Foreign { answers_unknown: true }];

/// A memory pool that each of two depots reaches by a door of its own, so that one of them can be cut off.
struct Pool {
    speaks: Speaks,
    store: Arc<Mutex<Store>>,
    a: Option<PoolServer>,
    b: Option<PoolServer>,
}

impl Pool {
    fn start(speaks: Speaks) -> Self {
        let store: Arc<Mutex<Store>> = Arc::default();
        let door = || PoolServer::start_on("127.0.0.1:0".parse().unwrap(), speaks, None, Arc::clone(&store));
        let (a, b) = (Some(door()), Some(door()));
        Self { speaks, store, a, b }
    }

    fn back_for_a(&mut self, at: SocketAddr) {
        self.a = Some(PoolServer::start_on(at, self.speaks, None, Arc::clone(&self.store)));
    }
}

fn depot<'a>(doors: impl Iterator<Item = &'a Option<PoolServer>>) -> Bench {
    let mut config = RemoteConfig::new(doors.map(|door| door.as_ref().unwrap().name()));
    config.timeout = PATIENCE / 2;
    config.connections = 2;
    Bench::new(Arc::new(RemoteTier::open(config).unwrap()))
}

/// The epoch that a server is in.
fn epoch_at(pool: &Pool) -> u32 {
    pool.store.lock().namespaces.values().map(|(_, epoch)| *epoch).max().unwrap()
}

/// Cuts a depot off from a pool: the address of the door that was closed.
fn cut(bench: &Bench, door: &mut Option<PoolServer>) -> SocketAddr {
    let name = door.as_ref().unwrap().name();
    let (address, _) = door.take().unwrap().kill();
    until(|| bench.tier.servers().iter().any(|server| server.address == name && !server.up));
    address
}

/// The depot follows what its tier says of the namespace.
fn follow(bench: &mut Bench) {
    bench.epoch = bench.tier.open_and_wait(&bench.spec, 0).unwrap();
}

fn reset(bench: &mut Bench) -> kvdepot_core::Result<()> {
    let outcome = bench.tier.advance_and_wait(&bench.spec, 0);
    follow(bench);
    outcome.map(drop)
}

/// Waits until the depot can write at all its servers, looking meanwhile whether it reads what was dumped before.
fn recovers(bench: &mut Bench, old: std::ops::Range<u64>, past: &[u32]) {
    let there = |bench: &Bench| {
        let key = (200..240).filter(|&n| bench.write(n).is_ok()).count();
        key == 40
    };
    let patience = Bench::soon();
    // Before the tier is asked for anything else: the server is there, and may have taken the reset or not.
    until(|| bench.tier.servers().iter().all(|server| server.up));
    assert!(old.clone().all(|n| bench.read(n).is_err()), "a block from before the reset (P1)");
    loop {
        let recovered = there(bench);
        follow(bench);
        let now = bench.epoch;
        for &epoch in past.iter().chain([&now]) {
            bench.epoch = epoch;
            let read: Vec<u64> = old.clone().filter(|&n| bench.read(n).is_ok()).collect();
            assert!(read.is_empty(), "blocks {read:?} from before the reset, in epoch {epoch} (P1)");
        }
        bench.epoch = now;
        if recovered && there(bench) {
            return;
        }
        assert!(std::time::Instant::now() < patience, "the namespace never opened again");
    }
}

/// Another depot had begun the very epoch that the reset moves to, and dumped blocks into it before the reset.
#[test]
fn a_reset_that_its_server_was_not_told_of_does_not_serve_another_depot_s_blocks() {
    for speaks in BOTH {
        let mut pool = Pool::start(speaks);
        let (mut a, mut b) = (depot([&pool.a].into_iter()), depot([&pool.b].into_iter()));
        let door = cut(&a, &mut pool.a);
        reset(&mut b).unwrap();
        b.write_all(20);
        assert_eq!(b.epoch, 1);
        let error = reset(&mut a).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{speaks:?}: {error}");
        pool.back_for_a(door);
        recovers(&mut a, 0..20, &[1]);
        assert!(a.epoch > 1, "{speaks:?}: an epoch of its own");
        follow(&mut b);
        assert_eq!(b.epoch, a.epoch, "{speaks:?}");
        assert!(b.read_is_right(200), "{speaks:?}: both depots go on together");
    }
}

/// Each of two depots resets, and each reaches another one of two servers.
#[test]
fn two_depots_that_reset_at_different_servers_serve_no_block_from_before_a_reset() {
    for speaks in BOTH {
        let mut pools = [Pool::start(speaks), Pool::start(speaks)];
        let (mut a, mut b) =
            (depot(pools.iter().map(|pool| &pool.a)), depot(pools.iter().map(|pool| &pool.b)));
        cut(&b, &mut pools[1].b);
        let door = cut(&a, &mut pools[0].a);
        reset(&mut b).unwrap_err();
        let dumped = (0..40).filter(|&n| b.write(n).is_ok()).count();
        assert!(dumped > 4, "{speaks:?}: one server has taken it");
        reset(&mut a).unwrap_err();
        let mine = (100..140).filter(|&n| a.write(n).is_ok()).count();
        assert!((4..36).contains(&mine), "{speaks:?}: {mine} of 40 at the server that has taken the reset");
        pools[0].back_for_a(door);
        let past = b.epoch;
        recovers(&mut a, 0..40, &[past]);
    }
}

/// What a depot learns that starts later: the higher epoch is of the later reset, wherever either could be stored.
#[test]
fn a_depot_that_starts_later_knows_of_a_reset_that_one_server_was_told_of() {
    let mut pools = [Pool::start(Speaks::Own), Pool::start(Speaks::Own)];
    let (mut a, mut b) = (depot(pools.iter().map(|pool| &pool.a)), depot(pools.iter().map(|pool| &pool.b)));
    cut(&b, &mut pools[1].b);
    let door = cut(&a, &mut pools[0].a);
    reset(&mut b).unwrap_err();
    assert!((0..40).filter(|&n| b.write(n).is_ok()).count() > 4);
    let seconds = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    until(|| seconds() > u64::from(b.epoch));
    reset(&mut a).unwrap_err();
    drop(a);
    pools[0].back_for_a(door);
    let mut a = depot(pools.iter().map(|pool| &pool.a));
    let past = b.epoch;
    recovers(&mut a, 0..40, &[past]);
}

/// A server that answers hellos and nothing else takes no reset.
#[test]
fn a_hung_server_is_not_used_after_a_reset_before_it_has_taken_it() {
    let pool = Pool::start(Speaks::Own);
    let (mut a, b) = (depot([&pool.a].into_iter()), depot([&pool.b].into_iter()));
    b.write_all(10);
    let config = |server: &PoolServer| {
        let mut config = RemoteConfig::new([server.name()]);
        config.timeout = std::time::Duration::from_secs(1);
        config
    };
    let server = pool.a.as_ref().unwrap();
    a.tier = Arc::new(RemoteTier::open(config(server)).unwrap());
    follow(&mut a);
    server.set(Fault::Hung);
    assert!(reset(&mut a).is_err());
    server.set(Fault::None);
    recovers(&mut a, 0..10, &[0]);
    drop(b);
}

/// The depot forgets the namespace while the reset is owed; the server learns of it all the same.
#[test]
fn a_reset_of_a_namespace_that_was_closed_is_told_when_the_server_comes_back() {
    for speaks in BOTH {
        let mut pool = Pool::start(speaks);
        let mut a = depot([&pool.a].into_iter());
        a.write_all(5);
        let door = cut(&a, &mut pool.a);
        reset(&mut a).unwrap_err();
        a.tier.close_namespace(a.spec.root());
        pool.back_for_a(door);
        let b = depot([&pool.b].into_iter());
        until(|| b.tier.open_and_wait(&b.spec, 0).unwrap() > 0);
        // The server moves before the client has its answer.
        until(|| a.tier.servers().iter().all(|server| server.up));
        follow(&mut a);
        assert!((0..5).all(|n| !a.read_is_right(n)) && a.write(9).is_ok(), "{speaks:?}");
    }
}

/// The reset is carried out once, although its answer says otherwise every time.
#[test]
fn a_server_that_moved_and_answers_that_it_failed_is_not_moved_again() {
    let pool = Pool::start(Speaks::Own);
    let mut a = depot([&pool.a].into_iter());
    a.write_all(10);
    pool.a.as_ref().unwrap().set(Fault::MovesAndFails);
    assert_eq!(reset(&mut a).unwrap_err().kind(), ErrorKind::Unavailable, "it could not store the reset");
    until(|| {
        assert_eq!(epoch_at(&pool), 1, "one reset, one epoch");
        a.write(20).is_ok()
    });
    assert!(a.read_is_right(20) && (0..10).all(|n| a.read(n).is_err()));
}

/// That another server was moved meanwhile says nothing of this one's disk.
#[test]
fn a_reset_that_one_server_did_not_store_fails_although_another_one_was_moved_meanwhile() {
    let (failing, moved) = (PoolServer::own(), PoolServer::own());
    let mut config = RemoteConfig::new([failing.name(), moved.name()]);
    config.timeout = PATIENCE / 2;
    let mut a = Bench::new(Arc::new(RemoteTier::open(config).unwrap()));
    until(|| a.tier.servers().iter().all(|server| server.up));
    follow(&mut a);
    failing.set(Fault::MovesAndFails);
    moved.set(Fault::MovedByAnother);
    let error = reset(&mut a).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "it could not store the reset: {error}");
}

/// One server answers nothing any more; the other one has many resets to take, and would take them at once.
#[test]
fn a_hung_server_holds_up_no_reset_that_another_one_owes() {
    const NAMESPACES: usize = 8;
    let (hung, sound) = (PoolServer::own(), PoolServer::own());
    let mut config = RemoteConfig::new([hung.name(), sound.name()]);
    // Nobody waits for the end of its silence. A second connection, when it comes, would tell a server what it owes.
    (config.timeout, config.connections) = (PATIENCE * 2, 1);
    let tier = RemoteTier::open(config).unwrap();
    until(|| tier.servers().iter().all(|server| server.up));
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    [&hung, &sound].iter().for_each(|server| server.set(Fault::NeverMoves));
    for n in 0..NAMESPACES {
        let spec = spec(&format!("hung {n}"), layout.clone());
        tier.open_and_wait(&spec, 0).unwrap();
        tier.advance_and_wait(&spec, 0).unwrap_err();
    }
    hung.set(Fault::Hung);
    sound.set(Fault::None);
    until(|| {
        sound.state.store.lock().namespaces.values().filter(|(_, epoch)| *epoch > 0).count() == NAMESPACES
    });
    until(|| hung.state.hanging.load(Ordering::SeqCst) > 0);
    assert!(hung.state.store.lock().namespaces.values().all(|(_, epoch)| *epoch == 0), "it has taken none");
    hung.set(Fault::None);
    hung.disconnect();
}

/// The second name of a server finds it moved by the first.
#[test]
fn a_server_under_two_names_takes_a_reset_once() {
    let mut pool = Pool::start(Speaks::Own);
    let mut a = depot([&pool.a, &pool.b].into_iter());
    a.write_all(10);
    reset(&mut a).unwrap();
    assert_eq!((epoch_at(&pool), a.epoch), (1, 1));
    assert!((20..60).all(|n| a.write(n).is_ok()) && (0..10).all(|n| a.read(n).is_err()));
    drop(pool.b.take());
}

/// A try that moves no server changes nothing of what the depot has closed.
#[test]
fn a_reset_that_is_tried_again_does_not_open_a_namespace_that_was_closed() {
    let pool = Pool::start(Speaks::Own);
    let mut a = depot([&pool.a].into_iter());
    let server = pool.a.as_ref().unwrap();
    server.set(Fault::NeverMoves);
    let error = a.tier.advance_and_wait(&a.spec, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    a.tier.close_namespace(a.spec.root());
    server.set(Fault::None);
    until(|| epoch_at(&pool) > 0);
    a.epoch = epoch_at(&pool);
    let error = a.write(9).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}
