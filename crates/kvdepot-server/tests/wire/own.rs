//! Our own protocol at the wire door: ids, batches, checksums, namespaces, tokens.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::io::Write;

use crate::common::{config, hash, spec};
use crate::wire::{Answer, Wired, bytes, is_closed};
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceId};
use kvdepot_wire::infini;
use kvdepot_wire::own::{Hashes, Request, Status};
use serde_json::json;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 100_000;
const TOKEN: &str = "the token of these tests";

fn flat(hashes: &[BlockHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.0).collect()
}

fn ask_present(own: &mut crate::wire::Own, namespace: NamespaceId, hashes: &[BlockHash]) -> Answer {
    own.ask(&Request::Exists { namespace, hashes: Hashes::new(&flat(hashes)).unwrap() })
}

#[test]
fn batches_are_stored_found_and_sent() {
    let wired = Wired::open(config(64 * MIB, json!({})), json!({}));
    let mut own = wired.own(None).unwrap();
    let namespace = own.open("a", BLOCK as u64);
    let blocks: Vec<Vec<u8>> = (0..40u8).map(|i| bytes(BLOCK, i)).collect();
    let batch: Vec<(BlockHash, &[u8])> = (0..40).map(|i| (hash(i), &blocks[i as usize][..])).collect();
    assert_eq!(own.put(namespace, &batch), Answer::Stored(vec![Status::Ok; 40]));
    assert_eq!(own.put(namespace, &batch[..2]), Answer::Stored(vec![Status::Had; 2]));
    let hashes: Vec<BlockHash> = [0, 1, 99, 39, 2].map(hash).to_vec();
    assert_eq!(ask_present(&mut own, namespace, &hashes), Answer::Present(vec![1, 1, 0, 1, 1]));
    let list = flat(&hashes);
    let prefix = Request::Prefix { namespace, hashes: Hashes::new(&list).unwrap() };
    assert_eq!(own.ask(&prefix), Answer::Leading(2));
    let all: Vec<BlockHash> = (0..41).map(hash).collect();
    for (i, got) in own.get(namespace, &all).into_iter().enumerate() {
        match i {
            40 => assert_eq!(got.unwrap_err(), ErrorKind::NotFound),
            _ => assert!(got.unwrap() == blocks[i], "block {i}"),
        }
    }
    let gone = flat(&[hash(0)]);
    let remove = Request::Remove { namespace, hashes: Hashes::new(&gone).unwrap() };
    assert_eq!(own.ask(&remove), Answer::Done);
    assert_eq!(own.ask(&prefix), Answer::Leading(0));
    let Answer::Stats(stats) = own.ask(&Request::Stat) else { panic!("no stats") };
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["pool_blocks"], 39);
    wired.wait_stat("pool_leased_bytes", 0);
}

/// P8: the same hashes in two namespaces are two blocks, and a namespace's earlier epoch is unreachable.
#[test]
fn namespaces_and_epochs_are_apart() {
    let wired = Wired::open(config(64 * MIB, json!({})), json!({}));
    let mut own = wired.own(None).unwrap();
    let (a, b) = (own.open("a", 5000), own.open("b", 5000));
    own.put(a, &[(hash(1), &bytes(5000, 1))]);
    assert_eq!(own.get(b, &[hash(1)]), [Err(ErrorKind::NotFound)]);
    own.put(b, &[(hash(1), &bytes(5000, 2))]);
    assert!(own.get(a, &[hash(1)])[0].as_ref().unwrap() == &bytes(5000, 1));
    let Answer::Namespace(next, 3, 5000) = own.ask(&Request::SetEpoch { namespace: a, epoch: 3 }) else {
        panic!("no namespace")
    };
    assert_eq!(own.get(next, &[hash(1)]), [Err(ErrorKind::NotFound)]);
    assert_eq!(ask_present(&mut own, a, &[hash(1)]), Answer::Failed(ErrorKind::NotFound));
    assert_eq!(own.ask(&Request::SetEpoch { namespace: next, epoch: 2 }), Answer::Failed(ErrorKind::Config));
    assert!(own.get(b, &[hash(1)])[0].is_ok());
    // A put into a namespace that is not open, or of another size, is refused, and the connection stays in step.
    let unknown = NamespaceId([9; 16]);
    assert_eq!(own.put(unknown, &[(hash(1), &bytes(5000, 2))]), Answer::Failed(ErrorKind::NotFound));
    assert_eq!(own.put(b, &[(hash(2), &bytes(4000, 2))]), Answer::Failed(ErrorKind::Config));
    assert_eq!(ask_present(&mut own, b, &[hash(1), hash(2)]), Answer::Present(vec![1, 0]));
}

