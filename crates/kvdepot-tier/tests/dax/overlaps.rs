//! P1, P6: calls that open, reset or close a namespace while another one has not ended. Only one epoch is written at a time,
//! so calls that begin while the medium hangs end in any order.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::mapped::MediumCall;
use kvdepot_tier::conformance::{Bench, Waiting, spec, until};
use kvdepot_tier::dax::layout::EPOCH_BYTES;
use kvdepot_tier::{DaxTier, Tier, Written};

use crate::hangs::Scripted;

type End = Receiver<Result<u32>>;

fn namespace(name: &str) -> Arc<NamespaceSpec> {
    Arc::new(spec(name, BlockLayout::new(vec![vec![4096]]).unwrap()))
}

fn namespaces() -> Vec<Arc<NamespaceSpec>> {
    (0..20).map(|n| namespace(&format!("model {n}"))).collect()
}

fn begin_open(tier: &DaxTier, spec: &Arc<NamespaceSpec>) -> End {
    let (send, receive) = channel();
    tier.open_namespace(spec, 0, Bench::soon(), Box::new(move |end| drop(send.send(end))));
    receive
}

fn begin_advance(tier: &DaxTier, spec: &Arc<NamespaceSpec>) -> End {
    let (send, receive) = channel();
    tier.advance_epoch(spec, 0, Bench::soon(), Box::new(move |end| drop(send.send(end))));
    receive
}

/// Begins to open a namespace and returns when the write of its epoch hangs. It ends when the sender is dropped.
fn hang(script: &Scripted, tier: &DaxTier, spec: &Arc<NamespaceSpec>) -> (End, Sender<()>) {
    let (begins, let_go) = script.hold(|call| matches!(call, MediumCall::Write { .. }));
    let end = begin_open(tier, spec);
    begins.recv_timeout(crate::dax_media::HANG).unwrap();
    (end, let_go)
}

fn at(tier: &Arc<DaxTier>, spec: &NamespaceSpec, epoch: u32) -> Bench {
    Bench { tier: Arc::clone(tier) as _, spec: spec.clone(), epoch }
}

#[test]
fn a_namespace_is_open_after_calls_that_overlapped() {
    let script = Scripted::new(4 << 20);
    let tier = script.open();
    let (first, let_go) = hang(&script, &tier, &namespace("hangs"));
    let begun: Vec<(Arc<NamespaceSpec>, Vec<End>)> = namespaces()
        .into_iter()
        .map(|spec| {
            let opening = begin_open(&tier, &spec);
            let resets = [begin_advance(&tier, &spec), begin_advance(&tier, &spec)];
            (spec, [opening].into_iter().chain(resets).collect())
        })
        .collect();
    drop(let_go);
    Bench::answer(&first).unwrap();
    for (spec, ends) in begun {
        let epochs: Vec<u32> = ends.iter().map(|end| Bench::answer(end).unwrap()).collect();
        assert_ne!(epochs[1], epochs[2], "each reset has an epoch of its own");
        let bench = at(&tier, &spec, *epochs.iter().max().unwrap());
        assert_eq!(bench.write(0).unwrap(), Written::New, "in the last epoch of {epochs:?}");
        assert!(bench.read_is_right(0));
    }
}

