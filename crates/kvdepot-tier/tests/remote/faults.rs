//! Servers that fail in every way: each failure is a miss in bounded time (P2), never wrong bytes (P1).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::pool_server::waits::{PATIENCE, until};
use crate::pool_server::{Fault, Late, PoolServer, Speaks};
use kvdepot_core::{BlockKey, BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, listen, spec};
use kvdepot_tier::{Presence, RemoteConfig, RemoteProtocol, RemoteTier, Tier, TierEvents, Written};
use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

const TOKEN: &str = "a token of these tests";
const FOREIGN: Speaks = Speaks::Foreign { answers_unknown: true };

fn config(servers: &[&PoolServer]) -> RemoteConfig {
    let mut config = RemoteConfig::new(servers.iter().map(|server| server.name()));
    config.timeout = PATIENCE / 2;
    config.connections = 2;
    config
}

/// For tests that sit out a silence. On a busy machine even a server that answers may be silent for as long: what must
/// succeed is tried again.
fn hasty(servers: &[&PoolServer]) -> RemoteConfig {
    let mut config = config(servers);
    config.timeout = Duration::from_secs(1);
    config
}

fn open(config: RemoteConfig) -> Bench {
    Bench::new(Arc::new(RemoteTier::open(config).unwrap()))
}

fn can_write(bench: &Bench, n: u64) -> bool {
    bench.write(n).is_ok()
}

fn write_all(bench: &Bench, count: u64) {
    // An opening that came too late is not repeated by itself.
    let opened = || bench.tier.open_and_wait(&bench.spec, 0).is_ok();
    (0..count).for_each(|n| until(|| can_write(bench, n) || (opened() && can_write(bench, n))));
}

#[test]
fn faults_of_a_get_are_misses_and_the_server_is_used_again_after() {
    for speaks in [Speaks::Own, FOREIGN] {
        for (number, fault) in (0..).zip([
            Fault::Garbage,
            Fault::CloseAmidValue,
            Fault::HangAmidValue,
            Fault::Hung,
            Fault::WrongChecksum,
            Fault::FlippedBit,
            Fault::WrongLength,
            Fault::WrongId,
        ]) {
            if speaks == FOREIGN && fault == Fault::WrongId {
                continue;
            }
            let server = PoolServer::start(speaks, None);
            let bench = open(hasty(&[&server]));
            write_all(&bench, 4);
            server.set(fault);
            let begun = Instant::now();
            for n in 0..4 {
                assert!(!bench.read_is_right(n), "{speaks:?} {fault:?} {number}: a miss");
            }
            assert!(begun.elapsed() < PATIENCE, "{fault:?}: in bounded time (P2)");
            server.set(Fault::None);
            until(|| can_write(&bench, 100));
            until(|| bench.read_is_right(100));
        }
    }
}

/// P1: what came back damaged is put out of the way, so that it is not served again.
#[test]
fn a_flipped_bit_is_corrupt_and_the_block_is_removed() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let bench = open(config(&[&server]));
        bench.write_all(2);
        server.set(Fault::FlippedBit);
        assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt);
        bench.drain();
        server.set(Fault::None);
        assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(bench.read_is_right(1));
        assert_eq!(bench.write(0).unwrap(), Written::New);
        assert!(bench.read_is_right(0));
    }
}

#[test]
fn answers_may_come_in_any_order() {
    let server = PoolServer::own();
    let bench = open(RemoteConfig { connections: 1, ..config(&[&server]) });
    bench.write_all(64);
    server.set(Fault::Backwards);
    let reads: Vec<_> = (0..64)
        .map(|n| {
            let slot = bench.slot();
            (n, slot.clone(), bench.begin_read(n, slot, Bench::soon()))
        })
        .collect();
    for (n, slot, read) in reads {
        Bench::answer(&read).unwrap();
        assert_eq!(bench.block_of(&slot), bench.bytes(n));
    }
    assert!(server.state.gets.load(Ordering::SeqCst) <= 64, "gets travel together");
}