/// P1: a block changed in transit is not stored, and its neighbours are.
#[test]
fn a_wrong_checksum_stores_nothing() {
    let wired = Wired::open(config(64 * MIB, json!({})), json!({}));
    let mut own = wired.own(None).unwrap();
    let namespace = own.open("a", BLOCK as u64);
    own.send_put(8, namespace, &[(hash(1), &bytes(BLOCK, 1))], 1);
    assert_eq!(own.answer(), (8, Answer::Stored(vec![Status::Failed(ErrorKind::Corrupt)])));
    assert_eq!(ask_present(&mut own, namespace, &[hash(1)]), Answer::Present(vec![0]));
    assert_eq!(own.put(namespace, &[(hash(1), &bytes(BLOCK, 1))]), Answer::Stored(vec![Status::Ok]));
    assert_eq!(wired.stat("pool_filling_bytes"), 0);
}

/// P2: a put has one limit for waiting for space, not one for each of its blocks: its client takes a long silence for
/// the server's death.
#[test]
fn a_put_of_many_blocks_waits_for_room_once() {
    const WAIT_MS: u64 = 1_000;
    const BLOCKS: u64 = 40;
    let directory = tempfile::tempdir().unwrap();
    // Unwritten blocks may take 70 % of the pool, and nothing is ever written.
    let posix = json!({"directories": [directory.path()], "faults": "write_hang=1"});
    let depot = config(
        16 * MIB,
        json!({"pipeline": "Cache|Posix", "posix": posix, "timeout_ms": 20_000, "drain_timeout_ms": 1}),
    );
    let wired = Wired::open(depot, json!({"put_wait_ms": WAIT_MS}));
    let mut own = wired.own(None).unwrap();
    let namespace = own.open("a", 2_000_000);
    let block = bytes(2_000_000, 1);
    let batch: Vec<(BlockHash, &[u8])> = (0..BLOCKS).map(|n| (hash(n), &block[..])).collect();
    let begun = std::time::Instant::now();
    let Answer::Stored(statuses) = own.put(namespace, &batch) else { panic!("no statuses") };
    let refused = statuses.iter().filter(|status| **status == Status::Failed(ErrorKind::Busy)).count();
    assert!((30..40).contains(&refused), "{statuses:?}");
    let least = std::time::Duration::from_millis(WAIT_MS);
    assert!(
        (least..least * refused as u32).contains(&begun.elapsed()),
        "{refused} blocks: {:?}",
        begun.elapsed()
    );
}

