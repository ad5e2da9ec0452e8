//! A Mooncake that hangs, dies, lies and forgets: misses and errors in bounded time, never wrong bytes (P1, P2, P4).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::mooncake_store::{Fault, Store};
use kvdepot_core::limits::MOONCAKE_HANG_MS;
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, spec, until};
use kvdepot_tier::mooncake::{HelperProcess, HelperStarter, MooncakeHelper, MooncakeOp};
use kvdepot_tier::{MooncakeConfig, MooncakeTier, Presence, Tier, Written};

fn bench_with(store: &Store, config: MooncakeConfig) -> Bench {
    Bench::new(Arc::new(MooncakeTier::open_with(config, store.starter()).unwrap()))
}

fn bench(store: &Store) -> Bench {
    bench_with(store, Store::config())
}

fn in_ms(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Repeats a write with ever longer deadlines until the store has got it, where it hangs.
fn write_into_the_void(bench: &Bench, store: &Store, n: u64) {
    store.set(Fault::Hang, Some(MooncakeOp::Put));
    let mut patience = 50;
    while !store.requests().iter().any(|(op, _)| *op == MooncakeOp::Put) {
        let written = Bench::answer(&bench.begin_write(n, bench.filled(n), in_ms(patience)));
        assert_eq!(written.unwrap_err().kind(), ErrorKind::Timeout);
        patience *= 2;
    }
}

#[test]
fn a_read_that_hangs_ends_at_its_deadline_and_its_slot_is_no_longer_touched() {
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(2);
    store.set(Fault::Hang, Some(MooncakeOp::Get));
    let hung = Instant::now();
    let slots: Vec<_> = (0..2).map(|_| bench.slot()).collect();
    for (n, slot) in slots.iter().enumerate() {
        let read = Bench::answer(&bench.begin_read(n as u64, slot.clone(), in_ms(300)));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Timeout);
        slot.write_at(0, &vec![0x5a; slot.len()]);
    }
    // The late calls are carried out now, into memory that nobody looks at.
    store.free();
    let hung = hung.elapsed();
    until("it serves again", || bench.read_is_right(0) && bench.read_is_right(1));
    bench.drain();
    for slot in &slots {
        let mut bytes = vec![0; slot.len()];
        slot.read_at(0, &mut bytes);
        assert!(
            bytes.iter().all(|&byte| byte == 0x5a),
            "a late call wrote into a slot that was given back (P4)"
        );
    }
    // Unless this machine stood still until the helper was replaced.
    assert!(store.starts() == 1 || hung > Duration::from_millis(MOONCAKE_HANG_MS));
}

#[test]
fn a_block_whose_write_hangs_cannot_be_removed_before_the_write_has_ended() {
    let store = Store::default();
    let bench = bench(&store);
    write_into_the_void(&bench, &store, 5);
    // Unless this machine stood still until the helper was replaced.
    let removed = bench.remove(5);
    let is_busy = removed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy);
    assert!(is_busy || store.starts() > 1, "it may still be stored: {removed:?}");
    store.free();
    until("the write ends, and the block can be removed", || bench.remove(5).is_ok());
    assert_eq!(bench.read(5).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!store.names().iter().any(|name| !name.ends_with("/epoch")), "{:?}", store.names());
    assert_eq!(bench.write(5).unwrap(), Written::New);
}

#[test]
fn a_helper_that_hangs_for_long_is_replaced() {
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(1);
    store.set(Fault::Hang, Some(MooncakeOp::Get));
    let gets = || store.requests().iter().filter(|(op, _)| *op == MooncakeOp::Get).count();
    // On a slow machine a deadline may pass before the request is sent.
    let (before, mut patience_ms) = (gets(), 300);
    while gets() == before {
        let read = Bench::answer(&bench.begin_read(0, bench.slot(), in_ms(patience_ms)));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Timeout);
        patience_ms *= 2;
    }
    // Its end ends the fault.
    until("another helper is started", || store.starts() > 1);
    until("it serves", || bench.read_is_right(0));
}

