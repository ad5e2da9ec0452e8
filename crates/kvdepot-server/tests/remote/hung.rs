//! A pool server that hangs: P2, the tier below it serves and nothing waits for long; P4, nothing is left behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::ErrorKind;
use std::sync::Arc;

use crate::common::{Engine, LONG, embedded, spec};
use crate::gate::Gate;
use crate::pool::{claim, layout, over, server, stats, until};
use crate::wire::Wired;
use kvdepot_depot::client::Attachment;
use kvdepot_wire::infini::{Reply, Request};
use kvdepot_wire::limits::KEYS_MAX;
use serde_json::json;

const PAGES: u64 = 16;
/// The timeout of a task.
const TIMEOUT_MS: u64 = 8_000;
/// So small that early dumps are soon only in the tiers.
const POOL: u64 = 4 << 20;
const SERVER_POOL: u64 = 64 << 20;

fn names(from: u64) -> Vec<u64> {
    (from..from + PAGES).collect()
}

/// Dumps blocks from number `first` on, until the pool holds no earlier dumps.
fn push_out(depot: &Arc<Attachment>, engine: &Engine, first: u64) {
    for turn in 0..5 {
        assert!(engine.dump(&names(first + turn * PAGES), &engine.all_pages()).is_empty());
        assert!(depot.drain(LONG).unwrap(), "{}", depot.stats());
    }
}

fn stat(depot: &Arc<Attachment>, name: &str) -> u64 {
    stats(depot)[name].as_u64().unwrap()
}

fn nothing_is_held(depot: &Arc<Attachment>) {
    for name in ["pool_filling_bytes", "pool_fetching_bytes", "pool_dirty_bytes", "pool_leased_bytes"] {
        until(name, || stat(depot, name) == 0);
    }
    until("writes_queued", || stat(depot, "writes_queued") == 0);
    until("fetches_queued", || stat(depot, "fetches_queued") == 0);
}

/// With a silence shorter than every wait, and with a longer one: then half of the time is left for the files.
#[test]
fn files_below_serve_while_the_pool_server_hangs() {
    for timeout_ms in [1_000, 3_600_000] {
        let directory = tempfile::tempdir().unwrap();
        let wired = Wired::open(crate::common::config(SERVER_POOL, json!({})), json!({}));
        let gate = Gate::before(wired.at);
        let more = json!({"timeout_ms": TIMEOUT_MS, "posix": {"directories": [directory.path()]}});
        let remote = json!({"timeout_ms": timeout_ms});
        let depot = embedded(over(gate.at, "Cache|Remote|Posix", POOL, &remote, &more));
        let spec = spec("hung", layout());
        let mut engine = Engine::new(&depot, &spec, PAGES as usize);
        engine.fill(1);
        assert!(engine.dump(&names(0), &engine.all_pages()).is_empty());
        push_out(&depot, &engine, 1_000);
        until("the server is used", || server(&depot)["up"] == true);
        gate.set_shut(true);
        // The server is assumed to hold them, and is asked first.
        assert_eq!(claim(&depot, &spec, PAGES), (true, 16, 16), "{timeout_ms} ms: {}", depot.stats());
        engine.clear();
        assert!(engine.load(&names(0), &engine.all_pages()).is_empty());
        assert!((0..PAGES as usize).all(|page| engine.holds(page, page, 1)));
        if timeout_ms > TIMEOUT_MS {
            continue;
        }
        until("the server counts as gone", || server(&depot)["up"] == false);
        assert!(server(&depot)["failures"].as_u64().unwrap() > 0, "{}", server(&depot));
        let last = server(&depot)["last_error"].as_str().unwrap().to_owned();
        // The second one is of a later attempt to connect.
        assert!(last.contains("in time") || last.contains("during the handshake"), "{last}");
        // Dumps go to the files.
        push_out(&depot, &engine, 2_000);
        assert_eq!(stat(&depot, "write_blocks_dropped"), 0, "the files took them");
        assert_eq!(claim(&depot, &spec, PAGES), (true, 16, 16), "{}", depot.stats());
        nothing_is_held(&depot);
        // After its return it is used again.
        gate.set_shut(false);
        until("the server is there again", || server(&depot)["up"] == true);
        let (before, mut first) = (wired.stat("pool_blocks"), 3_000);
        // On a busy machine, a server that answers may be late, too.
        until("the server holds more", || {
            push_out(&depot, &engine, first);
            first += 1_000;
            wired.stat("pool_blocks") > before
        });
        wired.wait_stat("pool_leased_bytes", 0);
        wired.wait_stat("pool_filling_bytes", 0);
    }
}

