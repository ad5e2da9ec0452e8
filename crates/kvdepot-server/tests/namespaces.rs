//! Namespaces at the local door: the connections of a process share one client's quota, and return it with the last of
//! them, or when it closes namespaces. P7.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::{Duration, Instant};

use common::{Engine, Served, config, embedded, hash, once_open, spec};
use kvdepot_core::BlockLayout;
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

/// Detects a hang of the test itself and does not measure speed.
const HANG: Duration = Duration::from_secs(60);

fn say(socket: &mut SeqPacket, request: &Request<'_>) -> Response {
    socket.send(&encode(1, request).unwrap(), None).unwrap();
    let mut buffer = FrameBuffer::default();
    socket.recv(&mut buffer, Some(Instant::now() + HANG)).unwrap();
    decode::<Response>(&buffer).unwrap().1
}

fn connect(served: &Served) -> SeqPacket {
    let mut socket = SeqPacket::connect(&served.socket).unwrap();
    let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: 1 };
    assert!(matches!(say(&mut socket, &hello), Response::Welcome { .. }));
    socket
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::yield_now();
    }
}

fn open(socket: &mut SeqPacket, name: usize) -> Response {
    let spec = spec(&name.to_string(), BlockLayout::uniform(1, &[4096]).unwrap());
    say(socket, &Request::OpenNamespace { canonical: spec.canonical().into() })
}

#[test]
fn the_connections_of_a_process_share_what_one_client_may_have() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    drop(served.attach());
    let mut sockets = [connect(&served), connect(&served)];
    let refused = (0..NAMESPACES_MAX).find(|&name| match open(&mut sockets[name % 2], name) {
        Response::Failed { kind, message } => {
            assert!(kind == "no_space" && message.contains("namespaces_per_client_max=2048"), "{message}");
            true
        }
        _ => false,
    });
    assert_eq!(refused, Some(NAMESPACES_MAX / 2));
    drop(sockets);
    // The depot notices the end of the last connection a moment later.
    let end = Instant::now() + HANG;
    loop {
        let mut socket = connect(&served);
        if matches!(open(&mut socket, 9_999), Response::Namespace { .. }) {
            break;
        }
        drop(socket);
        assert!(Instant::now() < end, "the share does not come back");
        std::thread::yield_now();
    }
}

/// One process opens and closes as many as a weight update per step does.
#[test]
fn closed_namespaces_do_not_count() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    for attachment in [served.attach(), embedded(config(4 << 20, serde_json::json!({})))] {
        let named = |name: usize| spec(&name.to_string(), BlockLayout::uniform(1, &[4096]).unwrap());
        let stays = Engine::new(&attachment, &named(0), 1);
        stays.dump_once_open(&[1], &[0]);
        for name in 1..=NAMESPACES_MAX {
            attachment.register(&named(name)).unwrap();
            attachment.close_namespace(&named(name));
        }
        let new = Engine::new(&attachment, &named(NAMESPACES_MAX + 1), 1);
        new.dump_once_open(&[2], &[0]);
        assert_eq!(new.store.lookup(&[hash(2)]), [1]);
        assert_eq!(stays.store.lookup(&[hash(1)]), [1], "it was not closed");
        attachment.close_namespace(&named(0));
        assert_eq!(stays.store.lookup(&[hash(1)]), [0]);
        attachment.register(&named(0)).unwrap();
        // A closed namespace keeps its blocks.
        once_open(&attachment, "lookup", || stays.store.lookup(&[hash(1)]) == [1]);
    }
}

#[test]
fn a_namespace_without_room_is_opened_when_another_one_is_closed() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    for attachment in [served.attach(), embedded(config(4 << 20, serde_json::json!({})))] {
        let named = |name: usize| spec(&name.to_string(), BlockLayout::uniform(1, &[4096]).unwrap());
        (0..NAMESPACES_MAX / 2).for_each(|name| attachment.register(&named(name)).unwrap());
        let last = Engine::new(&attachment, &named(NAMESPACES_MAX), 1);
        assert_eq!(last.dump(&[1], &[0]), [0], "there is no room for it");
        attachment.close_namespace(&named(7));
        // Over the socket it is opened in the background.
        until("it is opened", || last.dump(&[1], &[0]).is_empty());
        assert_eq!(last.store.lookup(&[hash(1)]), [1]);
    }
}
