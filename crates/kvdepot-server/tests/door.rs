//! Bad input at the local door: garbage, wrong versions and wrong places get a clear answer or a closed connection, and
//! no other client notices.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::{Engine, LONG, Served, config, hash, spec};
use kvdepot_core::{BlockLayout, ErrorKind, Priority};
use kvdepot_depot::Depot;
use kvdepot_depot::client::Attachment;
use kvdepot_depot::message::{
    ClaimGroup, HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response, Shards, decode, encode,
};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_server::{DoorLock, Ended, LocalDoor, Serving};
use proptest::prelude::*;

fn hello() -> Request<'static> {
    Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: 1 }
}

/// Sends one frame. Returns the answer, or `None` if the door closed without one.
fn say(socket: &mut SeqPacket, frame: &[u8]) -> Option<Response> {
    socket.send(frame, None).ok()?;
    let mut buffer = FrameBuffer::default();
    socket.recv(&mut buffer, Some(Instant::now() + LONG)).ok()?;
    Some(decode::<Response>(&buffer).expect("a depot's answer can be read").1)
}

fn is_closed(socket: &mut SeqPacket) -> bool {
    let mut buffer = FrameBuffer::default();
    socket
        .recv(&mut buffer, Some(Instant::now() + LONG))
        .is_err_and(|error| error.kind() == ErrorKind::Closed)
}

fn wait_for(served: &Served) -> SeqPacket {
    drop(served.attach());
    SeqPacket::connect(&served.socket).unwrap()
}

fn no() -> serde_json::Value {
    serde_json::json!({})
}

#[test]
fn strangers_are_turned_away_with_a_reason() {
    let served = Served::start(config(4 << 20, no()));
    let wrong = [
        (Request::Hello { magic: 7, version: PROTOCOL_VERSION, pid: 1 }, "protocol"),
        (Request::Hello { magic: HELLO_MAGIC, version: 999, pid: 1 }, "version"),
        (Request::Stats, "protocol"),
    ];
    for (request, expected) in wrong {
        let mut socket = wait_for(&served);
        let answer = say(&mut socket, &encode(1, &request).unwrap());
        assert!(matches!(answer, Some(Response::Failed { kind, .. }) if kind == expected), "{request:?}");
        assert!(is_closed(&mut socket));
    }
    let mut socket = wait_for(&served);
    assert!(matches!(say(&mut socket, &encode(1, &hello()).unwrap()), Some(Response::Welcome { .. })));
    assert!(matches!(say(&mut socket, &encode(2, &hello()).unwrap()), Some(Response::Failed { .. })));
    assert!(is_closed(&mut socket));
}

#[test]
fn requests_about_nothing_fail_and_the_connection_goes_on() {
    let served = Served::start(config(4 << 20, no()));
    let mut socket = wait_for(&served);
    say(&mut socket, &encode(1, &hello()).unwrap());
    let hashes = || Hashes(vec![1u8; 32].into());
    let nonsense = [
        Request::OpenNamespace { canonical: "{}".into() },
        Request::OpenNamespace { canonical: "x".repeat(70_000).into() },
        Request::Lookup { namespace: 77, hashes: hashes() },
        Request::Lookup { namespace: 0, hashes: Hashes(vec![1u8; 33].into()) },
        Request::LookupPrefix { namespaces: vec![4_000_000], hashes: hashes() },
        Request::Prefetch { namespace: 9, hashes: hashes() },
        Request::ClaimOpen {
            groups: vec![],
            hashes: hashes(),
            skip: 0,
            limit: 2,
            tiers: None,
            label: "".into(),
        },
        Request::ClaimPoll { claim: 5, settle: true },
        Request::ClaimRelease { claim: u64::MAX, tell_times: true },
        Request::Reserve { namespace: 1, hashes: hashes(), priority: Priority::Normal },
        Request::Commit { leases: vec![1, 2, 3], shards: Shards::All },
        Request::Commit { leases: vec![9], shards: Shards::Some(vec![u32::MAX]) },
        Request::Release { leases: vec![0] },
        Request::Acquire { namespace: 3, hashes: hashes(), wait_ms: u32::MAX, last: true, in_place: false },
        Request::Reset { namespaces: vec![8] },
        Request::Memory,
    ];
    for request in nonsense {
        let answer = say(&mut socket, &encode(3, &request).unwrap());
        assert!(matches!(answer, Some(Response::Failed { .. })), "{request:?}: {answer:?}");
    }
    assert!(matches!(say(&mut socket, &encode(4, &Request::Stats).unwrap()), Some(Response::Stats(_))));
}

#[test]
fn leases_are_good_for_their_owner_only() {
    let served = Served::start(config(4 << 20, no()));
    let attachment = served.attach();
    let spec = spec("m", BlockLayout::uniform(1, &[4096]).unwrap());
    let engine = Engine::new(&attachment, &spec, 1);
    assert!(engine.dump(&[1], &[0]).is_empty());
    let greet = || {
        let mut socket = SeqPacket::connect(&served.socket).unwrap();
        say(&mut socket, &encode(1, &hello()).unwrap());
        socket
    };
    let (mut one, mut two) = (greet(), greet());
    let acquire = Request::Acquire {
        namespace: 0,
        hashes: Hashes(hash(1).0.to_vec().into()),
        wait_ms: 1000,
        last: true,
        in_place: false,
    };
    let Some(Response::Grants(grants)) = say(&mut one, &encode(2, &acquire).unwrap()) else {
        panic!("no grants")
    };
    let kvdepot_depot::message::Grant::Leased { lease, .. } = grants[0] else { panic!("not leased") };
    let release = encode(3, &Request::Release { leases: vec![lease] }).unwrap();
    assert!(matches!(say(&mut two, &release), Some(Response::Failed { kind, .. }) if kind == "protocol"));
    assert!(matches!(say(&mut one, &release), Some(Response::Ok)));
    assert!(matches!(say(&mut one, &release), Some(Response::Failed { .. })), "released twice");
}

