//! A store that fails in every way costs misses in bounded time, and never a wrong byte.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::bucket_server::{Act, BucketServer, Dialect, Speaking, in_every_dialect, until};
use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{ObjectConfig, ObjectTier, Presence, Tier, Written};

fn open(server: &BucketServer, change: impl FnOnce(&mut ObjectConfig)) -> Bench {
    let mut config = server.config("kv");
    change(&mut config);
    Bench::new(Arc::new(ObjectTier::open(config).unwrap()))
}

fn impatient(config: &mut ObjectConfig) {
    config.timeout = Duration::from_secs(1);
}

type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

fn figure(bench: &Bench, name: &str) -> u64 {
    bench.tier.figures().into_iter().find(|(known, _)| *known == name).unwrap().1
}

/// Returns the name of a block's object.
fn name(server: &BucketServer, bench: &Bench, n: u64) -> String {
    let names = server.names(&bench.key(n).hash.to_string());
    assert_eq!(names.len(), 1, "{names:?}");
    names.into_iter().next().unwrap()
}

in_every_dialect! {
    damaged_objects_are_misses_and_go
    an_answer_that_ends_early_is_asked_for_again
    errors_of_the_server_are_tried_again_a_few_times
    too_many_requests_do_not_switch_the_store_off
    a_store_that_hangs_costs_the_deadline_and_then_nothing
    a_lookup_ends_by_its_deadline_and_the_answer_is_kept
    a_server_that_dies_and_comes_back_is_used_again
    a_server_that_dies_amid_traffic_costs_misses_and_no_wrong_byte
    refusals_amid_traffic_cost_misses_and_no_wrong_byte
    a_write_that_was_not_answered_cannot_be_removed_yet
    parts_that_may_be_put_together_late_keep_the_next_write_away
    another_value_is_not_taken_for_ones_own
    a_conflict_is_tried_again_and_nothing_is_taken_for_stored
    a_write_that_ends_during_a_removal_leaves_no_belief
    what_was_said_of_a_block_before_its_removal_is_not_believed_after_it
    writes_that_fail_hold_back_no_reset_and_no_removal
    deadlines_that_are_shorter_than_the_timeout_switch_a_hung_store_off
    short_deadlines_switch_a_hung_store_off_together
    a_trial_that_was_not_answered_opens_all_the_same
    resets_of_one_depot_at_once_share_an_epoch
    resets_of_many_depots_at_once_have_an_epoch_each
    a_reset_that_is_not_stored_hides_all_until_it_is
    a_damaged_epoch_opens_nothing
}

/// A real server honours them.
mod blind {
    use super::*;

    crate::bucket_server::with_every_standin! {
        a_store_that_ignores_conditions_is_refused
    }

    fn a_store_that_ignores_conditions_is_refused() {
        let server = BucketServer::start();
        server.plan(|_| Act::IgnoreConditions);
        let tier = ObjectTier::open(server.config("kv")).unwrap();
        let spec =
            kvdepot_tier::conformance::spec("one", kvdepot_core::BlockLayout::new(vec![vec![100]]).unwrap());
        let error = tier.open_and_wait(&spec, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let condition = match server.dialect() {
            Dialect::Google => "x-goog-if-generation-match",
            Dialect::S3 | Dialect::RealS3 | Dialect::Azure => "If-None-Match",
        };
        assert!(error.to_string().contains(condition), "{error}");
        server.serve_all();
        assert_eq!(tier.open_and_wait(&spec, 0).unwrap(), 0, "it is tried again");
    }
}

fn damaged_objects_are_misses_and_go() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(6);
    let names: Vec<String> = (0..6).map(|n| name(&server, &bench, n)).collect();
    let mut other = Vec::new();
    server.change(&names[5], |bytes| other.clone_from(bytes));
    let damage: [Damage<'_>; 5] = [
        &|bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
        &|bytes| bytes[30] ^= 1,
        &|bytes| bytes.clone_from(&other),
        &|bytes| bytes.truncate(bytes.len() - 1),
        &Vec::clear,
    ];
    for (name, damage) in names.iter().zip(damage) {
        server.change(name, damage);
    }
    for n in 0..5 {
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::Corrupt, "block {n}");
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::NotFound, "block {n}, once more");
    }
    bench.drain();
    assert_eq!(figure(&bench, "corrupt_blocks"), 5);
    assert_eq!(server.names("/blocks/"), [names[5].clone()], "what is damaged is deleted");
    assert!((0..5).all(|n| bench.write(n).unwrap() == Written::New));
    assert!((0..6).all(|n| bench.read_is_right(n)));
}