#[test]
fn a_helper_that_dies_or_does_not_follow_the_protocol_is_replaced() {
    for fault in [Fault::Die, Fault::Short, Fault::Garbage, Fault::Stranger, Fault::Endless] {
        let store = Store::default();
        let bench = bench(&store);
        bench.write_all(1);
        store.set(fault, Some(MooncakeOp::Get));
        let error = bench.read(0).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Protocol), "{fault:?}: {error}");
        store.free();
        until("another helper serves", || bench.read_is_right(0));
        assert!(store.starts() > 1, "{fault:?}");
    }
}

#[test]
fn a_tier_whose_helper_cannot_start_tries_again() {
    let store = Store::default();
    store.refuse_starts(2);
    let tier = Arc::new(MooncakeTier::open_with(Store::config(), store.starter()).unwrap());
    until("a failure is counted", || tier.servers()[0].failures > 0);
    until("the third start succeeds", || tier.servers()[0].up);
    assert_eq!(store.starts(), 3);
    let bench = Bench::new(tier);
    bench.write_all(1);
    assert!(bench.read_is_right(0));
    store.refuse_starts(1);
    store.set(Fault::Die, Some(MooncakeOp::Get));
    assert!(bench.read(0).is_err());
    let down = bench.tier.servers();
    assert!(down[0].failures > 0 && down[0].last_error.is_some(), "{down:?}");
    store.free();
    until("it is back", || bench.read_is_right(0));
}

#[derive(Debug)]
struct Unkillable {
    process: Box<dyn HelperProcess>,
    let_go: Receiver<()>,
}

impl HelperProcess for Unkillable {
    fn end(&mut self) {
        let _ = self.let_go.recv();
        self.process.end();
    }
}

/// The kernel may keep a killed process for any time. A depot must end nevertheless (P4).
#[test]
fn a_helper_that_cannot_be_killed_does_not_keep_the_tier_from_ending() {
    let (store, (let_go, ends)) = (Store::default(), channel());
    let (ends, starter) = (Mutex::new(Some(ends)), store.starter());
    let unkillable: HelperStarter = Arc::new(move |memory| {
        let MooncakeHelper { socket, process } = starter(memory)?;
        let process: Box<dyn HelperProcess> = match ends.lock().unwrap().take() {
            Some(let_go) => Box::new(Unkillable { process, let_go }),
            None => process,
        };
        Ok(MooncakeHelper { socket, process })
    });
    let tier = MooncakeTier::open_with(Store::config(), unkillable).unwrap();
    until("it is up", || tier.servers()[0].up);
    let (send, ended) = channel();
    std::thread::spawn(move || {
        drop(tier);
        let _ = send.send(());
    });
    ended.recv_timeout(Duration::from_secs(120)).unwrap();
    drop(let_go);
}

/// An engine's start must not wait for as long as Mooncake is away (P2, P6).
#[test]
fn a_namespace_is_not_waited_for_while_mooncake_is_away() {
    let store = Store::default();
    store.refuse_starts(usize::MAX);
    let tier = Arc::new(MooncakeTier::open_with(Store::config(), store.starter()).unwrap());
    let spec = spec("away", BlockLayout::new(vec![vec![5000]]).unwrap());
    // It waits for an hour if it waits.
    let (send, receive) = std::sync::mpsc::channel();
    let hour = Instant::now() + Duration::from_secs(3600);
    tier.open_namespace(&Arc::new(spec), 0, hour, Box::new(move |outcome| drop(send.send(outcome))));
    assert_eq!(Bench::answer(&receive).unwrap_err().kind(), ErrorKind::Unavailable);
}