#[test]
fn a_hung_server_costs_one_silence_and_then_nothing() {
    let server = PoolServer::own();
    let bench = open(RemoteConfig { connections: 1, ..hasty(&[&server]) });
    write_all(&bench, 1);
    server.set(Fault::Hung);
    let reads: Vec<_> = (0..50).map(|_| bench.begin_read(0, bench.slot(), Bench::soon())).collect();
    // Before the silence is over, or the client would find a server that shakes hands.
    until(|| server.state.hanging.load(Ordering::SeqCst) > 0);
    server.set(Fault::HungHello);
    for read in &reads {
        let kind = Bench::answer(read).unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::Timeout | ErrorKind::Unavailable), "{kind}");
    }
    until(|| bench.peek(0) == Presence::Absent);
    let error = bench.read(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "at once: {error}");
    server.set(Fault::None);
    until(|| bench.read_is_right(0));
}

/// P2: the other connections, though nothing was asked on them, are given up with the one that waited.
#[test]
fn a_hung_server_costs_one_silence_whatever_the_connections() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let bench = open(RemoteConfig { connections: 8, ..hasty(&[&server]) });
        write_all(&bench, 1);
        until(|| bench.tier.servers()[0].connections == 8);
        server.set(Fault::Hung);
        let read = bench.begin_read(0, bench.slot(), Bench::soon());
        until(|| server.state.hanging.load(Ordering::SeqCst) > 0);
        server.set(Fault::HungHello);
        assert!(Bench::answer(&read).is_err());
        until(|| bench.peek(0) == Presence::Absent);
        until(|| {
            let state = &bench.tier.servers()[0];
            !state.up && state.failures >= 8 && state.last_error.is_some()
        });
        server.set(Fault::None);
        until(|| bench.read_is_right(0) && bench.tier.servers()[0].up);
    }
}

/// What nobody waits for is noticed, too: a request must not find a dead connection first, and be lost on it.
#[test]
fn a_server_that_dies_while_nothing_is_asked_is_noticed() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let bench = open(RemoteConfig { connections: 8, ..config(&[&server]) });
        bench.write_all(1);
        until(|| bench.tier.servers()[0].connections == 8);
        let (address, store) = server.kill();
        until(|| !bench.tier.servers()[0].up && bench.tier.is_down(&bench.key(0)));
        let again = PoolServer::start_on(address, speaks, None, store);
        until(|| bench.tier.servers()[0].up && !bench.tier.is_down(&bench.key(0)));
        assert!((1..20).all(|n| can_write(&bench, n)), "{speaks:?}");
        assert!((0..20).all(|n| bench.read_is_right(n)), "{speaks:?}");
        drop(again);
    }
}

/// A reset, or the opening of a namespace, with nothing else under way.
#[test]
fn a_hung_server_holds_up_no_reset() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let bench = open(hasty(&[&server]));
        write_all(&bench, 1);
        server.set(Fault::Hung);
        let (tier, spec) = (Arc::clone(&bench.tier), bench.spec.clone());
        let (send, ended) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || drop(send.send(tier.advance_and_wait(&spec, 3))));
        let outcome = ended.recv_timeout(PATIENCE).expect("in bounded time");
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable, "{speaks:?}");
        waiting.join().unwrap();
    }
}

/// A server that takes nothing any more fills the socket: the thread that sends waits in it, and the blocks' memory
/// with it, until the silence ends both.
#[test]
fn a_server_that_stops_reading_is_given_up() {
    let server = PoolServer::own();
    let layout = BlockLayout::new(vec![vec![4 << 20]]).unwrap();
    let bench = Bench::with(Arc::new(RemoteTier::open(hasty(&[&server])).unwrap()), spec("large", layout));
    write_all(&bench, 1);
    server.set(Fault::Deaf);
    let slots: Vec<_> = (10..26).map(|n| bench.filled(n)).collect();
    let writes: Vec<_> =
        (10..).zip(&slots).map(|(n, slot)| bench.begin_write(n, slot.clone(), Bench::soon())).collect();
    for write in &writes {
        let kind = Bench::answer(write).unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::Timeout | ErrorKind::Unavailable), "{kind}");
    }
    server.set(Fault::None);
    until(|| can_write(&bench, 100));
    until(|| bench.read_is_right(0) && bench.read_is_right(100));
}

