//! A client whose depot goes away in the middle of being attached attaches to it again, with everything it must know.
//! P6.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_depot::message::{PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{PoolMapping, PoolRegion};

const POOL: u64 = 1 << 20;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// What the depot does when a namespace is to be opened.
#[derive(Clone, Copy)]
enum Opening {
    HangsUp,
    Fails,
    Opens,
}

/// A depot that treats each opening as the test says, and the others as asked; it ends a connection where it hangs up.
fn depot(listener: SeqPacket, openings: Receiver<Opening>, opened: Sender<()>) {
    let pool = Arc::new(PoolMapping::create(POOL).unwrap());
    std::thread::spawn(move || {
        let mut life = 0;
        while let Ok(fd) = rustix::net::accept(listener.as_fd()) {
            life += 1;
            let (pool, openings, opened) = (Arc::clone(&pool), openings.clone(), opened.clone());
            std::thread::spawn(move || serve(SeqPacket::from_fd(fd), life, &pool, &openings, &opened));
        }
    });
}

fn serve(
    mut socket: SeqPacket,
    life: u64,
    pool: &PoolMapping,
    openings: &Receiver<Opening>,
    opened: &Sender<()>,
) {
    let mut buffer = FrameBuffer::default();
    while socket.recv(&mut buffer, None).is_ok() {
        let (request, asked) = decode::<Request<'_>>(&buffer).unwrap();
        let is_hello = matches!(asked, Request::Hello { .. });
        let response = match asked {
            Request::Hello { .. } => Response::Welcome {
                version: PROTOCOL_VERSION,
                depot: life,
                pid: 1,
                regions: vec![PoolRegion::memory(POOL, None)],
                timeout_ms: 1000,
                waiting_queue_depth: 1,
                running_queue_depth: 1,
                has_memory: false,
            },
            // One that came too late for a busy client is asked for again.
            Request::OpenNamespace { .. } => match openings.try_recv().unwrap_or(Opening::Opens) {
                Opening::HangsUp => return,
                Opening::Fails => Response::Failed { kind: "io".into(), message: "not now".into() },
                Opening::Opens => {
                    opened.send(()).unwrap();
                    Response::Namespace { handle: 1, id: [1; 16], epoch: 0 }
                }
            },
            _ => Response::Claim { claim: 1, settled: true, units: 1, units_from_tier: 0, arriving: None },
        };
        // The other side may have gone.
        let _ = socket.send(&encode(request, &response).unwrap(), pool.fd().filter(|_| is_hello));
    }
}

fn finds_its_block_after(openings: &[Opening]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("depot.sock");
    let (say, openings_said) = unbounded();
    let (send_opened, opened) = unbounded();
    depot(SeqPacket::listen(&path, 8).unwrap(), openings_said, send_opened);
    let attachment = Attachment::connect(path, None, HANG, Duration::from_secs(5)).unwrap();
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let spec = Arc::new(NamespaceSpec::new("{\"model\":\"attach\"}", layout).unwrap());
    openings.iter().for_each(|opening| say.send(*opening).unwrap());
    // The outcome is not reported to the caller that registers: the engine goes on, and the rest happens in the
    // background.
    let _ = attachment.register(&spec);
    opened.recv_timeout(HANG).expect("the namespace is opened in the end");
    let group =
        || ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
    let end = Instant::now() + HANG;
    while Claim::open(&attachment, &[group()], &[BlockHash([1; 16])], 0, 1, "").unwrap().poll()
        != (true, 1, 0)
    {
        assert!(Instant::now() < end, "the depot is there and never asked");
        std::thread::yield_now();
    }
}

#[test]
fn a_depot_that_goes_while_namespaces_are_opened_is_attached_again() {
    finds_its_block_after(&[Opening::HangsUp, Opening::HangsUp, Opening::HangsUp, Opening::Opens]);
}

#[test]
fn a_namespace_that_cannot_be_opened_now_is_opened_later() {
    finds_its_block_after(&[Opening::Fails, Opening::Fails, Opening::Opens]);
}
