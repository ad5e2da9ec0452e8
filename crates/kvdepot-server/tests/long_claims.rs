//! Claims over more hashes than fit into one frame: the hit covers everything that exists.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{Engine, LONG, Served, config, embedded, hash, spec};
use kvdepot_core::BlockLayout;
use kvdepot_core::limits::{BATCH_HASHES_MAX, CLAIM_HASHES_MAX};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_depot::message::{
    ClaimGroup, HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response, decode, encode,
};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

const BLOCKS: u64 = 2 * BATCH_HASHES_MAX as u64 + 100;

fn no() -> serde_json::Value {
    serde_json::json!({})
}

fn hits_are_whole(attachment: &Arc<Attachment>) {
    let spec = spec("long", BlockLayout::uniform(1, &[4096]).unwrap());
    let engine = Engine::new(attachment, &spec, 1);
    let names: Vec<u64> = (0..BLOCKS).collect();
    assert!(engine.dump(&names, &vec![0; names.len()]).is_empty());
    let group =
        || ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
    let batch = BATCH_HASHES_MAX as u64;
    let all: Vec<_> = (0..BLOCKS + 5).map(hash).collect();
    for limit in [1, batch - 1, batch, batch + 1, 2 * batch, BLOCKS, BLOCKS + 5] {
        let limit = u32::try_from(limit).unwrap();
        let mut claim = Claim::open(attachment, &[group()], &all, 0, limit, "").unwrap();
        let hit = limit.min(u32::try_from(BLOCKS).unwrap());
        assert_eq!(claim.wait(LONG), (true, hit, 0), "limit {limit}");
    }
    let mut tail = Claim::open(attachment, &[group()], &all, 5000, u32::MAX, "").unwrap();
    assert_eq!(tail.wait(LONG), (true, u32::try_from(BLOCKS).unwrap(), 0));
    // A gap in the second frame ends the hit there.
    let mut gap = all.clone();
    gap[BATCH_HASHES_MAX + 7] = hash(u64::MAX);
    let mut claim = Claim::open(attachment, &[group()], &gap, 0, u32::MAX, "").unwrap();
    assert_eq!(claim.wait(LONG), (true, u32::try_from(BATCH_HASHES_MAX).unwrap() + 7, 0));
}

#[test]
fn hits_at_the_local_door_are_longer_than_a_frame() {
    let served = Served::start(config(64 << 20, no()));
    hits_are_whole(&served.attach());
}

#[test]
fn hits_of_an_embedded_depot_are_longer_than_a_frame() {
    hits_are_whole(&embedded(config(64 << 20, no())));
}

#[test]
fn a_claim_over_too_many_hashes_is_refused_and_the_connection_goes_on() {
    let served = Served::start(config(4 << 20, no()));
    drop(served.attach());
    let mut socket = SeqPacket::connect(&served.socket).unwrap();
    let mut ask = |ahead: &[&[u8]], request: &Request<'_>| {
        for &hashes in ahead {
            let hashes = Request::ClaimHashes { hashes: Hashes(hashes.into()) };
            socket.send_by(&encode(1, &hashes).unwrap(), Instant::now() + LONG).unwrap();
        }
        socket.send_by(&encode(2, request).unwrap(), Instant::now() + LONG).unwrap();
        let mut buffer = FrameBuffer::default();
        socket.recv(&mut buffer, Some(Instant::now() + LONG)).unwrap();
        decode::<Response>(&buffer).unwrap()
    };
    ask(&[], &Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: 1 });
    let spec = spec("long", BlockLayout::uniform(1, &[4096]).unwrap());
    ask(&[], &Request::OpenNamespace { canonical: spec.canonical().into() });
    let group = ClaimGroup { namespaces: vec![0], window_blocks: 0, hashes_per_block: 1 };
    let open = Request::ClaimOpen {
        groups: vec![group],
        hashes: Hashes(vec![1; 16].into()),
        skip: 0,
        limit: u32::MAX,
        tiers: None,
        label: "".into(),
    };
    let frame = vec![1u8; BATCH_HASHES_MAX * 16];
    let refused = |answer: (u64, Response)| {
        assert!(matches!(&answer, (2, Response::Failed { kind, .. }) if kind == "protocol"), "{answer:?}");
    };
    refused(ask(&vec![frame.as_slice(); CLAIM_HASHES_MAX / BATCH_HASHES_MAX], &open));
    refused(ask(&[&frame, &frame[1..]], &open));
    // The hashes sent ahead belonged to those claims; the next claim begins anew.
    assert!(matches!(ask(&[&frame[..16]], &open), (2, Response::Claim { settled: true, units: 0, .. })));
    // Hashes ahead of another request are dropped: the hit of the following claim cannot be longer than its own hash.
    assert!(matches!(ask(&[&frame], &Request::Ping), (2, Response::Ok)));
    assert!(matches!(ask(&[], &open), (2, Response::Claim { settled: true, units: 0, .. })));
}