#[test]
fn a_caller_s_deadline_ends_its_wait_and_not_the_connection() {
    let server = PoolServer::own();
    let bench = open(RemoteConfig { timeout: PATIENCE, connections: 1, ..config(&[&server]) });
    bench.write_all(1);
    server.set(Fault::HangAmidValue);
    let first = bench.begin_read(0, bench.slot(), Bench::soon());
    until(|| server.state.gets.load(Ordering::SeqCst) == 1);
    let behind = bench.begin_read(0, bench.slot(), Instant::now() + Duration::from_millis(50));
    assert_eq!(Bench::answer(&behind).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(first.try_recv().is_err(), "the first one goes on waiting");
    drop(server);
    assert!(Bench::answer(&first).is_err());
}

/// As of a load, which gives each tier its share of the time.
#[test]
fn a_deadline_ends_a_read_whose_bytes_have_stopped_amid_the_block() {
    let server = PoolServer::own();
    let bench = open(RemoteConfig { timeout: 4 * PATIENCE, connections: 1, ..config(&[&server]) });
    bench.write_all(2);
    server.set(Fault::HangAmidValue);
    let read = bench.begin_read(0, bench.slot(), Instant::now() + Duration::from_millis(50));
    assert_eq!(Bench::answer(&read).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(bench.tier.servers()[0].failures, 0, "the connection is still waited for");
}

/// Blocks that a listener was told to be lost.
#[derive(Default)]
struct Heard(Mutex<Vec<BlockKey>>);

impl TierEvents for Heard {
    fn evicted(&self, keys: &[BlockKey]) {
        panic!("nothing is evicted: {keys:?}");
    }

    fn lost(&self, keys: &[BlockKey]) {
        self.0.lock().extend(keys);
    }

    fn went_down(&self) {}

    fn came_back(&self) {}

    fn lost_memory(&self) {}
}

/// Otherwise blocks that stay in the pools of nodes would never be stored there again, and other nodes would miss them.
#[test]
fn blocks_of_a_server_that_another_depot_replaces_are_reported_as_lost() {
    let (a, b) = (PoolServer::own(), PoolServer::own());
    let bench = open(config(&[&a, &b]));
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    bench.write_all(40);
    a.disconnect();
    until(|| bench.tier.servers()[0].failures > 0 && bench.tier.servers()[0].up);
    assert!(heard.0.lock().is_empty(), "the depot is the same");
    let at_a: Vec<BlockKey> = a.state.store.lock().blocks.keys().copied().collect();
    let (address, _) = a.kill();
    until(|| !bench.tier.servers()[0].up);
    let again = PoolServer::start_on(address, Speaks::Own, None, Arc::default());
    until(|| heard.0.lock().len() >= at_a.len());
    let (mut lost, mut at_a) = (std::mem::take(&mut *heard.0.lock()), at_a);
    lost.sort_unstable_by_key(|key| key.hash.0);
    at_a.sort_unstable_by_key(|key| key.hash.0);
    assert!(lost == at_a && !lost.is_empty() && lost.len() < 40, "{} of {}", lost.len(), at_a.len());
    drop((again, b));
}

/// One connection after another breaks, so that the server is never gone.
#[test]
fn a_server_that_another_depot_replaces_behind_open_connections_is_noticed() {
    let mut old = PoolServer::own();
    let bench = open(config(&[&old]));
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    until(|| bench.tier.servers()[0].connections == 2);
    bench.write_all(10);
    old.shut();
    let new = PoolServer::start_on(old.address, Speaks::Own, None, Arc::default());
    old.disconnect_one();
    until(|| heard.0.lock().len() == 10);
    until(|| bench.tier.servers()[0].connections == 2);
    assert_eq!(new.state.connections.load(Ordering::SeqCst), 2, "none is left to the earlier one");
    assert!(bench.tier.servers()[0].up);
    bench.write_all(10);
    assert_eq!(new.state.store.lock().blocks.len(), 10, "they are stored again");
    assert!((0..10).all(|n| bench.read_is_right(n)));
}

#[test]
fn a_server_that_refuses_a_namespace_serves_the_others() {
    let server = PoolServer::own();
    let bench = open(config(&[&server]));
    let other =
        Bench::with(Arc::clone(&bench.tier), spec("other", BlockLayout::new(vec![vec![5000]]).unwrap()));
    bench.write_all(5);
    assert!(other.write(0).is_ok());
    server.state.store.lock().refused = Some(other.spec.root());
    let before = bench.tier.servers()[0].failures;
    server.disconnect();
    until(|| bench.tier.servers()[0].failures >= before + 2 && bench.tier.servers()[0].connections == 2);
    assert!((0..5).all(|n| bench.read_is_right(n)) && bench.write(7).is_ok());
}

/// A tier of the server hangs. What its pool has is read.
#[test]
fn a_server_that_is_late_with_several_namespaces_serves_the_others() {
    let layout = BlockLayout::new(vec![vec![5000]]).unwrap();
    for is_refusing in [true, false] {
        let server = PoolServer::own();
        let config = hasty(&[&server]);
        let late = if is_refusing { Late::Refuses } else { Late::Opens(config.timeout * 5 / 8) };
        let bench = open(config);
        write_all(&bench, 5);
        let slow: Vec<_> = (0..3)
            .map(|n| Bench::with(Arc::clone(&bench.tier), spec(&format!("slow {n}"), layout.clone())))
            .map(|slow| slow.spec.root())
            .collect();
        let mut store = server.state.store.lock();
        (store.slow, store.late) = (slow, late);
        drop(store);
        let before = bench.tier.servers()[0].failures;
        server.disconnect();
        until(|| bench.tier.servers()[0].failures >= before + 2 && bench.tier.servers()[0].up);
        until(|| (0..5).all(|n| bench.read_is_right(n)));
    }
}

/// The same server in two protocols would be two stores.
#[test]
fn connections_by_infinistore_s_protocol_end_when_a_depot_takes_the_place_of_its_server() {
    let mut old = PoolServer::foreign();
    let bench = open(config(&[&old]));
    until(|| bench.tier.servers()[0].connections == 2);
    bench.write_all(10);
    old.shut();
    let new = PoolServer::start_on(old.address, Speaks::Own, None, Arc::default());
    old.disconnect_one();
    until(|| new.state.connections.load(Ordering::SeqCst) == 2);
    until(|| (20..30).all(|n| can_write(&bench, n)));
    assert_eq!(new.state.store.lock().blocks.len(), 10);
    assert!((0..10).all(|n| !bench.read_is_right(n)), "none is read from the earlier one");
}

/// Its connection may only have broken, and it keeps what it had.
#[test]
fn blocks_of_a_server_that_cannot_tell_which_depot_it_is_are_not_reported_as_lost() {
    let server = PoolServer::foreign();
    let bench = open(config(&[&server]));
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    bench.write_all(10);
    server.disconnect();
    until(|| bench.tier.servers()[0].failures > 0 && can_write(&bench, 100));
    assert!(heard.0.lock().is_empty() && bench.read_is_right(3));
}

/// Blocks of a dead server are misses at once, those of the others are served; back when it answers.
#[test]
fn one_of_two_servers_dies_and_comes_back() {
    for speaks in [Speaks::Own, FOREIGN] {
        let (a, b) = (PoolServer::start(speaks, None), PoolServer::start(speaks, None));
        let bench = open(config(&[&a, &b]));
        bench.write_all(40);
        let (address, store) = a.kill();
        until(|| (0..40).any(|n| bench.peek(n) == Presence::Absent || !bench.read_is_right(n)));
        let there = |bench: &Bench| (0..40).filter(|&n| bench.read_is_right(n)).count();
        let left = there(&bench);
        assert!((4..=36).contains(&left), "{left} of 40 at the server that lives");
        let again = PoolServer::start_on(address, speaks, None, store);
        until(|| there(&bench) == 40);
        drop((again, b));
    }
}

#[test]
fn a_server_killed_amid_traffic_loses_blocks_and_never_bytes() {
    let server = PoolServer::own();
    let bench = open(config(&[&server]));
    bench.write_all(50);
    let reads: Vec<_> = (0..200)
        .map(|n| {
            let slot = bench.slot();
            (n % 50, slot.clone(), bench.begin_read(n % 50, slot, Bench::soon()))
        })
        .collect();
    let writes: Vec<_> = (100..150).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
    let (address, store) = server.kill();
    for (n, slot, read) in reads {
        if Bench::answer(&read).is_ok() {
            assert_eq!(bench.block_of(&slot), bench.bytes(n), "block {n} (P1)");
        }
    }
    writes.iter().for_each(|write| drop(Bench::answer(write)));
    // No connection that has not noticed yet takes a request of the next life.
    until(|| !bench.tier.servers()[0].up);
    // Empty, as after a crash: what was believed to be there is not.
    store.lock().blocks.clear();
    store.lock().namespaces.clear();
    store.lock().roots.clear();
    let again = PoolServer::start_on(address, Speaks::Own, None, store);
    until(|| can_write(&bench, 200));
    assert!(bench.read_is_right(200));
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    drop(again);
}

#[test]
fn a_reset_reaches_a_server_that_was_away() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let mut bench = open(config(&[&server]));
        bench.write_all(3);
        let (address, store) = server.kill();
        until(|| bench.peek(0) == Presence::Absent || !bench.read_is_right(0));
        let error = bench.tier.advance_and_wait(&bench.spec, 5).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let again = PoolServer::start_on(address, speaks, None, store);
        bench.epoch = bench.tier.open_and_wait(&bench.spec, 0).unwrap();
        assert!(bench.epoch >= 5);
        until(|| can_write(&bench, 7));
        let other = open(config(&[&again]));
        assert_eq!(other.epoch, bench.epoch, "{speaks:?}: the next depot knows of it");
        assert!(!other.read_is_right(0) && other.read_is_right(7));
    }
}