#[test]
fn a_claim_that_ends_inside_a_block_is_cut_to_whole_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let posix = serde_json::json!({"directories": [directory.path()]});
    let served =
        Served::start(config(4 << 20, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix})));
    let attachment = served.attach();
    let engine = Engine::new(&attachment, &spec("m", BlockLayout::uniform(1, &[4096]).unwrap()), 1);
    // A block of two units is found under the hash of its second unit.
    assert!(engine.dump(&[1], &[0]).is_empty());
    let mut socket = SeqPacket::connect(&served.socket).unwrap();
    say(&mut socket, &encode(1, &hello()).unwrap());
    // The second block does not exist, so tiers are asked; the third is incomplete.
    let hashes: Vec<u8> = (0..5).flat_map(|unit| hash(unit).0).collect();
    for window_blocks in [0, 1] {
        let group = ClaimGroup { namespaces: vec![0], window_blocks, hashes_per_block: 2 };
        let hashes = Hashes(hashes.clone().into());
        let open = Request::ClaimOpen {
            groups: vec![group],
            hashes,
            skip: 0,
            limit: 5,
            tiers: None,
            label: "".into(),
        };
        let mut answer = say(&mut socket, &encode(2, &open).unwrap());
        while let Some(Response::Claim { claim, settled: false, .. }) = answer {
            answer = say(&mut socket, &encode(3, &Request::ClaimPoll { claim, settle: false }).unwrap());
        }
        assert!(matches!(answer, Some(Response::Claim { settled: true, units: 2, .. })), "{answer:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// No bytes make the reader of frames panic.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode::<Request<'_>>(&bytes);
        let _ = decode::<Response>(&bytes);
    }
}

#[test]
fn garbage_frames_close_their_connection_and_no_other() {
    let served = Served::start(config(4 << 20, no()));
    let attachment = served.attach();
    let spec = spec("m", BlockLayout::uniform(1, &[4096]).unwrap());
    let mut engine = Engine::new(&attachment, &spec, 2);
    engine.fill(5);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(200));
    let frames = proptest::collection::vec(any::<u8>(), 1..300);
    runner
        .run(&(frames, any::<bool>()), |(frame, greet)| {
            let mut socket = SeqPacket::connect(&served.socket).unwrap();
            if greet {
                say(&mut socket, &encode(1, &hello()).unwrap());
            }
            let _ = say(&mut socket, &frame);
            Ok(())
        })
        .unwrap();
    let socket = SeqPacket::connect(&served.socket).unwrap();
    let _ = socket.send(&vec![0u8; 300 << 10], None);
    assert!(engine.dump(&[1, 2], &[0, 1]).is_empty());
    engine.clear();
    assert!(engine.load(&[2, 1], &[0, 1]).is_empty());
    assert!(engine.holds(0, 1, 5) && engine.holds(1, 0, 5));
}

#[test]
fn a_dead_depot_s_socket_is_replaced_and_a_living_one_s_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("d.sock");
    drop(SeqPacket::listen(&path, 1).unwrap());
    assert!(path.exists(), "a stale socket");
    let lock = DoorLock::take(&path).unwrap().unwrap();
    let mut door = LocalDoor::open(&lock).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(DoorLock::take(&path).unwrap().is_none(), "two owners of one socket");
    let depot = Arc::new(Depot::start(config(2 << 20, no())).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| door.run(&depot, None, &mut || !stop.load(Ordering::Acquire)).unwrap());
        let ended = Serving::new(config(2 << 20, no()), &path).serve(&mut || true).unwrap();
        assert_eq!(ended, Ended::AlreadyServed);
        stop.store(true, Ordering::Release);
        assert_eq!(serving.join().unwrap(), Ended::Stopped);
    });
    drop(door);
    drop(lock);
    std::fs::write(&path, "precious").unwrap();
    let lock = DoorLock::take(&path).unwrap().unwrap();
    assert_eq!(LocalDoor::open(&lock).unwrap_err().kind(), ErrorKind::Config);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn places_that_others_may_write_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = DoorLock::take(&directory.path().join("d.sock")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission);
    let missing = DoorLock::take(&directory.path().join("no/such/d.sock")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    let long = directory.path().join("x".repeat(200));
    assert!(SeqPacket::connect(&long).is_err());
}

#[test]
fn an_idle_door_closes_by_itself() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("d.sock");
    let idle_exit = Some(std::time::Duration::from_millis(1));
    let serving = Serving { idle_exit, ..Serving::new(config(2 << 20, no()), &path) };
    assert_eq!(serving.serve(&mut || true).unwrap(), Ended::Idle);
    assert!(!path.exists());
}

#[test]
fn a_peer_of_another_version_is_an_error_and_not_a_silent_miss() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("d.sock");
    let listener = SeqPacket::listen(&path, 4).unwrap();
    let thread = std::thread::spawn(move || {
        let fd = rustix::net::accept(&listener).unwrap();
        let mut socket = SeqPacket::from_fd(fd);
        let mut buffer = FrameBuffer::default();
        socket.recv(&mut buffer, None).unwrap();
        let failed = Response::Failed { kind: "version".to_owned(), message: "older".to_owned() };
        socket.send(&encode(1, &failed).unwrap(), None).unwrap();
    });
    let error = Attachment::connect(path, None, LONG, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Version);
    thread.join().unwrap();
}