/// A get that waits for a slow tier does not block later requests.
#[test]
fn answers_come_as_they_are_ready() {
    const SLOW: std::time::Duration = std::time::Duration::from_secs(3);
    let directory = tempfile::tempdir().unwrap();
    let faults = format!("read_slow=1,slow_ms={}", SLOW.as_millis());
    let posix = json!({"directories": [directory.path()], "io_direct": false, "faults": faults});
    let depot = config(64 * MIB, json!({"pipeline": "Cache|Posix", "posix": posix}));
    let wired = Wired::open(depot, json!({}));
    let mut own = wired.own(None).unwrap();
    let namespace = own.open("a", 5000);
    own.put(namespace, &[(hash(1), &bytes(5000, 1)), (hash(2), &bytes(5000, 2))]);
    wired.wait_stat("writes_queued", 0);
    assert!(wired.depot.direct().evict_to_percent(0.0) == 2, "only the tier has them now");
    own.put(namespace, &[(hash(3), &bytes(5000, 3))]);
    let (slow, quick) = (flat(&[hash(1), hash(2)]), flat(&[hash(3)]));
    let get = |hashes| Request::Get { namespace, wait_ms: 60_000, hashes: Hashes::new(hashes).unwrap() };
    let begun = std::time::Instant::now();
    own.send(1, &get(&slow), &[]);
    own.send(2, &get(&quick), &[]);
    own.send(3, &Request::Stat, &[]);
    let mut first_after = None;
    let ids: Vec<u64> = (0..4)
        .map(|_| {
            let (id, answer) = own.answer();
            first_after.get_or_insert_with(|| begun.elapsed());
            if let Answer::Block(index, status, block) = answer {
                let seed = if id == 2 { 3 } else { index as u8 + 1 };
                assert!(status == Status::Ok && block == bytes(5000, seed));
            }
            id
        })
        .collect();
    // Unless this machine stood still until the slow ones were ready, too.
    let stood_still = first_after.unwrap() >= SLOW;
    assert!(ids == [2, 3, 1, 1] || stood_still, "{ids:?}");
}

#[test]
fn without_the_token_nobody_gets_in() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"token_file": file}));
    let mut own = wired.own(Some(TOKEN)).unwrap();
    let namespace = own.open("a", 5000);
    for wrong in [None, Some("another token than that")] {
        assert_eq!(wired.own(wrong).err().unwrap().kind(), ErrorKind::Permission);
    }
    // Neither without a hello nor after a hello without its proof.
    let hello = Request::Hello { version: 1, features: 0, nonce: [1; 32] };
    for greeting in [None, Some(hello)] {
        let mut tcp = wired.connect();
        let mut out = Vec::new();
        if let Some(hello) = greeting {
            hello.encode(0, &mut out).unwrap();
        }
        Request::Stat.encode(1, &mut out).unwrap();
        tcp.write_all(&out).unwrap();
        let mut answers = Vec::new();
        std::io::Read::read_to_end(&mut tcp, &mut answers).unwrap();
        assert!(!answers.windows(4).any(|w| w == b"pool"), "no counters for strangers");
    }
    let mut stranger = wired.infini();
    assert_eq!(stranger.ask(&infini::Request::Exists(b"key")), infini::Reply::Code(400));
    assert!(is_closed(&mut stranger.0));
    assert_eq!(wired.http("GET /kvmap_len", None).0, 401);
    assert_eq!(wired.http("GET /status", None).0, 401);
    assert_eq!(wired.http("GET /config", None).0, 401);
    assert_eq!(wired.http("GET /errors", None).0, 401);
    assert_eq!(wired.http("GET /misses", None).0, 401);
    assert_eq!(wired.http("GET /namespaces", None).0, 401);
    assert_eq!(wired.http("GET /why?namespace=none", None).0, 401);
    assert_eq!(wired.http("GET /config", Some(TOKEN)).0, 200);
    assert_eq!(wired.http("GET /misses", Some(TOKEN)).0, 200);
    let direct = wired.depot.direct();
    let used =
        direct.open_namespace(spec("a", BlockLayout::uniform(1, &[4096]).unwrap()).canonical()).unwrap();
    assert_eq!(direct.prefix(used.handle, &hash(1).0).unwrap(), 0);
    for (token, is_named) in [(None, false), (Some("another token than that"), false), (Some(TOKEN), true)] {
        let (code, metrics) = wired.http("GET /metrics", token);
        assert_eq!((code, metrics.contains("kvdepot_namespace_misses_total{")), (200, is_named), "{metrics}");
        assert!(metrics.contains("kvdepot_miss_requests_total{"), "{metrics}");
    }
    assert_eq!(wired.http("GET /why?namespace=none", Some(TOKEN)).0, 404);
    let (code, page) = wired.http("GET /", None);
    assert_eq!(code, 200, "the page asks for the token, and has no data");
    assert!(page.starts_with("<!DOCTYPE html>"), "{page}");
    assert_eq!(wired.http("POST /purge", Some("another token than that")).0, 401);
    assert_eq!(wired.http("POST /purge", Some(TOKEN)), (200, "{\"num\":0,\"status\":\"ok\"}".to_owned()));
    assert_eq!(ask_present(&mut own, namespace, &[hash(1)]), Answer::Present(vec![0]));
}