#[test]
fn tokens_must_match_and_a_token_never_falls_back() {
    let server = PoolServer::start(Speaks::Own, Some(TOKEN));
    let with = |token: Option<&str>, server: &PoolServer| {
        let token = token.map(|token| kvdepot_wire::own::Token::new(token.as_bytes()).unwrap());
        open(RemoteConfig { token, ..config(&[server]) })
    };
    let right = with(Some(TOKEN), &server);
    assert_eq!(right.write(1).unwrap(), Written::New);
    for wrong in [None, Some("another token than theirs")] {
        let bench = with(wrong, &server);
        until(|| bench.peek(1) == Presence::Absent);
        assert_eq!(bench.read(1).unwrap_err().kind(), ErrorKind::Unavailable);
    }
    assert!(right.read_is_right(1));
    let foreign = PoolServer::foreign();
    let bench = with(Some(TOKEN), &foreign);
    until(|| bench.peek(1) == Presence::Absent);
    assert!(bench.write(1).is_err());
    assert!(foreign.state.store.lock().values.is_empty(), "nothing is given to who cannot prove the token");
}

#[test]
fn a_protocol_can_be_insisted_on() {
    let (own, foreign) = (PoolServer::own(), PoolServer::foreign());
    let with = |protocol, server: &PoolServer| open(RemoteConfig { protocol, ..config(&[server]) });
    assert_eq!(with(RemoteProtocol::Kvdepot, &own).write(1).unwrap(), Written::New);
    assert_eq!(with(RemoteProtocol::Infinistore, &foreign).write(1).unwrap(), Written::New);
    let bench = with(RemoteProtocol::Kvdepot, &foreign);
    until(|| bench.peek(1) == Presence::Absent);
    assert!(bench.write(2).is_err());
}

