//! RDMA at the wire door, over the stand-in under many schedules, or over a device (`common/rdma.rs`): P1 whole or absent, P4 nothing is left behind, and answers in the order of requests.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

mod common;
#[path = "common/rdma.rs"]
mod rdma;
#[path = "common/wire.rs"]
mod wire;

use kvdepot_wire::infini::{RemoteMeta, op};
use rdma::{Lab, on_device};
use serde_json::json;
use wire::{bytes, is_closed};

const MIB: u64 = 1 << 20;
const SEEDS: u64 = 12;

/// Runs `test` with many schedules of the stand-in, or once on a device.
fn each_seed(test: impl Fn(u64)) {
    for seed in 0..if on_device() { 1 } else { SEEDS } {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(seed)));
        if let Err(panic) = outcome {
            eprintln!("failed with seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}{i}")).collect()
}

#[test]
fn values_come_back_exactly_over_all_pieces_of_memory() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 32 * MIB, json!({"work_requests_max": 4 + seed as u32}));
        let mut client = lab.client();
        for len in [1, 100, 4096, 65_536, 65_537, 200_000, 1_000_001] {
            client.memory.write(0, &bytes(len, seed as u8));
            client.write(&[("key", 0)], len as u32);
            assert_eq!(client.answers(1), [200], "{len} bytes");
            client.read(&[("key", 2 << 20)], len as u32);
            assert_eq!(client.answers(1), [200], "{len} bytes");
            assert!(client.bytes(2 << 20, len) == bytes(len, seed as u8), "{len} bytes");
            assert!(client.tcp.get("key").unwrap() == bytes(len, seed as u8), "{len} bytes by TCP");
        }
        lab.settled();
    });
}

#[test]
fn batches_go_where_they_belong() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 32 * MIB, json!({"work_requests_max": 7}));
        let mut client = lab.client();
        let (count, len) = (40, 30_000);
        let keys = names("k", count);
        for i in 0..count {
            client.memory.write(i * len, &bytes(len, i as u8));
        }
        let blocks: Vec<(&str, usize)> =
            keys.iter().enumerate().map(|(i, k)| (k.as_str(), i * len)).collect();
        client.write(&blocks, len as u32);
        assert_eq!(client.answers(1), [200]);
        let base = 4 << 20;
        let back: Vec<(&str, usize)> =
            keys.iter().rev().enumerate().map(|(i, k)| (k.as_str(), base + i * len)).collect();
        client.read(&back, len as u32 + 5);
        assert_eq!(client.answers(1), [200]);
        for i in 0..count {
            assert!(client.bytes(base + i * len, len) == bytes(len, (count - 1 - i) as u8), "block {i}");
        }
        lab.settled();
    });
}

/// The protocol's answers carry no id: one out of order would pass another value's bytes as the client's own.
#[test]
fn answers_come_in_the_order_of_requests() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 32 * MIB, json!({"work_requests_max": 5}));
        let mut client = lab.client();
        let len = 70_000;
        client.memory.write(0, &bytes(len, 1));
        client.write(&[("there", 0)], len as u32);
        assert_eq!(client.answers(1), [200]);
        let mut expected = Vec::new();
        for i in 0..60usize {
            let at = (1 << 20) + i * len;
            match (i as u64).wrapping_mul(seed * 2 + 7) % 6 {
                0 | 1 => {
                    client.read(&[("there", at)], len as u32);
                    expected.push(200);
                }
                2 => {
                    client.read(&[("there", at), ("none", at)], len as u32);
                    expected.push(404);
                }
                3 => {
                    client.read(&[("there", at)], 100);
                    expected.push(400);
                }
                4 => {
                    client.send_raw(b"no flatbuffer at all");
                    expected.push(400);
                }
                _ => {
                    client.write(&[("other", 0)], len as u32);
                    expected.push(200);
                }
            }
        }
        assert_eq!(client.answers(60), expected);
        for (i, _) in expected.iter().enumerate().filter(|(_, code)| **code == 200) {
            let got = client.bytes((1 << 20) + i * len, len);
            assert!(got == bytes(len, 1) || got.iter().all(|byte| *byte == 0), "answer {i}");
        }
        lab.settled();
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_the_connection_stays() {
    let lab = Lab::open(1, 8 * MIB, json!({}));
    let mut client = lab.client();
    client.memory.write(0, &bytes(4096, 3));
    client.write(&[("key", 0)], 4096);
    // Requests sent before a value's answer has arrived may not see it.
    assert_eq!(client.answers(1), [200]);
    let good = client.meta(op::RDMA_READ, &[("key", 8192)], 4096);
    let bad = [
        RemoteMeta { block_bytes: 0, ..good.clone() },
        RemoteMeta { block_bytes: u32::MAX, ..good.clone() },
        RemoteMeta { addresses: vec![], ..good.clone() },
        RemoteMeta { addresses: vec![1, 2], ..good.clone() },
        RemoteMeta { keys: vec![], addresses: vec![], ..good.clone() },
        RemoteMeta { keys: vec![b""], ..good.clone() },
        RemoteMeta { op: b'Z', ..good.clone() },
    ];
    for meta in &bad {
        client.send_raw(&meta.encode());
    }
    // One is larger than the pool; another is a value smaller than its block.
    client.write(&[("huge", 0)], 9 << 20);
    client.read(&[("key", 8192)], 5000);
    let mut expected = vec![400; bad.len()];
    expected.extend([507, 200]);
    assert_eq!(client.answers(expected.len()), expected);
    assert!(client.bytes(8192, 4096) == bytes(4096, 3));
    assert_eq!(client.bytes(8192 + 4096, 904), [0; 904], "no more than the value is written");
    lab.settled();
}

