//! Claims that a depot has let go because nobody asked for them, and settled ones that are kept by asking. P2, P13.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_depot::message::{PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{PoolMapping, PoolRegion};

const POOL: u64 = 1 << 20;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);
/// The depot lets claims go that are not asked for in this time, as far as its client knows.
const PATIENCE_MS: u64 = 30;

/// What the depot was asked about a claim: its number, and whether to settle it; `None` = to open the next one.
type Asked = Option<(u64, bool)>;

/// A depot that answers questions about claims, and an engine that is attached to it.
struct Lab {
    attachment: Arc<Attachment>,
    group: ClaimGroupSpec,
    asked: Receiver<Asked>,
    /// The claims that were released.
    released: Receiver<u64>,
    _directory: tempfile::TempDir,
}

impl Lab {
    fn open(&self) -> Claim {
        let (group, hashes) = (self.group.clone(), [BlockHash([1; 16]), BlockHash([2; 16])]);
        let claim = Claim::open(&self.attachment, &[group], &hashes, 0, 2, "").unwrap();
        assert_eq!(self.asked.recv_timeout(HANG).unwrap(), None);
        claim
    }
}

/// A depot that answers as `answer` says, and a claim that it was asked for. Returns what it is asked after that.
fn depot(answer: impl Fn(Asked) -> Response + Send + Sync + 'static) -> (Lab, Claim, Receiver<Asked>) {
    let lab = lab(answer);
    let (claim, asked) = (lab.open(), lab.asked.clone());
    (lab, claim, asked)
}

fn lab(answer: impl Fn(Asked) -> Response + Send + Sync + 'static) -> Lab {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("depot.sock");
    let listener = SeqPacket::listen(&path, 8).unwrap();
    let (answer, (heard, asked), (ended, released)) = (Arc::new(answer), unbounded(), unbounded());
    std::thread::spawn(move || {
        let pool = Arc::new(PoolMapping::create(POOL).unwrap());
        while let Ok(fd) = rustix::net::accept(listener.as_fd()) {
            let (pool, answer, heard, ended) =
                (Arc::clone(&pool), Arc::clone(&answer), heard.clone(), ended.clone());
            std::thread::spawn(move || {
                let mut socket = SeqPacket::from_fd(fd);
                let mut buffer = FrameBuffer::default();
                while socket.recv(&mut buffer, None).is_ok() {
                    let (request, message) = decode::<Request<'_>>(&buffer).unwrap();
                    let is_hello = matches!(message, Request::Hello { .. });
                    let asked = match message {
                        Request::ClaimOpen { .. } => Some(None),
                        Request::ClaimPoll { claim, settle } => Some(Some((claim, settle))),
                        Request::ClaimDecline { claim } => Some(Some((claim, true))),
                        _ => None,
                    };
                    let response = match (asked, message) {
                        (Some(asked), _) => {
                            let response = answer(asked);
                            heard.send(asked).unwrap();
                            response
                        }
                        (None, Request::Hello { .. }) => welcome(),
                        (None, Request::OpenNamespace { .. }) => {
                            Response::Namespace { handle: 1, id: [1; 16], epoch: 0 }
                        }
                        (None, Request::ClaimRelease { claim, .. }) => {
                            ended.send(claim).unwrap();
                            Response::Ok
                        }
                        _ => Response::Ok,
                    };
                    // The other side may have gone.
                    let _ = socket.send(&encode(request, &response).unwrap(), pool.fd().filter(|_| is_hello));
                }
            });
        }
    });
    let attachment = Attachment::connect(path, None, HANG, HANG).unwrap();
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let spec = Arc::new(NamespaceSpec::new("{\"model\":\"claims\"}", layout).unwrap());
    attachment.register(&spec).unwrap();
    let group = ClaimGroupSpec { namespaces: vec![spec], window_blocks: 0, hashes_per_block: 1 };
    Lab { attachment, group, asked, released, _directory: directory }
}

fn welcome() -> Response {
    Response::Welcome {
        version: PROTOCOL_VERSION,
        depot: 1,
        pid: 1,
        regions: vec![PoolRegion::memory(POOL, None)],
        timeout_ms: PATIENCE_MS,
        waiting_queue_depth: 1,
        running_queue_depth: 1,
        has_memory: false,
    }
}

fn claim(claim: u64, settled: bool, units: u32) -> Response {
    Response::Claim { claim, settled, units, units_from_tier: 0, arriving: None }
}

fn let_go() -> Response {
    Response::Failed { kind: "not_found".into(), message: "no such claim on this connection".into() }
}