/// P12: it may be ours, closing or frozen. By InfiniStore's protocol it would be a second store beside the one that
/// other nodes see.
#[test]
fn a_server_that_does_not_answer_a_hello_is_not_taken_for_infinistore_s() {
    let closes = PoolServer::start(Speaks::Foreign { answers_unknown: false }, None);
    let bench = open(config(&[&closes]));
    until(|| bench.tier.servers()[0].failures > 1);
    assert!(bench.write(1).is_err() && closes.state.store.lock().values.is_empty());
    assert_eq!(closes.state.exists.load(Ordering::SeqCst), 0, "it was not asked in InfiniStore's protocol");
    let silent = PoolServer::foreign();
    silent.set(Fault::HungHello);
    let bench = open(hasty(&[&silent]));
    until(|| bench.tier.servers()[0].failures > 0);
    let error = bench.tier.servers()[0].last_error.clone().unwrap();
    assert!(error.contains("did not answer in time"), "{error}");
    assert_eq!(silent.state.exists.load(Ordering::SeqCst), 0);
    silent.set(Fault::None);
    until(|| can_write(&bench, 2));
    assert!(!silent.state.store.lock().values.is_empty(), "its answer shows what it is");
}

/// P8, over one server: two models share it and never meet.
#[test]
fn two_models_on_one_server() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let with = |model: &str| {
            let tier = Arc::new(RemoteTier::open(config(&[&server])).unwrap());
            Bench::with(tier, spec(model, BlockLayout::new(vec![vec![5000]]).unwrap()))
        };
        let (one, two) = (with("one"), with("two"));
        one.write_all(10);
        assert_eq!(two.probe(two.keys(10)).unwrap(), 0);
        let src = two.filled(50);
        assert_eq!(Bench::answer(&two.begin_write(0, src, Bench::soon())).unwrap(), Written::New);
        assert!(one.read_is_right(0));
        assert_eq!(two.read(0).unwrap(), two.bytes(50));
    }
}

