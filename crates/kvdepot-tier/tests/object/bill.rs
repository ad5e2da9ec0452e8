//! The requests of an Object tier to its store, and the objects that it leaves there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::bucket_server::{Act, BucketServer, in_every_dialect, until};
use crate::heard::Heard;
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, listen, spec};
use kvdepot_tier::{ObjectConfig, ObjectTier, Presence, Tier, Written};

fn open(server: &BucketServer, change: impl FnOnce(&mut ObjectConfig)) -> Bench {
    let mut config = server.config("kv");
    change(&mut config);
    Bench::new(Arc::new(ObjectTier::open(config).unwrap()))
}

fn figure(bench: &Bench, name: &str) -> u64 {
    bench.tier.figures().into_iter().find(|(known, _)| *known == name).unwrap().1
}

in_every_dialect! {
    the_bill_is_what_the_store_has_served
    a_prompt_that_nobody_has_seen_costs_one_request
    a_hit_costs_a_read_and_at_most_one_question
    blocks_that_another_depot_wrote_are_not_stored_twice
    what_a_lifecycle_rule_took_is_a_miss_and_written_again
    past_epochs_are_deleted_and_no_other_s
    what_a_reset_during_a_sweep_leaves_is_deleted_as_well
    a_depot_that_begins_after_a_crash_deletes_what_lies_in_past_epochs
    a_bucket_that_is_not_there_opens_no_namespace
    refused_keys_are_named_as_such_and_not_shown
}

fn the_bill_is_what_the_store_has_served() {
    let server = BucketServer::start();
    let (spec, part_bytes) = server.in_parts();
    let bench = Bench::with(open(&server, |config| config.part_bytes = part_bytes).tier, spec);
    bench.write_all(3);
    assert!((0..3).all(|n| bench.read_is_right(n)));
    assert_eq!(bench.probe(bench.keys(4)).unwrap(), 3);
    bench.remove(0).unwrap();
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    until("past epochs are deleted", || server.names("/blocks/").is_empty());
    until("the bill is complete", || {
        let served = server.with(|bucket| bucket.served.clone());
        served.iter().all(|(line, count)| figure(&bench, line) == *count) && served.len() == 5
    });
    until("what was deleted is counted", || figure(&bench, "swept_objects") == 2);
    let least = 3 * bench.spec.layout().block_bytes();
    assert!(figure(&bench, "sent_bytes") >= least && figure(&bench, "received_bytes") >= least);
}

fn a_hit_costs_a_read_and_at_most_one_question() {
    const COUNT: u64 = 20;
    let server = BucketServer::start();
    let asked = |line: &str| server.with(|bucket| bucket.served.get(line).copied().unwrap_or(0));
    let questions = || (asked("head_requests"), asked("get_requests"));
    let writer = open(&server, |_| {});
    writer.write_all(COUNT);
    let before = questions();
    assert_eq!(writer.probe(writer.keys(COUNT)).unwrap(), COUNT as usize);
    assert!((0..COUNT).all(|n| writer.read_is_right(n)));
    assert_eq!(questions(), (before.0, before.1 + COUNT), "of what it wrote it asks nothing");
    let other = open(&server, |_| {});
    let before = questions();
    assert_eq!(other.probe(other.keys(COUNT)).unwrap(), COUNT as usize);
    assert!((0..COUNT).all(|n| other.read_is_right(n)));
    assert_eq!(questions(), (before.0 + COUNT, before.1 + COUNT), "a question and a read for a block");
    assert_eq!(other.probe(other.keys(COUNT)).unwrap(), COUNT as usize);
    assert!((0..COUNT).all(|n| other.read_is_right(n)));
    assert_eq!(questions(), (before.0 + COUNT, before.1 + 2 * COUNT), "and a read the next time");
}

fn a_prompt_that_nobody_has_seen_costs_one_request() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    for _ in 0..3 {
        assert_eq!(bench.probe(bench.keys(200)).unwrap(), 0);
    }
    assert_eq!(figure(&bench, "head_requests"), 1, "and none while the answer is believed");
    let other = open(&server, |_| {});
    other.write_all(20);
    assert_eq!(bench.probe(bench.keys(200)).unwrap(), 0, "believed absent");
    assert_eq!(bench.probe((1..200).map(|n| bench.key(n)).collect()).unwrap(), 19, "of what it did not know");
    assert!(figure(&bench, "head_requests") <= 1 + 1 + 8 + 64);
    let asked = figure(&other, "head_requests");
    assert_eq!(other.probe(other.keys(20)).unwrap(), 20);
    assert_eq!(figure(&other, "head_requests"), asked, "what it wrote it knows");
    let fresh = open(&server, |config| config.absent_ttl = Duration::ZERO);
    assert_eq!(fresh.probe(fresh.keys(21)).unwrap(), 20);
    assert_eq!(fresh.write(20).unwrap(), Written::New);
    assert_eq!(fresh.probe(fresh.keys(22)).unwrap(), 21);
}