fn an_answer_that_ends_early_is_asked_for_again() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(1);
    let mut cuts = [0, 1, 5000].into_iter();
    server.plan(move |request| match request.is_block() && request.method == "GET" {
        true => cuts.next().map_or(Act::Serve, Act::Cut),
        false => Act::Serve,
    });
    assert!(bench.read_is_right(0));
    assert_eq!(figure(&bench, "tried_again"), 3);
    server.plan(|_| Act::Cut(4096));
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Unavailable);
    server.serve_all();
    assert!(bench.read_is_right(0), "the object itself was whole");
    assert_eq!(figure(&bench, "corrupt_blocks"), 0);
}

fn errors_of_the_server_are_tried_again_a_few_times() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    for status in [500, 502, 503, 429] {
        let mut first = true;
        server.plan(move |request| {
            let fails = request.is_block() && std::mem::take(&mut first);
            if fails { Act::Refuse(status) } else { Act::Serve }
        });
        let n = u64::from(status);
        assert_eq!(bench.write(n).unwrap(), Written::New, "{status}");
        server.serve_all();
        assert!(bench.read_is_right(n));
    }
    assert_eq!((figure(&bench, "tried_again"), figure(&bench, "slowed_down")), (4, 2));
    server.plan(|request| if request.is_block() { Act::Refuse(500) } else { Act::Serve });
    assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(bench.read(500).is_err());
}

fn too_many_requests_do_not_switch_the_store_off() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(1);
    server.plan(|_| Act::Refuse(503));
    let mut unanswered = 0;
    for _ in 0..4 {
        let read = bench.begin_read(0, bench.slot(), Instant::now() + Duration::from_millis(200));
        let kind = Bench::answer(&read).unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::Busy | ErrorKind::Timeout), "{kind:?}");
        unanswered += u64::from(kind == ErrorKind::Timeout);
    }
    // The silence of a slow machine may count as failures; the answers do not.
    assert!(bench.tier.servers()[0].up && figure(&bench, "failures") <= unanswered);
    server.serve_all();
    until("it is read again", || bench.read_is_right(0));
}

fn a_store_that_hangs_costs_the_deadline_and_then_nothing() {
    let server = BucketServer::start();
    let bench = open(&server, impatient);
    until("a write on a slow machine", || bench.write(0).is_ok());
    server.plan(|_| Act::Hang);
    let patient = Bench::soon();
    let reads: Vec<_> = (0..4).map(|_| bench.begin_read(0, bench.slot(), patient)).collect();
    for read in reads {
        assert!(Bench::answer(&read).is_err());
    }
    until("it is switched off, and nothing is asked", || {
        let asked = figure(&bench, "get_requests");
        !bench.tier.servers()[0].up
            && bench.peek(0) == Presence::Absent
            && bench.tier.is_down(&bench.key(0))
            && bench.read(0).unwrap_err().kind() == ErrorKind::Unavailable
            && bench.probe(bench.keys(3)).unwrap_or(0) == 0
            && figure(&bench, "get_requests") == asked
    });
    server.serve_all();
    until("a trial shows that it is back", || bench.read_is_right(0));
    assert!(bench.tier.servers()[0].up);
}

fn a_lookup_ends_by_its_deadline_and_the_answer_is_kept() {
    let server = BucketServer::start();
    open(&server, |_| {}).write_all(1);
    let bench = open(&server, |_| {});
    let (go, wait) = std::sync::mpsc::channel::<()>();
    server.plan(move |request| {
        if request.method == "HEAD" {
            let _ = wait.recv();
        }
        Act::Serve
    });
    let (send, receive) = std::sync::mpsc::channel();
    let done = Box::new(move |count| drop(send.send(count)));
    bench.tier.probe(bench.keys(1), Instant::now() + Duration::from_secs(1), done);
    assert_eq!(Bench::answer(&receive).unwrap(), 0, "not known by the deadline is a miss");
    drop(go);
    until("the answer came later", || bench.peek(0) == Presence::Present);
}