/// Without a tier below it, dumps are dropped, and blocks in the pool are loaded nevertheless.
#[test]
fn dumps_are_dropped_and_loads_go_on() {
    let wired = Wired::open(crate::common::config(SERVER_POOL, json!({})), json!({}));
    let gate = Gate::before(wired.at);
    let remote = json!({"timeout_ms": 500});
    let depot = embedded(over(gate.at, "Cache|Remote", POOL, &remote, &json!({"timeout_ms": TIMEOUT_MS})));
    let spec = spec("dropped", layout());
    let mut engine = Engine::new(&depot, &spec, PAGES as usize);
    engine.fill(1);
    gate.set_shut(true);
    let mut kept = Vec::new();
    for turn in 0..8 {
        engine.fill(turn as u8);
        let refused = engine.dump(&names(turn * PAGES), &engine.all_pages());
        kept.push(refused.is_empty());
        if refused.is_empty() {
            engine.clear();
            assert!(engine.load(&names(turn * PAGES), &engine.all_pages()).is_empty(), "{}", depot.stats());
            assert!((0..PAGES as usize).all(|page| engine.holds(page, page, turn as u8)));
        }
    }
    assert!(kept[0], "the pool was empty: {kept:?}");
    assert!(depot.drain(LONG).unwrap(), "{}", depot.stats());
    assert!(stat(&depot, "write_blocks_dropped") > 0);
    nothing_is_held(&depot);
    gate.set_shut(false);
    until("the server is there again", || server(&depot)["up"] == true);
    let mut first = 9_000;
    // On a busy machine, a server that answers may be late, too.
    until("dumps reach the server again", || {
        assert!(engine.dump(&names(first), &engine.all_pages()).is_empty());
        assert!(depot.drain(LONG).unwrap());
        first += PAGES;
        // Blocks in flight when the gate was shut may have arrived, too.
        wired.stat("pool_blocks") >= PAGES
    });
}

/// A server that never answered at all: opening a namespace, lookups and dumps terminate nevertheless.
#[test]
fn a_server_that_hangs_from_the_start_costs_a_silence() {
    let directory = tempfile::tempdir().unwrap();
    let wired = Wired::open(crate::common::config(SERVER_POOL, json!({})), json!({}));
    let gate = Gate::before(wired.at);
    gate.set_shut(true);
    let more = json!({"timeout_ms": TIMEOUT_MS, "posix": {"directories": [directory.path()]}});
    let depot = embedded(over(gate.at, "Cache|Remote|Posix", POOL, &json!({"timeout_ms": 500}), &more));
    let spec = spec("never", layout());
    let mut engine = Engine::new(&depot, &spec, PAGES as usize);
    engine.fill(3);
    assert!(engine.dump(&names(0), &engine.all_pages()).is_empty());
    push_out(&depot, &engine, 1_000);
    assert_eq!(claim(&depot, &spec, PAGES), (true, 16, 16), "{}", depot.stats());
    depot.reset(&[Arc::clone(&spec)]).unwrap_err();
    assert_eq!(claim(&depot, &spec, PAGES).1, 0, "reset, though the server could not be told");
    nothing_is_held(&depot);
}

/// The deletion cannot end while the server hangs, so no answer before that waited for it.
#[test]
fn a_deletion_of_many_keys_delays_no_other_client() {
    let wired = Wired::open(crate::common::config(SERVER_POOL, json!({})), json!({}));
    let gate = Gate::before(wired.at);
    let remote = json!({"timeout_ms": 3_600_000});
    let own = Wired::open(over(gate.at, "Cache|Remote", SERVER_POOL, &remote, &json!({})), json!({}));
    let (mut deletes, mut gets) = (own.infini(), own.infini());
    for key in ["gone", "stays"] {
        assert_eq!(gets.put(key, key.as_bytes()), Reply::Code(200));
    }
    assert_eq!(own.stat("pool_blocks"), 2);
    until("the server has them", || own.stat("writes_queued") == 0 && own.stat("dirty_blocks") == 0);
    gate.set_shut(true);
    let names: Vec<String> = (1..KEYS_MAX).map(|n| format!("never stored {n}")).collect();
    let keys = [b"gone".as_slice()].into_iter().chain(names.iter().map(String::as_bytes)).collect();
    let delete = Request::Delete(keys);
    deletes.send(&delete);
    until("the first key is removed", || own.stat("pool_blocks") == 1);
    for _ in 0..10 {
        assert_eq!(gets.get("stays").as_deref(), Some(b"stays".as_slice()));
    }
    deletes.0.set_nonblocking(true).unwrap();
    let answered = deletes.0.peek(&mut [0]);
    assert_eq!(answered.unwrap_err().kind(), ErrorKind::WouldBlock, "the deletion has not ended");
    gate.set_shut(false);
}
