//! InfiniStore's protocol at the wire door: P1 whole or absent, and inputs that crashed or corrupted its own server.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::io::{Read, Write};
use std::net::Shutdown;

use crate::common::config;
use crate::wire::{Wired, bytes, is_closed};
use kvdepot_wire::infini::{ConnInfo, Reply, Request, TcpOp};
use serde_json::json;

const MIB: u64 = 1 << 20;

fn open() -> Wired {
    Wired::open(config(64 * MIB, json!({})), json!({}))
}

#[test]
fn values_of_all_lengths_come_back_exactly() {
    let wired = open();
    let mut client = wired.infini();
    for len in [1, 100, 4096, 65_536, 65_537, 200_000, 1 << 20, 5_000_001] {
        assert_eq!(client.put("key", &bytes(len, 1)), Reply::Code(200));
        assert!(client.get("key").unwrap() == bytes(len, 1), "{len} bytes");
        assert!(client.exists("key"));
    }
    assert!(!client.exists("other") && !client.exists(""));
    assert!(client.get("other").is_none());
    assert!(client.exists("key"), "the connection is in step after a miss");
}

#[test]
fn match_counts_leading_keys_and_delete_counts_what_was_there() {
    let wired = open();
    let mut client = wired.infini();
    for key in ["p0", "p1", "p2"] {
        client.put(key, b"value");
    }
    let ask = |client: &mut crate::wire::Infini, keys: &[&str]| {
        client.ask(&Request::Match(keys.iter().map(|key| key.as_bytes()).collect()))
    };
    assert_eq!(ask(&mut client, &["p0", "p1", "p2", "p3"]), Reply::Number(2));
    assert_eq!(ask(&mut client, &["none", "p0"]), Reply::Number(-1));
    assert_eq!(ask(&mut client, &["p0", "none", "p1"]), Reply::Number(0));
    assert_eq!(ask(&mut client, &[]), Reply::Number(-1));
    assert_eq!(client.ask(&Request::Delete(vec![b"p0", b"none", b"p2"])), Reply::Number(2));
    assert!(!client.exists("p0") && client.exists("p1"));
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let wired = open();
    let mut client = wired.infini();
    client.put("a", &bytes(300_000, 1));
    client.put("b", &bytes(70_000, 2));
    let get = |key: &'static str| Request::Tcp { key: key.as_bytes(), op: TcpOp::Get };
    for key in ["a", "b", "none", "a"] {
        client.send(&get(key));
    }
    for (key, expected) in
        [("a", Some((300_000, 1))), ("b", Some((70_000, 2))), ("none", None), ("a", Some((300_000, 1)))]
    {
        match (client.reply(&get(key)), expected) {
            (Reply::Value(len), Some((expected, seed))) => {
                let mut value = vec![0; len as usize];
                client.0.read_exact(&mut value).unwrap();
                assert!(value == bytes(expected, seed));
            }
            (Reply::Code(404), None) => {}
            other => panic!("{key}: {other:?}"),
        }
    }
}