fn a_server_that_dies_and_comes_back_is_used_again() {
    let mut server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(3);
    server.stop();
    for n in 0..3 {
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::Unavailable);
        assert!(bench.write(10 + n).is_err());
    }
    server.come_back();
    until("it is read again", || bench.read_is_right(0));
    until("it is written again", || bench.write(10).is_ok());
    assert!((0..3).all(|n| bench.read_is_right(n)) && bench.read_is_right(10));
}

/// Operations that have ended.
#[derive(Default)]
struct Ended {
    well: AtomicU64,
    badly: AtomicU64,
    is_enough: AtomicBool,
}

impl Ended {
    fn count(&self, is_well: bool) {
        let count = if is_well { &self.well } else { &self.badly };
        count.fetch_add(1, Ordering::Relaxed);
        if !is_well {
            // While the store is off, nothing takes any time.
            std::thread::yield_now();
        }
    }

    /// Waits until so many more have succeeded and failed.
    fn more(&self, well: u64, badly: u64) {
        let counts = || (self.well.load(Ordering::Relaxed), self.badly.load(Ordering::Relaxed));
        let before = counts();
        until("operations go on", || counts().0 >= before.0 + well && counts().1 >= before.1 + badly);
    }
}

/// Reads blocks 0 to 3 and writes new ones, in two threads, while `meanwhile` runs. Returns the first block whose write was
/// not confirmed; all from 100 on to there were.
fn traffic(bench: &Bench, meanwhile: impl FnOnce(&Ended)) -> u64 {
    let ended = Ended::default();
    let goes_on = || !ended.is_enough.load(Ordering::Relaxed);
    let within = || Instant::now() + Duration::from_secs(5);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..4).cycle().take_while(|_| goes_on()) {
                let slot = bench.slot();
                // It panics if an operation does not end.
                let outcome = Bench::answer(&bench.begin_read(n, slot.clone(), within()));
                if outcome.is_ok() {
                    assert_eq!(bench.block_of(&slot), bench.bytes(n), "block {n} (P1)");
                }
                ended.count(outcome.is_ok());
            }
        });
        let writer = scope.spawn(|| {
            let mut next = 100;
            while goes_on() {
                let outcome = Bench::answer(&bench.begin_write(next, bench.filled(next), within()));
                next += u64::from(outcome.is_ok());
                ended.count(outcome.is_ok());
            }
            next
        });
        // If it panics, the threads end, too.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(&ended)));
        ended.is_enough.store(true, Ordering::Relaxed);
        let next = writer.join().unwrap();
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        next
    })
}

/// Checks that all is there that was stored, and that the tier is as good as ever.
fn check_after_traffic(server: &BucketServer, bench: &Bench, next: u64) {
    until("it is read again", || bench.read_is_right(0));
    until("it is written again", || bench.write(next).is_ok());
    assert!((0..4).chain(100..=next).all(|n| bench.read_is_right(n)), "what was confirmed is there");
    let other = open(server, |_| {});
    assert!((0..4).chain(100..=next).all(|n| other.read_is_right(n)), "for other depots, too");
    assert_eq!(
        figure(bench, "corrupt_blocks") + figure(&other, "corrupt_blocks"),
        0,
        "no object is half a block"
    );
}

fn a_server_that_dies_amid_traffic_costs_misses_and_no_wrong_byte() {
    let mut server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(4);
    let next = traffic(&bench, |ended| {
        for _ in 0..3 {
            ended.more(20, 0);
            server.stop();
            ended.more(0, 4);
            server.come_back();
        }
        ended.more(20, 0);
    });
    check_after_traffic(&server, &bench, next);
}