fn blocks_that_another_depot_wrote_are_not_stored_twice() {
    let server = BucketServer::start();
    let (spec, part_bytes) = server.in_parts();
    let one = Bench::with(open(&server, |_| {}).tier, spec.clone());
    let two = Bench::with(open(&server, |config| config.part_bytes = part_bytes).tier, spec);
    one.write_all(3);
    assert!(
        (0..3).all(|n| two.write(n).unwrap() == Written::AlreadyThere),
        "by condition, or by a look before parts"
    );
    assert!((0..3).all(|n| two.read_is_right(n)));
}

fn what_a_lifecycle_rule_took_is_a_miss_and_written_again() {
    let server = BucketServer::start();
    let bench = open(&server, |_| {});
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    bench.write_all(2);
    for name in server.names(&bench.key(0).hash.to_string()) {
        server.lose(&name);
    }
    assert_eq!(bench.peek(0), Presence::Present, "nobody told it");
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(*heard.0.lock(), [bench.key(0)]);
    assert_eq!(bench.peek(0), Presence::Absent);
    assert_eq!(bench.write(0).unwrap(), Written::New);
    assert!(bench.read_is_right(0) && bench.read_is_right(1));
}

fn past_epochs_are_deleted_and_no_other_s() {
    let server = BucketServer::start();
    let mut bench = open(&server, |_| {});
    let other =
        Bench::with(Arc::clone(&bench.tier), spec("another", BlockLayout::new(vec![vec![100]]).unwrap()));
    bench.write_all(3);
    other.write_all(2);
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    bench.write_all(1);
    until("three of six go", || server.names("/blocks/").len() == 3);
    assert!(bench.read_is_right(0) && (0..2).all(|n| other.read_is_right(n)));
    let kept = open(&server, |config| config.sweep = false);
    kept.tier.advance_and_wait(&kept.spec, 0).unwrap();
    kept.drain();
    assert_eq!(server.names("/blocks/").len(), 3, "a rule of the bucket's does it");
}

fn what_a_reset_during_a_sweep_leaves_is_deleted_as_well() {
    let server = BucketServer::start();
    let mut bench = open(&server, |_| {});
    bench.write_all(2);
    server.plan(|request| if request.is_list() { Act::Hold } else { Act::Serve });
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    until("the bucket is being listed", || server.with(|bucket| bucket.held > 0));
    bench.write_all(3);
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    server.serve_all();
    until("all go", || server.names("/blocks/").is_empty());
}

fn a_depot_that_begins_after_a_crash_deletes_what_lies_in_past_epochs() {
    let server = BucketServer::start();
    let bench = open(&server, |config| config.sweep = false);
    bench.write_all(2);
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    let _next = open(&server, |_| {});
    until("both go", || server.names("/blocks/").is_empty());
}

fn a_bucket_that_is_not_there_opens_no_namespace() {
    let server = BucketServer::start();
    let mut config = server.config("kv");
    config.bucket = "another".into();
    let tier = ObjectTier::open(config).unwrap();
    let error = tier.open_and_wait(&spec("one", BlockLayout::new(vec![vec![100]]).unwrap()), 0).unwrap_err();
    assert!(error.to_string().contains("no such bucket"), "{error}");
}

/// In a separate process, because all tests of this one share its environment.
#[test]
fn keys_of_a_file_do_without_the_environment_s_token() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bill::with_the_environment_s_token", "--ignored"])
        .env("AWS_SESSION_TOKEN", "of-other-keys")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "a part of keys_of_a_file_do_without_the_environment_s_token"]
fn with_the_environment_s_token() {
    assert_eq!(std::env::var("AWS_SESSION_TOKEN").unwrap(), "of-other-keys");
    let server = BucketServer::start();
    let (send, signed) = std::sync::mpsc::channel();
    server.plan(move |request| {
        let has = |name: &str| request.headers.contains_key(name);
        let _ = send.send((has("authorization"), has("x-amz-security-token")));
        Act::Serve
    });
    open(&server, |_| {}).write_all(1);
    assert_eq!(signed.recv().unwrap(), (true, false));
}

fn refused_keys_are_named_as_such_and_not_shown() {
    for (status, kind) in [(403, ErrorKind::Permission), (500, ErrorKind::Unavailable)] {
        refused_keys(status, kind);
    }
}

fn refused_keys(status: u16, kind: ErrorKind) {
    let server = BucketServer::start();
    server.plan(move |_| Act::Refuse(status));
    let tier = ObjectTier::open(server.config("kv")).unwrap();
    let error = tier.open_and_wait(&spec("one", BlockLayout::new(vec![vec![100]]).unwrap()), 0).unwrap_err();
    assert_eq!(error.kind(), kind);
    let told = format!("{error} {error:?} {tier:?} {:?}", tier.servers());
    assert!(told.contains(&format!("Test{status}")) && !told.contains("secret"), "{told}");
}