/// P1 and P4: a client that dies in the middle of a put leaves neither key nor memory, and the earlier value stays.
#[test]
fn a_put_that_does_not_end_changes_nothing() {
    let wired = open();
    let mut other = wired.infini();
    other.put("known", &bytes(50_000, 1));
    let pool_free = wired.stat("pool_free_bytes");
    for key in ["known", "unknown"] {
        let mut client = wired.infini();
        client.send(&Request::Tcp { key: key.as_bytes(), op: TcpOp::Put(1 << 20) });
        client.0.write_all(&bytes(400_000, 9)).unwrap();
        // Half a value is invisible while it arrives.
        assert!(other.exists("known") && !other.exists("unknown"));
        assert!(other.get("known").unwrap() == bytes(50_000, 1));
        client.0.shutdown(Shutdown::Both).unwrap();
        drop(client);
        wired.wait_stat("pool_filling_bytes", 0);
        assert!(other.get("known").unwrap() == bytes(50_000, 1) && other.get("unknown").is_none());
    }
    wired.wait_stat("pool_free_bytes", pool_free);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_answer_harms_nobody() {
    let wired = open();
    let mut client = wired.infini();
    client.put("key", &bytes(8_000_000, 1));
    for _ in 0..10 {
        let mut rude = wired.infini();
        rude.send(&Request::Tcp { key: b"key", op: TcpOp::Get });
        let mut first = [0; 8];
        rude.0.read_exact(&mut first).unwrap();
    }
    wired.wait_stat("pool_leased_bytes", 0);
    assert!(client.get("key").unwrap() == bytes(8_000_000, 1));
}

/// Readers get one value or the other, never a mixture, while a writer stores the key again and again.
#[test]
fn overwriting_under_readers_is_atomic() {
    let wired = open();
    wired.infini().put("hot", &bytes(300_000, 0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = wired.infini();
                for _ in 0..60 {
                    let value = client.get("hot").expect("the key is never absent");
                    let seed = value[0];
                    assert!(
                        value == bytes(300_000 + usize::from(seed % 4) * 100_000, seed),
                        "a mixture at seed {seed}"
                    );
                }
            });
        }
        scope.spawn(|| {
            let mut client = wired.infini();
            for seed in 0..120u8 {
                let value = bytes(300_000 + usize::from(seed % 4) * 100_000, seed);
                assert_eq!(client.put("hot", &value), Reply::Code(200));
            }
        });
    });
    wired.wait_stat("pool_leased_bytes", 0);
    assert_eq!(wired.stat("pool_blocks"), 1);
}

#[test]
fn a_value_that_finds_no_room_is_refused_and_the_connection_stays_in_step() {
    let wired = Wired::open(config(4 * MIB, json!({})), json!({"put_wait_ms": 10}));
    let mut client = wired.infini();
    assert_eq!(client.put("large", &bytes(5 << 20, 1)), Reply::Code(507));
    assert!(!client.exists("large"));
    assert_eq!(client.put("small", &bytes(100_000, 2)), Reply::Code(200));
    for i in 0..40 {
        assert_eq!(
            client.put(&format!("k{i}"), &bytes(500_000, i)),
            Reply::Code(200),
            "what is cold makes room"
        );
    }
    assert!(client.get("k39").unwrap() == bytes(500_000, 39));
}

/// A client that announces much and sends nothing gets half of the pool at most: existing values stay.
#[test]
fn announcements_do_not_push_out_what_is_there() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"put_wait_ms": 10}));
    let mut client = wired.infini();
    client.put("key", &bytes(1_000_000, 1));
    let announce = Request::Tcp { key: b"never", op: TcpOp::Put(1_000_000) };
    let mut writers: Vec<_> = (0..40).map(|_| wired.infini()).collect();
    writers.iter_mut().for_each(|writer| writer.send(&announce));
    // Seven slots fit half of the pool.
    let deadline = std::time::Instant::now() + crate::common::LONG;
    while !wired.http("GET /metrics", None).1.contains("kvdepot_wire_failures_total{kind=\"busy\"} 33") {
        assert!(std::time::Instant::now() < deadline, "33 writers find no room");
    }
    assert!(wired.stat("pool_filling_bytes") <= 8 * MIB);
    assert!(client.get("key").unwrap() == bytes(1_000_000, 1));
    drop(writers);
    wired.wait_stat("pool_filling_bytes", 0);
    assert_eq!(client.put("another", &bytes(1_000_000, 2)), Reply::Code(200));
}

