//! InfiniStore servers that are slow, or say "there" for ever: a request ends by its deadline, however many questions it
//! is made of (P2), and the connection goes on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::pool_server::waits::{ends, until};
use crate::pool_server::{Fault, PoolServer};
use kvdepot_core::ErrorKind;
use kvdepot_core::limits::REMOTE_FOREIGN_EPOCHS_MAX;
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{RemoteConfig, RemoteProtocol, RemoteTier, Tier};

/// A silence that no test sits out.
const NEVER: Duration = Duration::from_secs(3600);
/// What a request that must not be answered has.
const SHORT: Duration = Duration::from_millis(100);

fn tier(server: &PoolServer, timeout: Duration) -> Arc<RemoteTier> {
    let config = RemoteConfig::new([server.name()]);
    let protocol = RemoteProtocol::Infinistore;
    Arc::new(RemoteTier::open(RemoteConfig { timeout, connections: 1, protocol, ..config }).unwrap())
}

#[test]
fn many_questions_end_by_the_deadline_and_the_connection_goes_on() {
    let server = PoolServer::foreign();
    let bench = Bench::new(tier(&server, NEVER));
    bench.write_all(1);
    let before = server.state.exists.load(Ordering::SeqCst);
    server.set(Fault::Held);
    let (send, answer) = channel();
    let keys = (100..200).map(|n| bench.key(n)).collect();
    bench.tier.probe(keys, Instant::now() + SHORT, Box::new(move |outcome| drop(send.send(outcome))));
    assert_eq!(Bench::answer(&answer).unwrap_err().kind(), ErrorKind::Timeout);
    server.set(Fault::None);
    assert!(bench.read_is_right(0));
    // It may be that the deadline had passed before a connection took the request.
    let asked = server.state.exists.load(Ordering::SeqCst) - before;
    assert!(asked <= 1, "{asked}: nothing is asked that nobody waits for");
    assert_eq!(server.state.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_value_that_comes_late_is_dropped_and_the_connection_goes_on() {
    let server = PoolServer::foreign();
    let bench = Bench::new(tier(&server, NEVER));
    bench.write_all(2);
    server.set(Fault::Held);
    let slot = bench.slot();
    let late = bench.begin_read(0, slot.clone(), Instant::now() + SHORT);
    assert_eq!(Bench::answer(&late).unwrap_err().kind(), ErrorKind::Timeout);
    slot.write_at(0, &bench.bytes(7));
    server.set(Fault::None);
    assert!(bench.read_is_right(1) && bench.read_is_right(0));
    assert_eq!(bench.block_of(&slot), bench.bytes(7), "nobody writes into memory that was given back (P1)");
    assert_eq!(server.state.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_value_that_stops_half_way_ends_by_the_deadline() {
    let server = PoolServer::foreign();
    let bench = Bench::new(tier(&server, NEVER));
    bench.write_all(1);
    server.set(Fault::HangAmidValue);
    let late = bench.begin_read(0, bench.slot(), Instant::now() + SHORT);
    assert_eq!(Bench::answer(&late).unwrap_err().kind(), ErrorKind::Timeout);
    drop(server);
}

/// A question that is answered at once, without end.
#[test]
fn a_server_where_every_epoch_is_there_holds_up_nobody() {
    let server = PoolServer::foreign();
    let tier = tier(&server, SHORT);
    until(|| tier.servers()[0].up);
    server.set(Fault::AllThere);
    let opened = ends(move || Bench::new(tier));
    assert_eq!(opened.epoch, 0, "what is not certain is not believed");
    let (tier, spec) = (Arc::clone(&opened.tier), opened.spec.clone());
    let error = ends(move || tier.advance_and_wait(&spec, 3)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    ends(move || drop(opened));
}

#[test]
fn no_more_epochs_are_looked_at_than_can_be() {
    let server = PoolServer::foreign();
    let bench = Bench::new(tier(&server, NEVER));
    server.set(Fault::AllThere);
    let before = server.state.exists.load(Ordering::SeqCst);
    server.disconnect();
    let error = || bench.tier.servers()[0].last_error.clone().unwrap_or_default();
    // As long as the questions go on, however slowly.
    let asked = || server.state.exists.load(Ordering::SeqCst);
    while !error().contains("reset more often") {
        let so_far = asked();
        until(|| asked() > so_far || error().contains("reset more often"));
    }
    assert!(!bench.tier.servers()[0].up, "{}", error());
    assert!(server.state.exists.load(Ordering::SeqCst) - before > u64::from(REMOTE_FOREIGN_EPOCHS_MAX) / 2);
    server.set(Fault::None);
    until(|| bench.write(1).is_ok());
    let error = bench.tier.advance_and_wait(&bench.spec, REMOTE_FOREIGN_EPOCHS_MAX).unwrap_err();
    assert!(error.to_string().contains("so many resets"), "{error}");
}