/// Another depot's reset replaces the record in place. Whoever took it for lost would store an earlier epoch (P1).
#[test]
fn a_record_that_is_being_replaced_is_not_taken_for_lost() {
    let store = Store::default();
    bench(&store).write_all(1);
    let records = || {
        let is_write = |op| matches!(op, MooncakeOp::PutRecord | MooncakeOp::ReplaceRecord);
        store.requests().iter().filter(|(op, _)| is_write(*op)).count()
    };
    let before = records();
    store.set(Fault::Code(-703), Some(MooncakeOp::Get));
    let tier = Arc::new(MooncakeTier::open_with(Store::config(), store.starter()).unwrap());
    let spec = Arc::new(spec("another", BlockLayout::new(vec![vec![5000]]).unwrap()));
    let (send, receive) = std::sync::mpsc::channel();
    tier.open_namespace(&spec, 0, Bench::soon(), Box::new(move |outcome| drop(send.send(outcome))));
    assert_eq!(Bench::answer(&receive).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(records(), before);
}

#[test]
fn errors_of_mooncake_are_no_blocks() {
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(1);
    for (op, code, kind) in [
        (MooncakeOp::Get, -800, ErrorKind::Unavailable),
        (MooncakeOp::Get, -900, ErrorKind::Unavailable),
        (MooncakeOp::Get, -703, ErrorKind::NotFound),
        (MooncakeOp::Get, -707, ErrorKind::Busy),
        (MooncakeOp::Put, -200, ErrorKind::NoSpace),
        (MooncakeOp::Put, -800, ErrorKind::Unavailable),
    ] {
        store.set(Fault::Code(code), Some(op));
        let error = match op {
            MooncakeOp::Get => bench.read(0).unwrap_err(),
            _ => bench.write(1).unwrap_err(),
        };
        assert_eq!(error.kind(), kind, "{op:?} {code}: {error}");
    }
    store.free();
    assert!(bench.read_is_right(0));
    assert_eq!(bench.write(1).unwrap(), Written::New);
}

#[test]
fn wrong_bytes_are_an_error_once_and_then_absent_until_they_can_be_replaced() {
    for fault in [Fault::Flip, Fault::Other, Fault::Cut] {
        let store = Store::default();
        let bench = bench(&store);
        bench.write_all(2);
        // The read that finds it has a lease on it.
        store.lease(2);
        store.set(fault, Some(MooncakeOp::Get));
        assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt, "{fault:?}");
        store.free();
        let there = || store.names().len() == 3;
        if there() {
            assert_ne!(bench.peek(0), Presence::Present, "{fault:?}");
        }
        until("it is removed, against the leases", || !there());
        until("it may be written again", || bench.write(0).is_ok_and(|written| written == Written::New));
        assert!(bench.read_is_right(0) && bench.read_is_right(1), "{fault:?}");
    }
}

#[test]
fn a_removal_that_leases_refuse_is_tried_again_and_then_answered_busy() {
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(2);
    store.lease(2);
    bench.remove(0).unwrap();
    assert_eq!(bench.write(0).unwrap(), Written::New);
    store.lease(usize::MAX);
    assert_eq!(bench.remove(1).unwrap_err().kind(), ErrorKind::Busy);
    store.lease(0);
    bench.remove(1).unwrap();
    assert_eq!(bench.read(1).unwrap_err().kind(), ErrorKind::NotFound);
}

/// Mooncake loses values with a holder. If a namespace fell back to epoch 0 with its record, the blocks of epoch 0 would
/// be found again (P1).
#[test]
fn a_lost_or_damaged_record_of_an_epoch_hides_all_blocks() {
    for is_lost in [true, false] {
        let store = Store::default();
        let old = bench(&store);
        old.write_all(3);
        let epoch = old.tier.advance_and_wait(&old.spec, 0).unwrap();
        drop(old);
        let is_record = |name: &str| name.ends_with("/epoch");
        if is_lost {
            store.lose(is_record);
        } else {
            store.change(is_record, |text| text[20] ^= 1);
        }
        let new = bench(&store);
        assert!(new.epoch < epoch, "nothing tells of the epoch");
        assert!(store.names().len() == 4, "the blocks are in the store");
        assert_eq!(new.probe(new.keys(3)).unwrap(), 0);
        assert!((0..3).all(|n| !new.read_is_right(n)));
        new.write_all(1);
        assert!(new.read_is_right(0));
    }
}

#[test]
fn depots_agree_again_after_a_record_was_lost() {
    let store = Store::default();
    let (one, two) = (bench(&store), bench(&store));
    one.write_all(2);
    assert!(two.read_is_right(0));
    store.lose(|name| name.ends_with("/epoch"));
    let epoch = one.epoch;
    for bench in [&one, &two] {
        // The depot looks at its namespaces now and then.
        assert_eq!(bench.tier.open_and_wait(&bench.spec, epoch).unwrap(), epoch);
        assert_eq!(bench.probe(bench.keys(2)).unwrap(), 0, "its blocks have another name now");
    }
    two.write_all(1);
    assert_eq!(one.probe(one.keys(2)).unwrap(), 0, "asked before, remembered");
    assert!(one.read_is_right(0));
}

