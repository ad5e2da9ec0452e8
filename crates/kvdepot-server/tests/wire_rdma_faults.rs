//! RDMA at the wire door with something missing, full, slow or wrong: P2 bounded, P5 caps, and errors that give the
//! reason.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

mod common;
#[path = "common/rdma.rs"]
mod rdma;
#[path = "common/wire.rs"]
mod wire;

use std::sync::Arc;
use std::time::Instant;

use common::{LONG, config};
use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::Depot;
use kvdepot_server::wire::{WireConfig, WireDoor};
use kvdepot_standin_verbs::StandIn;
use kvdepot_wire::infini::{ConnInfo, Reply, Request};
use rdma::{Lab, MESSAGE_BYTES, on_device};
use serde_json::json;
use wire::{bytes, is_closed};

const MIB: u64 = 1 << 20;

/// Returns why a door with this RDMA does not open.
fn refusal(rdma: &serde_json::Value) -> Error {
    let depot = Arc::new(Depot::start_private(config(4 * MIB, json!({}))).unwrap());
    let text = json!({"service_port": 0, "rdma": rdma}).to_string();
    WireConfig::from_json(&text).and_then(|config| WireDoor::open(config, &depot)).expect_err("cannot open")
}

#[test]
fn a_machine_without_rdma_says_what_is_missing() {
    if on_device() {
        return;
    }
    let error = refusal(&json!({"library": "/no/such/libibverbs.so.1"}));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("libibverbs was not found"), "{error}");
    let standin = StandIn::new(1);
    let with = |key: &str, value: serde_json::Value| {
        let mut rdma = json!({"library": standin.path()});
        rdma[key] = value;
        refusal(&rdma).to_string()
    };
    assert!(with("device", json!("mlx5_9")).contains("standin0"), "the devices that are there are named");
    assert!(with("link", json!("Ethernet")).contains("link type"));
    assert!(with("gid_index", json!(200)).contains("gid_index=200"));
    assert!(with("threads", json!(0)).contains("1 to 16 threads"));
    standin.fail("ibv_reg_mr", 0, 1, rustix::io::Errno::NOMEM.raw_os_error());
    assert!(with("port", json!(1)).contains("ulimit -l"), "the limit on locked memory is the usual reason");
    standin.set("devices", 0);
    assert!(with("port", json!(1)).contains("no RDMA device"));
    assert_eq!(standin.get("violations"), 0);
}

#[test]
fn connection_data_without_sense_and_a_device_without_room_are_refused() {
    if on_device() {
        return;
    }
    let lab = Lab::open(1, 4 * MIB, json!({}));
    let mut tcp = lab.wired.infini();
    let info = ConnInfo { qpn: 1, psn: 2, gid: [0; 16], lid: 3, mtu: 0 };
    assert_eq!(tcp.ask(&Request::Exchange(info)), Reply::Code(503));
    lab.standin().fail("ibv_create_qp", 0, 1, rustix::io::Errno::NOMEM.raw_os_error());
    assert_eq!(tcp.ask(&Request::Exchange(ConnInfo { mtu: 5, ..info })), Reply::Code(503));
    // The connection is still in step, and the next one is served.
    assert_eq!(tcp.put("key", b"value"), Reply::Code(200));
    let mut client = lab.client();
    client.read(&[("key", 0)], 100);
    assert_eq!(client.answers(1), [200]);
    assert_eq!(client.bytes(0, 5), b"value");
    lab.settled();
}

#[test]
fn values_come_up_from_tiers() {
    let directory = tempfile::tempdir().unwrap();
    let depot = || {
        let posix = json!({"directories": [directory.path()], "read_threads": 4, "write_threads": 2});
        config(16 * MIB, json!({"pipeline": "Cache|Posix", "posix": posix}))
    };
    let keys: Vec<String> = (0..8).map(|i| format!("k{i}")).collect();
    {
        let lab = Lab::open_with(1, depot(), json!({}), json!({}));
        let mut client = lab.client();
        client.memory.write(0, &bytes(1 << 20, 5));
        // A value is not written if the tier opens too late on a slow disk: it is put again.
        let end = Instant::now() + LONG;
        while lab.wired.depot.direct().stats()["tiers"][0]["blocks"] != 8 {
            assert!(Instant::now() < end, "{}", lab.wired.depot.direct().stats());
            for (i, key) in keys.iter().enumerate() {
                client.write(&[(key, i * 1000)], 100_000);
            }
            assert_eq!(client.answers(8), [200; 8]);
            lab.wired.wait_stat("writes_queued", 0);
        }
    }
    for seed in 0..6 {
        let lab = Lab::open_with(seed, depot(), json!({}), json!({}));
        let mut client = lab.client();
        let mut expected = Vec::new();
        for (i, key) in keys.iter().enumerate() {
            client.read(&[(key, i * 100_000)], 100_000);
            client.read(&[("none", 0)], 100_000);
            expected.extend([200, 404]);
        }
        assert_eq!(client.answers(16), expected, "seed {seed}");
        for i in 0..keys.len() {
            let whole = bytes(1 << 20, 5);
            assert!(client.bytes(i * 100_000, 100_000) == whole[i * 1000..][..100_000], "seed {seed}, {i}");
        }
        lab.settled();
    }
}