/// What one client wrote is found by another at once: absence is believed for no longer than its bound.
#[test]
fn another_client_finds_a_block_at_once() {
    let server = PoolServer::own();
    let (producer, consumer) = (open(config(&[&server])), open(config(&[&server])));
    producer.write_all(20);
    assert_eq!(consumer.probe(consumer.keys(20)).unwrap(), 20);
    assert!((0..20).all(|n| consumer.read_is_right(n)));
}

#[test]
fn servers_that_never_were_there_stall_nobody() {
    // Its port is bound, so no server of another test gets it, but nobody listens.
    let port = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&port, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(getsockname(&port).unwrap()).unwrap();
    let bench = open(RemoteConfig { servers: vec![address.to_string()], ..config(&[]) });
    assert_eq!(bench.epoch, 0);
    until(|| bench.peek(0) == Presence::Absent);
    assert!(bench.write(0).is_err() && bench.read(0).is_err());
    assert_eq!(bench.probe(bench.keys(3)).unwrap_or(0), 0);
}

/// P1: a removal that is answered is not undone by a write that timed out before, and that the server makes later.
#[test]
fn a_removal_does_not_overtake_a_write_that_was_given_up() {
    for speaks in [Speaks::Own, FOREIGN] {
        let server = PoolServer::start(speaks, None);
        let bench = open(hasty(&[&server]));
        write_all(&bench, 1);
        server.set(Fault::LatePuts);
        // Given up with its connection, which the server has not noticed.
        let n = std::cell::Cell::new(100);
        until(|| {
            n.set(n.get() + 1);
            // Not one that was never sent: the server has it, and the client has given it up.
            bench.write(n.get()).is_err() && server.state.has_held(&bench.key(n.get()).hash.to_string())
        });
        let n = n.get();
        until(|| bench.tier.servers()[0].up);
        let error = bench.remove(n).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Busy | ErrorKind::Unavailable), "{speaks:?}: {error}");
        server.set(Fault::None);
        until(|| bench.remove(n).is_ok());
        assert!(
            server.state.kept_back.load(Ordering::SeqCst) > 0,
            "{speaks:?}: the server has ended the write"
        );
        assert!(!bench.read_is_right(n), "{speaks:?}: it came back");
        // A removal that was given up may be carried out late.
        until(|| bench.write(n).is_ok() && bench.read_is_right(n));
    }
}

/// P1: what a server read before a removal is not taken for present after it.
#[test]
fn an_answer_from_before_a_removal_is_not_believed_after_it() {
    let server = PoolServer::own();
    // The removal must not wait behind the read: it takes the other connection.
    server.state.in_flight_max.store(1, Ordering::SeqCst);
    let bench = open(config(&[&server]));
    write_all(&bench, 1);
    server.set(Fault::LateGets);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| bench.read(0));
        until(|| server.state.hanging.load(Ordering::SeqCst) > 0);
        until(|| bench.remove(0).is_ok());
        server.set(Fault::None);
        assert!(read.join().unwrap().is_ok(), "the server had read it before");
    });
    assert_ne!(bench.peek(0), Presence::Present, "it is removed");
}