#[test]
fn a_reset_that_cannot_be_stored_hides_the_namespace_until_it_is() {
    let store = Store::default();
    let mut bench = bench(&store);
    bench.write_all(1);
    store.set(Fault::Code(-900), Some(MooncakeOp::ReplaceRecord));
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(!bench.read_is_right(0) && bench.write(1).is_err());
    store.free();
    let old = bench.epoch;
    until("it is stored by itself", || {
        store.requests().iter().rev().take(3).any(|(op, _)| *op == MooncakeOp::ReplaceRecord)
            && bench.tier.open_and_wait(&bench.spec, 0).is_ok()
    });
    bench.epoch = bench.tier.open_and_wait(&bench.spec, 0).unwrap();
    assert!(bench.epoch > old);
    bench.write_all(1);
    assert!(bench.read_is_right(0));
}

#[test]
fn depots_that_reset_at_once_each_get_an_epoch() {
    let store = Store::default();
    let benches: Vec<Bench> = (0..4).map(|_| bench(&store)).collect();
    let mut epochs: Vec<u32> = std::thread::scope(|scope| {
        let reset = |bench: &Bench| bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
        let threads: Vec<_> = benches.iter().map(|bench| scope.spawn(move || reset(bench))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    epochs.sort_unstable();
    assert!(epochs[0] > 0);
    // A slow one may have written over a later epoch: the depots raise it again at their next look.
    until("they agree on an epoch that is not before any of theirs", || {
        let look = |bench: &Bench| bench.tier.open_and_wait(&bench.spec, 0).unwrap();
        let seen: Vec<u32> = benches.iter().map(look).collect();
        seen.iter().all(|&epoch| epoch == seen[0] && epoch >= epochs[3])
    });
}

#[test]
fn a_block_that_staging_memory_cannot_hold_is_refused() {
    let store = Store::default();
    let config = MooncakeConfig { staging_bytes: 1 << 20, ..Store::config() };
    let tier = Arc::new(MooncakeTier::open_with(config, store.starter()).unwrap());
    let large = Bench::with(tier, spec("large", BlockLayout::new(vec![vec![1 << 20]]).unwrap()));
    let error = large.write(0).unwrap_err();
    assert!(error.to_string().contains("mooncake_staging_mb"), "{error}");
}

#[test]
fn a_batch_is_one_call() {
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(40);
    assert_eq!(bench.probe(bench.keys(40)).unwrap(), 40);
    drop(bench);
    let bench = self::bench(&store);
    let before = store.requests().len();
    assert_eq!(bench.probe(bench.keys(40)).unwrap(), 40);
    let asked = store.requests().split_off(before);
    assert_eq!(asked, [(MooncakeOp::Exists, 1), (MooncakeOp::Exists, 39)]);
}

/// A prompt's blocks come one at a time: those that come while all calls are under way share the next one.
#[test]
fn blocks_that_wait_for_a_call_share_it() {
    const BLOCKS: u64 = 40;
    let store = Store::default();
    let bench = bench(&store);
    bench.write_all(BLOCKS);
    store.set(Fault::Hang, Some(MooncakeOp::Get));
    let (calls, before, soon) = (Store::config().calls, store.requests().len(), Bench::soon());
    let begin = |n: u64| {
        let slot = bench.slot();
        (n, slot.clone(), bench.begin_read(n, slot, soon))
    };
    let mut reads = Vec::new();
    for n in 0..calls {
        reads.push(begin(n as u64));
        until("a call of one block is under way", || store.requests().len() == before + n + 1);
    }
    reads.extend((calls as u64..BLOCKS).map(begin));
    store.free();
    for (n, slot, read) in reads {
        Bench::answer(&read).unwrap();
        assert_eq!(bench.block_of(&slot), bench.bytes(n), "block {n}");
    }
    let asked = store.requests().split_off(before);
    assert_eq!(asked.iter().map(|(_, keys)| *keys as u64).sum::<u64>(), BLOCKS, "each once: {asked:?}");
    assert!(asked.len() <= 2 * calls, "{asked:?}");
}