/// Whoever cannot prove the token must not make the server hold megabytes.
#[test]
fn a_stranger_s_long_request_is_refused_by_its_header() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, TOKEN).unwrap();
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"token_file": file}));
    for (op, body_bytes, answer) in [
        (b'M', 4_u32 << 20, &400_i32.to_le_bytes()[..]),
        (b'C', 8, &400_i32.to_le_bytes()),
        (0x82, 100_000, &0xdead_beef_u32.to_le_bytes()),
        (0x80, 100_000, &0xdead_beef_u32.to_le_bytes()),
    ] {
        let mut tcp = wired.connect();
        let mut header = 0xdead_beef_u32.to_le_bytes().to_vec();
        header.push(op);
        header.extend_from_slice(&body_bytes.to_le_bytes());
        tcp.write_all(&header).unwrap();
        // None of the body is sent.
        let mut answers = Vec::new();
        std::io::Read::read_to_end(&mut tcp, &mut answers).unwrap();
        assert!(answers.starts_with(answer), "{op}: {answers:?}");
    }
    let mut own = wired.own(Some(TOKEN)).unwrap();
    let long = format!("{{\"model\":\"{}\"}}", "a".repeat(10_000));
    let open = Request::Open { canonical: &long };
    assert!(matches!(own.ask(&open), Answer::Failed(_)), "it is read after the handshake");
}

#[test]
fn a_namespace_that_a_connection_closes_leaves_its_place() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({}));
    let mut own = wired.own(None).unwrap();
    let spec_of = |n: usize| spec(&format!("model {n}"), BlockLayout::uniform(1, &[4096]).unwrap());
    let mut open = |n: usize| own.ask(&Request::Open { canonical: spec_of(n).canonical() });
    let mut opened = 0;
    while matches!(open(opened), Answer::Namespace(..)) {
        opened += 1;
    }
    assert!((1..NAMESPACES_MAX).contains(&opened), "{opened}");
    assert_eq!(open(opened), Answer::Failed(ErrorKind::NoSpace));
    for n in [0, opened + 7] {
        assert_eq!(own.ask(&Request::Close { canonical: spec_of(n).canonical() }), Answer::Done);
    }
    let answer = own.ask(&Request::Open { canonical: spec_of(opened).canonical() });
    assert!(matches!(answer, Answer::Namespace(..)), "{answer:?}");
    assert!(matches!(own.ask(&Request::Close { canonical: "{" }), Answer::Failed(_)));
}

#[test]
fn requests_before_the_hello_and_garbage_end_the_connection() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({}));
    for body in [&b""[..], b"12345678", b"12345678abc"] {
        for op in [0x80, 0x82, 0x85, 0x86, 0x89] {
            let mut tcp = wired.connect();
            let mut out = 0xdead_beef_u32.to_le_bytes().to_vec();
            out.push(op);
            out.extend_from_slice(&(body.len() as u32).to_le_bytes());
            out.extend_from_slice(body);
            tcp.write_all(&out).unwrap();
            let mut answer = Vec::new();
            std::io::Read::read_to_end(&mut tcp, &mut answer).unwrap();
            assert_eq!(answer.get(4), Some(&0xcf), "a failure is told before the end");
        }
    }
    let mut own = wired.own(None).unwrap();
    own.send(1, &Request::Hello { version: 1, features: 0, nonce: [0; 32] }, &[]);
    assert_eq!(own.answer().1, Answer::Failed(ErrorKind::Protocol));
    assert!(is_closed(&mut own.tcp));
}
