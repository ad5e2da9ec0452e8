//! A batch travels as one request where the protocol has one: for reads, writes and removals.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use crate::pool_server::waits::{PATIENCE, until};
use crate::pool_server::{Fault, PoolServer};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{Fetched, ReadItem, RemoteConfig, RemoteTier, WriteItem, Written};

const BLOCKS: u64 = 20;

#[test]
fn a_batch_for_one_server_is_one_request() {
    let server = PoolServer::own();
    let config = RemoteConfig { timeout: PATIENCE, ..RemoteConfig::new([server.name()]) };
    let bench = Bench::new(Arc::new(RemoteTier::open(config).unwrap()));
    let count = || {
        let state = &server.state;
        (
            state.gets.load(Ordering::SeqCst),
            state.puts.load(Ordering::SeqCst),
            state.removes.load(Ordering::SeqCst),
        )
    };
    let (send, written) = channel();
    let writes = (0..BLOCKS).map(|n| {
        let send = send.clone();
        let done = Box::new(move |outcome| drop(send.send(outcome)));
        WriteItem { key: bench.key(n), src: bench.filled(n), done }
    });
    bench.tier.write(writes.collect(), Bench::soon());
    assert!((0..BLOCKS).all(|_| Bench::answer(&written).unwrap() == Written::New));
    assert_eq!(count(), (0, 1, 0));

    let (send, read) = channel();
    let reads = (0..BLOCKS).map(|n| {
        let (send, dst) = (send.clone(), bench.slot());
        let kept = dst.clone();
        let done = Box::new(move |outcome| drop(send.send((n, kept, outcome))));
        ReadItem::new(bench.key(n), dst, done)
    });
    bench.tier.read(reads.collect(), Bench::soon());
    for _ in 0..BLOCKS {
        let (n, slot, outcome) = Bench::answer(&read);
        assert_eq!(outcome.unwrap(), Fetched::Whole);
        assert_eq!(bench.block_of(&slot), bench.bytes(n));
    }
    assert_eq!(count(), (1, 1, 0));

    let (send, removed) = channel();
    let done = Box::new(move |outcome| drop(send.send(outcome)));
    bench.tier.remove((0..BLOCKS).map(|n| bench.key(n)).collect(), done);
    Bench::answer(&removed).unwrap();
    assert_eq!(count(), (1, 1, 1));
    assert!((0..BLOCKS).all(|n| !bench.read_is_right(n)));
}

/// There the requests of a connection wait for each other.
#[test]
fn a_batch_for_an_infinistore_server_uses_all_connections() {
    let server = PoolServer::foreign();
    let config = RemoteConfig { timeout: PATIENCE, ..RemoteConfig::new([server.name()]) };
    let connections = config.connections;
    let bench = Bench::new(Arc::new(RemoteTier::open(config).unwrap()));
    until(|| bench.tier.servers()[0].connections == connections);
    bench.write_all(BLOCKS);
    let before = server.state.gets.load(Ordering::SeqCst);
    server.set(Fault::Held);
    let (send, read) = channel();
    let reads = (0..BLOCKS).map(|n| {
        let send = send.clone();
        ReadItem::new(bench.key(n), bench.slot(), Box::new(move |outcome| drop(send.send(outcome))))
    });
    bench.tier.read(reads.collect(), Bench::soon());
    let asked = || server.state.gets.load(Ordering::SeqCst) - before;
    until(|| asked() == connections as u64);
    server.set(Fault::None);
    assert!((0..BLOCKS).all(|_| Bench::answer(&read).unwrap() == Fetched::Whole));
}
