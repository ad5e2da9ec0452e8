//! The Remote tier passes the suite of all tiers, over both protocols.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::pool_server::{PoolServer, Speaks};
use kvdepot_tier::{RemoteConfig, RemoteProtocol, RemoteTier, Tier, conformance};

/// Settings under which nothing depends on how fast this machine is.
fn config(servers: &[PoolServer]) -> RemoteConfig {
    let mut config = RemoteConfig::new(servers.iter().map(PoolServer::name));
    config.timeout = Duration::from_secs(30);
    config.absent_ttl = Duration::from_secs(3600);
    config.present_ttl = Duration::from_secs(3600);
    config
}

fn check(speaks: Speaks, protocol: RemoteProtocol, count: usize, connections: usize) {
    // Servers live as long as the suite, each tier has its own.
    let servers = RefCell::new(Vec::new());
    conformance::check(&|| {
        let fresh: Vec<PoolServer> = (0..count).map(|_| PoolServer::start(speaks, None)).collect();
        let config = RemoteConfig { protocol, connections, ..config(&fresh) };
        servers.borrow_mut().extend(fresh);
        Arc::new(RemoteTier::open(config).unwrap()) as Arc<dyn Tier>
    });
    drop(servers);
}

#[test]
fn one_server() {
    check(Speaks::Own, RemoteProtocol::Auto, 1, 4);
}

#[test]
fn three_servers_with_one_connection_each() {
    check(Speaks::Own, RemoteProtocol::Auto, 3, 1);
}

#[test]
fn an_infinistore_server() {
    check(Speaks::Foreign { answers_unknown: true }, RemoteProtocol::Auto, 1, 4);
}

#[test]
fn two_infinistore_servers_that_close_on_a_hello() {
    check(Speaks::Foreign { answers_unknown: false }, RemoteProtocol::Infinistore, 2, 2);
}

#[test]
fn a_client_that_comes_back_finds_all() {
    for speaks in [Speaks::Own, Speaks::Foreign { answers_unknown: true }] {
        // The suite's checks each begin with an empty place, and share it among their own tiers.
        let servers = [PoolServer::start(speaks, None), PoolServer::start(speaks, None)];
        conformance::check_persistent(&|| Arc::new(RemoteTier::open(config(&servers)).unwrap()));
    }
}