/// Another call may have stored an epoch for a reset and opened the namespace before the reset's own one fails.
#[test]
fn a_reset_that_fails_after_an_opening_is_tried_again() {
    let script = Scripted::new(4 << 20);
    let tier = script.open();
    let specs = namespaces();
    specs.iter().for_each(|spec| assert_eq!(tier.open_and_wait(spec, 0).unwrap(), 0));
    let (first, let_go) = hang(&script, &tier, &namespace("hangs"));
    let begun: Vec<(End, End)> =
        specs.iter().map(|spec| (begin_open(&tier, spec), begin_advance(&tier, spec))).collect();
    // Each namespace gets one new epoch, in two copies.
    let (written, epochs) =
        (Mutex::new(HashMap::new()), tier.geometry().epochs_at()..tier.geometry().headers_at());
    script.set(move |call| {
        let MediumCall::Write { at, .. } = call else { return Ok(()) };
        if !epochs.contains(&at) {
            return Ok(());
        }
        let mut written = written.lock().unwrap();
        let count = written.entry((at - epochs.start) / (2 * EPOCH_BYTES as u64)).or_insert(0);
        *count += 1;
        if *count > 2 { Err(Error::new(ErrorKind::Io, "a fault for a test")) } else { Ok(()) }
    });
    drop(let_go);
    Bench::answer(&first).unwrap();
    let mut failed = Vec::new();
    for (spec, (opening, reset)) in specs.iter().zip(begun) {
        let opened = Bench::answer(&opening);
        match Bench::answer(&reset) {
            Ok(epoch) => assert_eq!(at(&tier, spec, epoch).write(0).unwrap(), Written::New),
            Err(_) => {
                let error = at(&tier, spec, opened.unwrap()).write(0).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NotFound, "closed until the reset is stored");
                failed.push(spec);
            }
        }
    }
    script.clear();
    for spec in failed {
        until("a reset is tried again", || (2..6).any(|epoch| at(&tier, spec, epoch).write(0).is_ok()));
    }
}

#[test]
fn a_namespace_that_is_closed_before_it_is_open_stays_closed() {
    let script = Scripted::new(4 << 20);
    let tier = script.open();
    let hung = namespace("hangs");
    let (first, let_go) = hang(&script, &tier, &hung);
    let [waits, reset, opened_again] = ["waits", "is reset", "is opened again"].map(namespace);
    let ends = [begin_open(&tier, &waits), begin_advance(&tier, &reset), begin_open(&tier, &opened_again)];
    for spec in [&hung, &waits, &reset, &opened_again] {
        tier.close_namespace(spec.root());
    }
    let last = begin_open(&tier, &opened_again);
    drop(let_go);
    Bench::answer(&first).unwrap();
    let epochs = ends.map(|end| Bench::answer(&end).unwrap());
    Bench::answer(&last).unwrap();
    for (spec, epoch) in [(&hung, 0), (&waits, epochs[0]), (&reset, epochs[1])] {
        let error = at(&tier, spec, epoch).write(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert_eq!(tier.open_and_wait(spec, 0).unwrap(), epoch);
        assert_eq!(at(&tier, spec, epoch).write(0).unwrap(), Written::New);
    }
    assert_eq!(at(&tier, &opened_again, epochs[2]).write(0).unwrap(), Written::New);
}

#[test]
fn a_reset_of_what_was_closed_meanwhile_is_stored_and_opens_nothing() {
    let script = Scripted::new(4 << 20);
    let tier = script.open();
    let spec = namespace("one");
    assert_eq!(tier.open_and_wait(&spec, 0).unwrap(), 0);
    script.set(|call| match call {
        MediumCall::Write { .. } => Err(Error::new(ErrorKind::Io, "a fault for a test")),
        _ => Ok(()),
    });
    assert!(tier.advance_and_wait(&spec, 0).is_err());
    tier.close_namespace(spec.root());
    let (count, counted) = channel();
    let count = Mutex::new(count);
    script.set(move |call| {
        if call == MediumCall::Persist {
            count.lock().unwrap().send(()).unwrap();
        }
        Ok(())
    });
    // Both copies of the epoch.
    (0..2).for_each(|_| counted.recv_timeout(crate::dax_media::HANG).unwrap());
    script.clear();
    // The end of this opening is behind that of the reset.
    tier.open_and_wait(&namespace("other"), 0).unwrap();
    assert_eq!(at(&tier, &spec, 1).write(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(tier.open_and_wait(&spec, 0).unwrap(), 1, "the reset is stored");
}