/// Answers openings with claims 1, 2, …; each is as `opened` says.
fn numbered(opened: impl Fn(u64) -> Response) -> impl Fn() -> Response {
    let next = std::sync::atomic::AtomicU64::new(1);
    move || opened(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
}

/// Polls until the depot was asked something.
fn poll_until_asked(polled: &mut Claim, asked: &Receiver<Asked>) -> Asked {
    let end = Instant::now() + HANG;
    loop {
        polled.poll();
        if let Ok(asked) = asked.try_recv() {
            return asked;
        }
        assert!(Instant::now() < end, "the depot is never asked about the claim");
        std::thread::yield_now();
    }
}

#[test]
fn a_pending_claim_that_the_depot_has_let_go_is_opened_again() {
    let open = numbered(|number| claim(number, number == 2, 2));
    let (_lab, mut pending, asked) = depot(move |asked| asked.map_or_else(&open, |_| let_go()));
    assert_eq!(pending.wait(HANG), (true, 2, 0));
    assert_eq!(asked.try_iter().collect::<Vec<_>>(), [Some((1, false)), None]);
}

#[test]
fn a_claim_that_is_to_be_settled_and_was_let_go_is_settled_after_it_was_opened_again() {
    for decline in [false, true] {
        let open = numbered(|number| claim(number, false, 0));
        let (_lab, mut pending, asked) = depot(move |asked| match asked {
            None => open(),
            Some((2, true)) => claim(2, true, 1),
            Some(_) => let_go(),
        });
        let found = if decline { pending.decline() } else { pending.settle_now() };
        assert_eq!(found, (true, 1, 0));
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), [Some((1, true)), None, Some((2, true))]);
    }
}

#[test]
fn a_claim_that_is_let_go_again_and_again_settles_when_it_is_to() {
    let open = numbered(|number| claim(number, false, 0));
    let (_lab, mut pending, _asked) = depot(move |asked| asked.map_or_else(&open, |_| let_go()));
    assert_eq!(pending.settle_now(), (true, 0, 0));
}

#[test]
fn a_settled_claim_is_kept_by_asking_for_it() {
    let (_lab, mut settled, asked) = depot(|_| claim(1, true, 2));
    for _ in 0..3 {
        assert_eq!(poll_until_asked(&mut settled, &asked), Some((1, false)));
        assert_eq!(settled.poll(), (true, 2, 0));
    }
}

#[test]
fn a_settled_claim_that_was_let_go_is_opened_again() {
    let open = numbered(|number| claim(number, number == 1, 2));
    let (_lab, mut settled, asked) = depot(move |asked| match asked {
        None => open(),
        Some((2, _)) => claim(2, true, 1),
        Some(_) => let_go(),
    });
    assert_eq!(poll_until_asked(&mut settled, &asked), Some((1, false)));
    // Its blocks may have gone meanwhile, so it waits for them anew, and gets what is left.
    assert_eq!(asked.recv_timeout(HANG).unwrap(), None);
    assert_eq!(settled.wait(HANG), (true, 1, 0));
}

/// P2: many claims that end at once are no reason to admit a hit whose leases have ended.
#[test]
fn all_claims_that_ended_at_once_are_opened_again() {
    const CLAIMS: u64 = 5;
    let open = numbered(|number| claim(number, true, if number <= CLAIMS { 2 } else { 1 }));
    let lab = lab(move |asked| asked.map_or_else(&open, |_| let_go()));
    let mut claims: Vec<Claim> = (0..CLAIMS).map(|_| lab.open()).collect();
    let end = Instant::now() + Duration::from_millis(2 * PATIENCE_MS);
    while Instant::now() < end {
        std::thread::yield_now();
    }
    for claim in &mut claims {
        assert_eq!((claim.poll(), claim.openings()), ((true, 1, 0), 2));
    }
}

#[test]
fn a_miss_is_not_asked_for_again() {
    let (_lab, mut missed, asked) = depot(|_| claim(1, true, 0));
    let end = Instant::now() + Duration::from_millis(2 * PATIENCE_MS);
    while Instant::now() < end {
        assert_eq!(missed.poll(), (true, 0, 0));
    }
    assert!(asked.is_empty());
}

/// P4: the leases of a hit that its client does not use must not stay until the claim expires.
#[test]
fn a_claim_whose_depot_answers_with_an_error_is_released() {
    let failed = || Response::Failed { kind: "unsupported".into(), message: "no immediate reply".into() };
    let (lab, mut pending, asked) =
        depot(move |asked| asked.map_or_else(|| claim(7, false, 0), |_| failed()));
    assert_eq!(pending.settle_now(), (true, 0, 0));
    assert_eq!(lab.released.try_iter().collect::<Vec<_>>(), [7]);
    drop(pending);
    assert!(lab.released.is_empty() && asked.try_iter().eq([Some((7, true))]));
}
