//! Names of servers, and their addresses: a lookup that hangs, or an address where nobody answers, is a miss in bounded
//! time, and closing waits for neither (P2).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use crate::pool_server::PoolServer;
use crate::pool_server::waits::{PATIENCE, ends, until};
use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{Presence, RemoteConfig, RemoteTier, Tier};
use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, getsockname, listen, socket_with};

const NAME: &str = "pool.test:9";

fn config(server: &str, timeout: Duration) -> RemoteConfig {
    RemoteConfig { timeout, connections: 2, ..RemoteConfig::new([server]) }
}

/// A tier whose lookups hang until something is sent, or nobody can any more; how many have begun.
fn with_hung_lookup(timeout: Duration, found: SocketAddr) -> (RemoteTier, Sender<()>, Arc<AtomicU64>) {
    let (release, hung) = channel::<()>();
    let (hung, begun) = (Mutex::new(hung), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&begun);
    let lookup = move |name: &str| {
        assert_eq!(name, NAME);
        count.fetch_add(1, Ordering::SeqCst);
        let _ = hung.lock().recv();
        Ok(vec![found])
    };
    (RemoteTier::open_with_lookup(config(NAME, timeout), lookup).unwrap(), release, begun)
}

#[test]
fn a_lookup_that_hangs_is_a_miss_and_no_second_one_is_begun() {
    let server = PoolServer::own();
    let (tier, release, begun) = with_hung_lookup(Duration::from_secs(1), server.address);
    let bench = ends(move || Bench::new(Arc::new(tier)));
    until(|| bench.peek(0) == Presence::Absent);
    let at_once = [bench.read(0).unwrap_err(), bench.write(0).unwrap_err()];
    assert!(at_once.iter().all(|error| error.kind() == ErrorKind::Unavailable), "{at_once:?}");
    until(|| bench.tier.servers()[0].failures >= 3);
    let state = &bench.tier.servers()[0];
    assert!(state.last_error.as_ref().is_some_and(|error| error.contains("name service")), "{state:?}");
    assert_eq!(begun.load(Ordering::SeqCst), 1, "lookups that hang do not pile up");
    // What was found late is used.
    drop(release);
    until(|| bench.write(1).is_ok());
    until(|| bench.read_is_right(1));
}

#[test]
fn closing_waits_for_no_lookup() {
    let server = PoolServer::own();
    // Longer than this test may take.
    let (tier, release, begun) = with_hung_lookup(PATIENCE * 60, server.address);
    until(|| begun.load(Ordering::SeqCst) == 1);
    ends(move || drop(tier));
    assert!(release.send(()).is_ok(), "it still hangs");
}

#[test]
fn an_address_needs_no_lookup() {
    let server = PoolServer::own();
    let lookup = |_: &str| -> std::io::Result<Vec<SocketAddr>> { unreachable!("nobody asks") };
    let tier = RemoteTier::open_with_lookup(config(&server.name(), PATIENCE), lookup).unwrap();
    let bench = Bench::new(Arc::new(tier));
    bench.write_all(2);
    assert!(bench.read_is_right(1));
}

#[test]
fn a_name_that_is_not_known_is_a_miss_until_it_is() {
    let server = PoolServer::own();
    let (found, is_known) = (server.address, Arc::new(AtomicU64::new(0)));
    let known = Arc::clone(&is_known);
    let lookup = move |_: &str| match known.load(Ordering::SeqCst) {
        0 => Err(std::io::Error::other("no such name")),
        _ => Ok(vec![found]),
    };
    let tier = RemoteTier::open_with_lookup(config(NAME, PATIENCE), lookup).unwrap();
    let bench = Bench::new(Arc::new(tier));
    until(|| bench.peek(0) == Presence::Absent);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Unavailable);
    is_known.store(1, Ordering::SeqCst);
    until(|| bench.write(1).is_ok());
}

/// Where nobody is let in any more: what a host that drops packets looks like. It is so as long as the sockets live.
fn full() -> (SocketAddr, Vec<std::os::fd::OwnedFd>) {
    let tcp = |flags| socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let listener = tcp(SocketFlags::CLOEXEC);
    bind(&listener, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    listen(&listener, 0).unwrap();
    let address: SocketAddr = SocketAddrV4::try_from(getsockname(&listener).unwrap()).unwrap().into();
    let mut held = vec![listener];
    for _ in 0..4 {
        let guest = tcp(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        // It waits in the queue, or to get there.
        let _ = connect(&guest, &address);
        held.push(guest);
    }
    (address, held)
}

#[test]
fn a_first_address_that_never_answers_leaves_time_for_the_second() {
    let (silent, held) = full();
    let refused = TcpStream::connect_timeout(&silent, Duration::from_millis(50)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::TimedOut, "nobody is let in");
    let server = PoolServer::own();
    let found = server.address;
    let lookup = move |_: &str| Ok(vec![silent, found]);
    let tier = RemoteTier::open_with_lookup(config(NAME, Duration::from_secs(1)), lookup).unwrap();
    let bench = Bench::new(Arc::new(tier));
    until(|| bench.write(1).is_ok());
    until(|| bench.read_is_right(1));
    drop(held);
}