/// Memory that the pool may grow to is registered when it is used, not before: registered memory is taken for good.
#[test]
fn memory_that_the_pool_grows_by_is_registered_when_it_is_used() {
    if on_device() {
        return;
    }
    let grows = json!({"pool_bytes_max": 64 * MIB, "pool_grow_bytes": 4 * MIB});
    let lab = Lab::open_with(5, config(4 * MIB, grows), json!({"region_bytes": MIB}), json!({}));
    let mut client = lab.client();
    client.memory.write(0, &bytes(1 << 20, 1));
    for i in 0..24 {
        client.write(&[(&format!("k{i}"), i)], 900_000);
        assert_eq!(client.answers(1), [200]);
    }
    assert!(lab.standin().get("regions") < 50, "{} regions", lab.standin().get("regions"));
    for i in 0..24 {
        client.read(&[(&format!("k{i}"), 8 << 20)], 900_000);
        assert_eq!(client.answers(1), [200]);
        assert!(client.bytes(8 << 20, 900_000) == bytes(1 << 20, 1)[i..i + 900_000]);
    }
    lab.settled();
}

/// P2: leases do not wait forever for a client that takes no answers.
#[test]
fn a_client_that_takes_no_answers_is_ended() {
    let lab = Lab::open_with(2, config(8 * MIB, json!({})), json!({}), json!({"stall_timeout_ms": 5_000}));
    let mut witness = lab.client();
    witness.memory.write(0, &bytes(50_000, 1));
    witness.write(&[("key", 0)], 50_000);
    assert_eq!(witness.answers(1), [200]);
    let mut client = lab.client();
    client.receives = false;
    for _ in 0..5 {
        client.read(&[("key", 0)], 50_000);
    }
    // Leased first, or the wait below proves nothing; the stand-in only works while it is polled.
    let deadline = std::time::Instant::now() + common::LONG;
    while lab.wired.stat("pool_leased_bytes") == 0 {
        assert!(std::time::Instant::now() < deadline, "the requests do not arrive");
        client.poll();
    }
    lab.settled();
    witness.read(&[("key", 1 << 20)], 50_000);
    assert_eq!(witness.answers(1), [200]);
}

#[test]
fn a_request_longer_than_the_receives_ends_its_connection_only() {
    let lab = Lab::open(4, 8 * MIB, json!({"receive_bytes": 1024}));
    let mut witness = lab.client();
    for _ in 0..20 {
        let mut client = lab.client();
        client.send_raw(&[7; MESSAGE_BYTES]);
        // A device may be stopped before it has refused the message; then TCP tells the client.
        assert!(if on_device() { is_closed(&mut client.tcp.0) } else { client.take(1)[0].is_err() });
    }
    // More than there are receives: each of them was returned.
    witness.memory.write(0, b"value");
    witness.write(&[("key", 0)], 5);
    assert_eq!(witness.answers(1), [200]);
    lab.settled();
}

/// If a poller's device refuses work, that connection ends, whatever was begun.
#[test]
fn work_that_the_device_refuses_ends_the_connection() {
    if on_device() {
        return;
    }
    for seed in 0..8 {
        let lab = Lab::open(seed, 8 * MIB, json!({}));
        let free = lab.wired.stat("pool_free_bytes");
        let mut client = lab.client();
        client.memory.write(0, &bytes(300_000, 1));
        // The first call is the client's own, the second the server's.
        lab.standin().fail("post_send", 1, 1, rustix::io::Errno::NOMEM.raw_os_error());
        client.write(&[("key", 0)], 300_000);
        assert!(is_closed(&mut client.tcp.0), "seed {seed}: the client is told");
        lab.wired.wait_stat("pool_free_bytes", free);
        assert!(!lab.wired.infini().exists("key"));
        lab.settled();
    }
}