fn refusals_amid_traffic_cost_misses_and_no_wrong_byte() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(4);
    let (count, refused) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&refused);
    server.plan(move |request| {
        if !request.is_block() {
            return Act::Serve;
        }
        let act = match count.fetch_add(1, Ordering::Relaxed) % 4 {
            0 => Act::Refuse(503),
            2 => Act::Refuse(500),
            _ => Act::Serve,
        };
        seen.fetch_add(u64::from(act != Act::Serve), Ordering::Relaxed);
        act
    });
    let next = traffic(&bench, |ended| {
        until("many are refused", || refused.load(Ordering::Relaxed) >= 20);
        server.serve_all();
        ended.more(20, 0);
    });
    assert!(figure(&bench, "slowed_down") > 0 && figure(&bench, "tried_again") > 0);
    check_after_traffic(&server, &bench, next);
}

fn a_write_that_was_not_answered_cannot_be_removed_yet() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    // A later try finds the object of the first one there, which is then over.
    fail_once(&server, Act::ServeAndClose);
    assert_eq!(bench.write(0).unwrap(), Written::New);
    bench.remove(0).unwrap();
    assert_eq!(bench.write(0).unwrap(), Written::New);
    // The first one may still be carried out: a later try's answer says nothing about it.
    fail_once(&server, Act::Close);
    assert_eq!(bench.write(2).unwrap(), Written::New);
    assert_eq!(bench.remove(2).unwrap_err().kind(), ErrorKind::Busy);
    // So may one of two.
    let mut acts = [Act::Close, Act::ServeAndClose].into_iter();
    server.plan(move |request| {
        let is_write = request.is_block() && request.method == "PUT";
        if is_write { acts.next().unwrap_or(Act::Serve) } else { Act::Serve }
    });
    assert_eq!(bench.write(3).unwrap(), Written::New);
    assert_eq!(bench.remove(3).unwrap_err().kind(), ErrorKind::Busy);
    let bench = open(&server, impatient);
    server.plan(|request| if request.method == "PUT" { Act::Hang } else { Act::Serve });
    assert!(bench.write(1).is_err());
    server.serve_all();
    assert_eq!(bench.remove(1).unwrap_err().kind(), ErrorKind::Busy, "it may still be carried out");
    assert_ne!(bench.peek(1), Presence::Present);
}

/// Lets the next write of a block fail in this way.
fn fail_once(server: &BucketServer, act: Act) {
    let mut first = true;
    server.plan(move |request| {
        let fails = request.is_block() && request.method == "PUT" && std::mem::take(&mut first);
        if fails { act } else { Act::Serve }
    });
}

fn parts_that_may_be_put_together_late_keep_the_next_write_away() {
    let server = BucketServer::start();
    let (spec, part_bytes) = server.in_parts();
    let tier =
        open(&server, |config| (config.timeout, config.part_bytes) = (Duration::from_secs(1), part_bytes))
            .tier;
    let bench = Bench::with(tier, spec);
    server.plan(|request| if request.completes_parts() { Act::Hang } else { Act::Serve });
    // On a slow machine a write may fail earlier.
    until("a write that is not answered", || {
        assert!(bench.write(0).is_err());
        bench.remove(0).is_err_and(|error| error.kind() == ErrorKind::Busy)
    });
    server.serve_all();
    // On a slow machine there may have been so many failures that the store gets no requests for a while.
    until("an earlier one may replace it", || bench.write(0).unwrap_err().kind() == ErrorKind::Busy);
    // Azure drops them by itself, after a week.
    if server.dialect() != Dialect::Azure {
        until("all parts are dropped", || server.uploads() == 0);
    }
    assert!(server.names("/blocks/").is_empty());
}

fn another_value_is_not_taken_for_ones_own() {
    let server = BucketServer::start();
    open(&server, |_| {}).write_all(1);
    let bench = open(&server, |_| {});
    fail_once(&server, Act::Refuse(500));
    let write = bench.begin_write(0, bench.filled(7), Bench::soon());
    assert_eq!(Bench::answer(&write).unwrap(), Written::AlreadyThere, "the first try stored nothing");
    assert!(bench.read_is_right(0));
}