#[test]
fn garbage_is_answered_or_closed_and_others_go_on() {
    let wired = open();
    let mut good = wired.infini();
    good.put("key", b"value");
    let frame = |op: u8, body: &[u8]| {
        let mut out = 0xdead_beef_u32.to_le_bytes().to_vec();
        out.push(op);
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(body);
        out
    };
    let mut announced = frame(b'X', b"");
    announced[5..9].copy_from_slice(&u32::MAX.to_le_bytes());
    for bytes in [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0; 4096],
        frame(b'?', b"what is this"),
        frame(b'E', &[0; 31]),
        announced,
    ] {
        let mut tcp = wired.connect();
        tcp.write_all(&bytes).unwrap();
        assert!(is_closed(&mut tcp), "{:?}", &bytes[..9]);
    }
    for op in [b'X', b'M', b'L'] {
        for body in [&b""[..], &[0xff; 40], b"\x08\0\0\0\0\0\0\0garbage"] {
            let mut client = wired.infini();
            client.0.write_all(&frame(op, body)).unwrap();
            let mut code = [0; 4];
            client.0.read_exact(&mut code).unwrap();
            assert_eq!(i32::from_le_bytes(code), 400);
            if op == b'L' {
                assert!(is_closed(&mut client.0), "nobody knows where the next request begins");
            } else {
                assert!(client.exists("key"));
            }
        }
    }
    let mut client = wired.infini();
    client.send(&Request::Tcp { key: b"empty", op: TcpOp::Put(0) });
    assert_eq!(client.reply(&Request::Tcp { key: b"empty", op: TcpOp::Put(0) }), Reply::Code(400));
    assert!(good.exists("key") && !good.exists("empty"));
}

#[test]
fn rdma_is_refused_in_so_many_words_and_tcp_goes_on() {
    let wired = open();
    let mut client = wired.infini();
    let info = ConnInfo { qpn: 1, psn: 2, gid: [0; 16], lid: 3, mtu: 4 };
    assert_eq!(client.ask(&Request::Exchange(info)), Reply::Code(503));
    client.0.write_all(b"\xef\xbe\xad\xdeW\x00\x00\x00\x00").unwrap();
    assert_eq!(client.reply(&Request::RdmaOnly(b'W')), Reply::Code(400));
    assert_eq!(client.put("key", b"value"), Reply::Code(200));
}

#[test]
fn values_survive_the_server_s_restart_where_there_is_a_tier() {
    let directory = tempfile::tempdir().unwrap();
    let depot = || {
        let posix = json!({"directories": [directory.path()], "io_direct": false});
        config(16 * MIB, json!({"pipeline": "Cache|Posix", "posix": posix}))
    };
    let mut wired = Wired::open(depot(), json!({}));
    let mut client = wired.infini();
    for i in 0..10u8 {
        assert_eq!(client.put(&format!("k{i}"), &bytes(90_000 * usize::from(i + 1), i)), Reply::Code(200));
    }
    client.put("k3", &bytes(1000, 77));
    // A value is not written if the tier of its size class opens too late on a slow disk: it is put again.
    let end = std::time::Instant::now() + crate::common::LONG;
    while wired.depot.direct().stats()["tiers"][0]["blocks"] != 10 {
        assert!(std::time::Instant::now() < end, "{}", wired.depot.direct().stats());
        for i in (0..10u8).filter(|i| *i != 3) {
            client.put(&format!("k{i}"), &bytes(90_000 * usize::from(i + 1), i));
        }
        client.put("k3", &bytes(1000, 77));
        wired.wait_stat("writes_queued", 0);
    }
    wired.close();
    drop(wired);
    let wired = Wired::open(depot(), json!({}));
    let mut client = wired.infini();
    let keys: Vec<String> = (0..12).map(|i| format!("k{i}")).collect();
    assert_eq!(client.ask(&Request::Match(keys.iter().map(|k| k.as_bytes()).collect())), Reply::Number(9));
    for i in 0..10u8 {
        let expected = if i == 3 { bytes(1000, 77) } else { bytes(90_000 * usize::from(i + 1), i) };
        assert!(client.get(&format!("k{i}")).unwrap() == expected, "k{i}");
    }
    assert_eq!(wired.http("GET /kvmap_len", None), (200, "{\"len\":10}".to_owned()));
}