/// A request that names memory outside of the client's region ends its connection. Nothing of it becomes visible, and
/// nothing stays reserved.
#[test]
fn memory_that_the_client_may_not_name_ends_its_connection() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 8 * MIB, json!({}));
        let mut witness = lab.client();
        witness.memory.write(0, &bytes(50_000, 9));
        witness.write(&[("known", 0)], 50_000);
        assert_eq!(witness.answers(1), [200]);
        let free = lab.wired.stat("pool_free_bytes");
        for kind in 0..4 {
            let mut client = lab.client();
            let op = if kind < 2 { op::RDMA_WRITE } else { op::RDMA_READ };
            let mut meta = client.meta(op, &[("known", 0)], 50_000);
            if kind % 2 == 0 {
                meta.rkey ^= 0x5500;
            } else {
                // Its last bytes are behind the region's end.
                meta.addresses[0] = client.memory.mr().remote((16 << 20) - 49_999).address;
            }
            let meta = meta.encode();
            client.send_raw(&meta);
            client.read(&[("known", 0)], 50_000);
            // A device's queue pair may notice it late; TCP tells the client.
            let ended = if on_device() {
                is_closed(&mut client.tcp.0)
            } else {
                client.take(2).iter().all(Result::is_err)
            };
            assert!(ended, "kind {kind}");
            lab.wired.wait_stat("pool_free_bytes", free);
            lab.wired.wait_stat("pool_leased_bytes", 0);
            assert!(witness.tcp.get("known").unwrap() == bytes(50_000, 9));
            witness.read(&[("known", 1 << 20)], 50_000);
            assert_eq!(witness.answers(1), [200], "others are served");
        }
        lab.settled();
    });
}

/// P4: a client that leaves with requests in flight leaves neither slots nor leases, and no late byte lands in a slot
/// that has been given to another.
#[test]
fn a_client_that_leaves_in_the_middle_leaves_nothing() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 4 * MIB, json!({"work_requests_max": 6}));
        let mut witness = lab.wired.infini();
        let keys = names("w", 9);
        for round in 0..4u8 {
            let mut client = lab.client();
            client.memory.write(0, &bytes(1 << 20, 200));
            for i in 0..20 {
                if i % 2 == 0 {
                    client.write(&[("lost", 0), ("lost too", 4096)], 300_000);
                } else {
                    client.read(&[("w3", 2 << 20)], 400_000);
                }
            }
            match round {
                0 => {}
                1 => drop(client.take(3)),
                2 if !on_device() => lab.standin().cut(client.qp.number()),
                _ => client.qp.stop().unwrap(),
            }
            // Requests may be served only now, since server and device run concurrently, so wait for their end. A real
            // device takes long to notice that a queue pair is gone.
            client.hang_up();
            lab.is_left_with(1);
            lab.wired.wait_stat("pool_filling_bytes", 0);
            lab.wired.wait_stat("pool_leased_bytes", 0);
            // Nearly all of the pool, so that every returned slot is used again.
            for (i, key) in keys.iter().enumerate() {
                witness.put(key, &bytes(400_000, round * 16 + i as u8));
            }
            for (i, key) in keys.iter().enumerate() {
                let value = witness.get(key).expect("the last values stay");
                assert!(value == bytes(400_000, round * 16 + i as u8), "round {round}, {key}");
            }
        }
        lab.settled();
    });
}

#[test]
fn values_that_find_no_room_are_refused_after_a_while_and_stored_when_there_is() {
    let lab = Lab::open_with(3, common::config(4 * MIB, json!({})), json!({}), json!({"put_wait_ms": 100}));
    let mut client = lab.client();
    // Together more than the pool: refused entirely.
    let keys = names("k", 10);
    let blocks: Vec<(&str, usize)> = keys.iter().map(|key| (key.as_str(), 0)).collect();
    client.write(&blocks, 1 << 20);
    assert_eq!(client.answers(1), [507]);
    assert!(keys.iter().all(|key| !client.tcp.exists(key)));
    // One at a time, each evicts the one before.
    for key in &keys {
        client.write(&[(key, 0)], 1 << 20);
        assert_eq!(client.answers(1), [200]);
    }
    assert!(client.tcp.exists("k9") && !client.tcp.exists("k0"));
    lab.settled();
}

#[test]
fn many_clients_share_few_receives() {
    each_seed(|seed| {
        let lab = Lab::open(seed, 16 * MIB, json!({"receives": 2, "threads": 2}));
        let mut clients: Vec<_> = (0..6).map(|_| lab.client()).collect();
        for (i, client) in clients.iter_mut().enumerate() {
            client.memory.write(0, &bytes(20_000, i as u8));
            for key in names(&format!("c{i}-"), 10) {
                client.write(&[(&key, 0)], 20_000);
            }
        }
        // All of them poll, since the stand-in only works while it is polled.
        for client in &mut clients {
            assert_eq!(client.answers(10), [200; 10]);
        }
        for (i, client) in clients.iter_mut().enumerate() {
            let key = format!("c{}-9", (i + 1) % 6);
            client.read(&[(&key, 1 << 20)], 20_000);
            assert_eq!(client.answers(1), [200]);
            assert!(client.bytes(1 << 20, 20_000) == bytes(20_000, ((i + 1) % 6) as u8));
        }
        lab.settled();
    });
}