#[test]
fn parts_that_another_writer_dropped_are_not_the_end_of_a_write() {
    let _speaking = Speaking::set(Dialect::Azure);
    let server = BucketServer::start();
    let (in_parts, whole) = (open(&server, |config| config.part_bytes = 5000), open(&server, |_| {}));
    server.plan(|request| if request.completes_parts() { Act::Hold } else { Act::Serve });
    let write = in_parts.begin_write(0, in_parts.filled(0), Bench::soon());
    until("all parts are there", || server.with(|bucket| bucket.held == 1));
    assert_eq!(whole.write(0).unwrap(), Written::New);
    server.serve_all();
    assert_eq!(Bench::answer(&write).unwrap(), Written::AlreadyThere);
    assert!(in_parts.read_is_right(0));
}

fn a_conflict_is_tried_again_and_nothing_is_taken_for_stored() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    let mut conflicts = 2;
    server.plan(move |request| {
        if !request.is_block() || request.method != "PUT" || conflicts == 0 {
            return Act::Serve;
        }
        conflicts -= 1;
        Act::Refuse(409)
    });
    assert_eq!(bench.write(0).unwrap(), Written::New);
    assert!(open(&server, |_| {}).read_is_right(0));
    server.plan(|request| if request.is_block() { Act::Refuse(409) } else { Act::Serve });
    assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Busy);
    assert_ne!(bench.peek(1), Presence::Present);
    server.serve_all();
    bench.remove(1).unwrap();
}

fn a_write_that_ends_during_a_removal_leaves_no_belief() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    let (go, wait) = std::sync::mpsc::channel::<()>();
    server.plan(move |request| {
        if request.is_block() && request.method == "PUT" {
            let _ = wait.recv();
        }
        Act::Serve
    });
    let write = bench.begin_write(0, bench.filled(0), Bench::soon());
    let (send, removed) = std::sync::mpsc::channel();
    bench.tier.remove(vec![bench.key(0)], Box::new(move |outcome| drop(send.send(outcome))));
    drop(go);
    assert_eq!(Bench::answer(&write).unwrap(), Written::New);
    Bench::answer(&removed).unwrap();
    assert_ne!(bench.peek(0), Presence::Present);
    assert!(server.names("/blocks/").is_empty());
    assert_eq!(bench.write(0).unwrap(), Written::New);
}

fn what_was_said_of_a_block_before_its_removal_is_not_believed_after_it() {
    let server = BucketServer::start();
    open(&server, |_| {}).write_all(2);
    let bench = open(&server, |_| {});
    server.plan(|request| {
        let asks = request.is_block() && matches!(request.method.as_str(), "GET" | "HEAD");
        if asks { Act::ServeAndHold } else { Act::Serve }
    });
    let (send, found) = std::sync::mpsc::channel();
    let done = Box::new(move |count| drop(send.send(count)));
    bench.tier.probe(vec![bench.key(0)], Bench::soon(), done);
    let read = bench.begin_read(1, bench.slot(), Bench::soon());
    until("both are answered", || server.with(|bucket| bucket.held == 2));
    bench.remove(0).unwrap();
    bench.remove(1).unwrap();
    server.serve_all();
    Bench::answer(&found).unwrap();
    let _ = Bench::answer(&read);
    for n in 0..2 {
        assert_ne!(bench.peek(n), Presence::Present);
        assert_eq!(bench.write(n).unwrap(), Written::New);
    }
}

fn writes_that_fail_hold_back_no_reset_and_no_removal() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(1);
    server.plan(
        |request| {
            if request.is_block() && request.method == "PUT" { Act::Refuse(500) } else { Act::Serve }
        },
    );
    for n in 1..4 {
        assert!(bench.write(n).is_err());
    }
    bench.remove(0).unwrap();
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
}

fn deadlines_that_are_shorter_than_the_timeout_switch_a_hung_store_off() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(1);
    server.plan(|_| Act::Hang);
    until("it is switched off", || {
        let end = Instant::now() + Duration::from_secs(1);
        let reads: Vec<_> = (0..6).map(|_| bench.begin_read(0, bench.slot(), end)).collect();
        reads.iter().for_each(|read| assert!(Bench::answer(read).is_err()));
        !bench.tier.servers()[0].up
    });
}

fn short_deadlines_switch_a_hung_store_off_together() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.write_all(1);
    server.plan(|_| Act::Hang);
    until("it is switched off", || {
        let end = Instant::now() + Duration::from_millis(200);
        assert!(Bench::answer(&bench.begin_read(0, bench.slot(), end)).is_err());
        !bench.tier.servers()[0].up
    });
}

fn a_trial_that_was_not_answered_opens_all_the_same() {
    let server = BucketServer::start();
    let mut first = true;
    server.plan(move |request| {
        let fails = request.path.contains("/epochs/trial") && std::mem::take(&mut first);
        if fails { Act::ServeAndClose } else { Act::Serve }
    });
    let bench = open(&server, |_| {});
    assert_eq!((bench.epoch, figure(&bench, "tried_again")), (0, 1));
}

fn resets_of_one_depot_at_once_share_an_epoch() {
    let server = BucketServer::start();
    // All requests are sent before the store lets any of them begin.
    server.plan(|request| if request.path.contains("/epochs/trial") { Act::Hold } else { Act::Serve });
    let tier = ObjectTier::open(server.config("kv")).unwrap();
    let spec =
        kvdepot_tier::conformance::spec("one", kvdepot_core::BlockLayout::new(vec![vec![100]]).unwrap());
    let (spec, (send, receive)) = (Arc::new(spec), std::sync::mpsc::channel());
    for _ in 0..8 {
        let send = send.clone();
        let done = Box::new(move |outcome| drop(send.send(outcome)));
        tier.advance_epoch(&spec, 0, Bench::soon(), done);
    }
    until("the store is being tried", || server.with(|bucket| bucket.held > 0));
    server.serve_all();
    for _ in 0..8 {
        assert_eq!(Bench::answer(&receive).unwrap(), 1);
    }
    assert_eq!(tier.open_and_wait(&spec, 0).unwrap(), 1);
}

fn resets_of_many_depots_at_once_have_an_epoch_each() {
    let server = BucketServer::start();
    let benches: Vec<Bench> = (0..6).map(|_| open(&server, |_| {})).collect();
    let mut epochs: Vec<u32> = std::thread::scope(|scope| {
        let depots: Vec<_> = benches
            .iter()
            .map(|bench| {
                scope.spawn(|| {
                    (0..5).map(|_| bench.tier.advance_and_wait(&bench.spec, 0).unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        depots.into_iter().flat_map(|depot| depot.join().unwrap()).collect()
    });
    epochs.sort_unstable();
    assert_eq!(epochs, (1..=30).collect::<Vec<_>>(), "none twice and none lost");
    for bench in &benches {
        assert_eq!(bench.tier.open_and_wait(&bench.spec, 0).unwrap(), 30);
    }
}

fn a_reset_that_is_not_stored_hides_all_until_it_is() {
    let server = BucketServer::start();
    let mut bench = open(&server, |_| {});
    bench.write_all(2);
    server.plan(
        |request| if request.is_epoch() && request.method == "PUT" { Act::Refuse(500) } else { Act::Serve },
    );
    assert!(bench.tier.advance_and_wait(&bench.spec, 0).is_err());
    assert_eq!(bench.peek(0), Presence::Absent);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(bench.write(5).unwrap_err().kind(), ErrorKind::NotFound);
    server.serve_all();
    until("it is stored by itself", || !server.names("/epochs/").is_empty());
    let other = open(&server, |_| {});
    assert!(other.epoch > bench.epoch);
    until("and then served", || {
        bench.tier.open_and_wait(&bench.spec, 0).is_ok_and(|epoch| epoch == other.epoch)
    });
    bench.epoch = other.epoch;
    bench.write_all(1);
    assert!(other.read_is_right(0));
}

fn a_damaged_epoch_opens_nothing() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    bench.tier.advance_and_wait(&bench.spec, 6).unwrap();
    let names = server.names("/epochs/");
    assert_eq!(names.len(), 1, "the trial is deleted: {names:?}");
    server.change(&names[0], |bytes| bytes[20] ^= 1);
    let tier = ObjectTier::open(server.config("kv")).unwrap();
    assert_eq!(tier.open_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Corrupt);
}
