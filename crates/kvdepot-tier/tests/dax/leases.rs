//! P1, P4: leases on blocks of media that are damaged, lost, or change hands. What every tier with leases promises is
//! in the conformance suite.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kvdepot_core::{BlockKey, ErrorKind};
use kvdepot_io::mapped::{Access, HookMedium, Medium, MediumCall, MemoryMedium};
use kvdepot_tier::conformance::{Bench, listen, until};
use kvdepot_tier::{DaxConfig, DaxTier, Presence, Tier, TierEvents};

use crate::dax_media::{MIB, Media, open, raw};

/// What a tier tells its depot: blocks that were lost, and how often its memory was.
#[derive(Default)]
struct Lost(Mutex<Vec<BlockKey>>, AtomicUsize);

impl Lost {
    /// What the tier of a bench tells from now on.
    fn listening(bench: &Bench) -> Arc<Self> {
        let lost: Arc<Self> = Arc::default();
        listen(&*bench.tier, &lost);
        lost
    }
}

/// A tier over a medium in memory, and that medium.
fn over_memory() -> (Bench, Arc<dyn Medium>) {
    let media = Media::new();
    let medium: Arc<dyn Medium> = Arc::new(MemoryMedium::new(vec![0; 4 * MIB as usize]));
    let tier = DaxTier::open_on(leasing(&media, Access::Auto), Arc::clone(&medium)).unwrap();
    (Bench::new(Arc::new(tier)), medium)
}

/// Another depot opens the medium.
fn take(medium: &dyn Medium) {
    medium.write(128, &[7; 16]).unwrap();
}

impl TierEvents for Lost {
    fn evicted(&self, _: &[BlockKey]) {}

    fn lost(&self, keys: &[BlockKey]) {
        self.0.lock().unwrap().extend(keys);
    }

    fn went_down(&self) {}

    fn came_back(&self) {}

    fn lost_memory(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

fn leasing(media: &Media, access: Access) -> DaxConfig {
    DaxConfig { access, lease_in_place: Some(true), ..media.next(4 * MIB) }
}

#[test]
fn a_damaged_block_is_not_leased_and_not_found_again() {
    for access in [Access::Auto, Access::Mapped, Access::AsDevice] {
        let media = Media::new();
        let config = leasing(&media, access);
        let bench = Bench::new(open(config.clone()));
        let place = {
            bench.write_all(2);
            let place = bench.lease(0).unwrap().unwrap();
            bench.tier.end_leases(&[place]);
            place
        };
        let Bench { tier, spec, .. } = bench;
        drop(tier);
        let medium = raw(&config);
        medium.write(place + 7, b"x").unwrap();
        medium.persist().unwrap();
        drop(medium);
        let bench = Bench::with(open(config), spec);
        let lost = Lost::listening(&bench);
        assert_eq!(bench.lease(0).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!((bench.lease(0).unwrap(), bench.peek(0)), (None, Presence::Absent));
        bench.drain();
        assert_eq!(*lost.0.lock().unwrap(), [bench.key(0)]);
        assert!(bench.lease(1).unwrap().is_some(), "the others are");
    }
}

/// A client may still copy when its depot has died and the next one writes to the medium.
#[test]
fn what_is_read_after_another_depot_has_the_medium_does_not_count() {
    let media = Media::new();
    let config = leasing(&media, Access::Auto);
    let bench = Bench::new(open(config.clone()));
    bench.write_all(1);
    let (lent, place) = (bench.lent(), bench.lease(0).unwrap().unwrap());
    bench.check_place(&lent, 0, place);
    let Bench { tier, spec, .. } = bench;
    drop(tier);
    lent.check().unwrap();
    let _next = Bench::with(open(config), spec);
    assert_eq!(lent.check().unwrap_err().kind(), ErrorKind::Io);
}

/// Blocks that are leased are read without the tier, so it has to tell.
#[test]
fn a_tier_tells_once_that_another_depot_has_its_medium() {
    type Find = fn(&Bench);
    let found: [Find; 4] = [
        |bench| assert!(!matches!(bench.lease(0), Ok(Some(_)))),
        |bench| assert!(bench.read(0).is_err()),
        |bench| assert!(bench.write(7).is_err()),
        |bench| assert!(bench.remove(0).is_err()),
    ];
    for find in found {
        let (bench, medium) = over_memory();
        let lost = Lost::listening(&bench);
        bench.write_all(2);
        take(&*medium);
        for _ in 0..2 {
            find(&bench);
        }
        bench.drain();
        assert_eq!(lost.1.load(Ordering::SeqCst), 1);
        let again = Lost::listening(&bench);
        assert_eq!(again.1.load(Ordering::SeqCst), 0, "told already");
        assert_eq!(lost.1.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn a_medium_that_was_lost_before_anybody_listened_is_told_of() {
    let (bench, medium) = over_memory();
    bench.write_all(1);
    take(&*medium);
    assert!(bench.lease(0).is_err());
    bench.drain();
    let lost = Lost::listening(&bench);
    assert_eq!(lost.1.load(Ordering::SeqCst), 1);
}

/// A reset has been stored, and nothing else is done with the medium then.
#[test]
fn a_medium_that_is_lost_while_a_past_epoch_is_cleared_is_told_of() {
    let memory = MemoryMedium::new(vec![0; 4 * MIB as usize]);
    // The heads of the slots that are written now are what is cleared later.
    let (heads, is_dumped) = (Arc::new(Mutex::new(HashSet::new())), Arc::new(AtomicBool::new(false)));
    let hook = {
        let (memory, heads, is_dumped) = (memory.clone(), Arc::clone(&heads), Arc::clone(&is_dumped));
        move |call| {
            let MediumCall::Write { at, bytes: ..4096 } = call else { return Ok(()) };
            if !is_dumped.load(Ordering::SeqCst) {
                heads.lock().unwrap().insert(at);
            } else if heads.lock().unwrap().contains(&at) {
                memory.damage(128, |bytes| bytes[..16].fill(7));
            }
            Ok(())
        }
    };
    let medium: Arc<dyn Medium> = Arc::new(HookMedium::new(Arc::new(memory), Box::new(hook)));
    let bench = Bench::new(Arc::new(DaxTier::open_on(leasing(&Media::new(), Access::Auto), medium).unwrap()));
    let lost = Lost::listening(&bench);
    heads.lock().unwrap().clear();
    bench.write_all(2);
    bench.drain();
    is_dumped.store(true, Ordering::SeqCst);
    let stored = |outcome: kvdepot_core::Result<u32>| assert_eq!(outcome.unwrap(), 1);
    bench.tier.advance_epoch(&Arc::new(bench.spec.clone()), 0, Bench::soon(), Box::new(stored));
    until("the loss is told", || lost.1.load(Ordering::SeqCst) > 0);
    assert_eq!(lost.1.load(Ordering::SeqCst), 1);
}

#[test]
fn a_medium_lends_no_more_than_holds_blocks() {
    let media = Media::new();
    let path = media.file(64 * MIB);
    let config =
        |max_bytes| DaxConfig { lease_in_place: Some(true), ..crate::dax_media::config(&path, max_bytes) };
    drop(open(config(4 * MIB)));
    let tier = open(config(0));
    let (memory, usage) = (tier.memory().unwrap().unwrap(), tier.usage());
    assert_eq!((memory.blocks_bytes, memory.unit_bytes), (usage.bytes_max, 4096));
    assert!(memory.blocks_bytes < 4 * MIB && memory.bytes >= 4 * MIB, "{memory:?}");
}

#[test]
fn a_truncated_file_is_an_error_for_whoever_reads_it_in_place() {
    let media = Media::new();
    for access in [Access::Auto, Access::Mapped, Access::AsDevice] {
        let path = media.file(4 * MIB);
        let config =
            DaxConfig { access, lease_in_place: Some(true), ..crate::dax_media::config(&path, 4 * MIB) };
        let bench = Bench::new(open(config));
        let lost = Lost::listening(&bench);
        bench.write_all(1);
        let (lent, place) = (bench.lent(), bench.lease(0).unwrap().unwrap());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        let mut bytes = [0; 100];
        assert_eq!(lent.read(place, &mut bytes).unwrap_err().kind(), ErrorKind::Io);
        for _ in 0..2 {
            assert!(bench.lease(0).is_err());
        }
        bench.drain();
        assert_eq!(lost.1.load(Ordering::SeqCst), 1, "the depot is told, once");
    }
}

#[test]
fn a_file_is_leased_only_if_the_configuration_says_so() {
    let media = Media::new();
    for (lease_in_place, access, is_leased) in [
        (None, Access::Auto, false),
        (None, Access::Mapped, false),
        (None, Access::AsDevice, true),
        (Some(false), Access::AsDevice, false),
        (Some(true), Access::Auto, true),
    ] {
        let config =
            DaxConfig { access, lease_in_place, ..crate::dax_media::config(&media.file(4 * MIB), 0) };
        assert_eq!(open(config).memory().unwrap().is_some(), is_leased);
    }
}

/// The medium hangs while a checksum is computed; the tier is closed meanwhile.
#[test]
fn leases_end_when_the_tier_closes() {
    let media = Media::new();
    let config = leasing(&media, Access::Auto);
    let (begun, begins) = std::sync::mpsc::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
    let (begun, goes_on) = (Mutex::new(begun), Mutex::new(goes_on));
    let held = Arc::new(Mutex::new(Vec::<u64>::new()));
    let hook = {
        let held = Arc::clone(&held);
        move |call| {
            let MediumCall::Read { at, .. } = call else { return Ok(()) };
            let is_held = held.lock().unwrap().contains(&at);
            if is_held {
                begun.lock().unwrap().send(()).unwrap();
                let _ = goes_on.lock().unwrap().recv();
            }
            Ok(())
        }
    };
    let medium: Arc<dyn Medium> = Arc::new(HookMedium::new(raw(&config), Box::new(hook)));
    // Two threads, both of which read.
    let two = DaxConfig { restore_workers: 1, put_workers: 1, ..config };
    let bench = Bench::new(Arc::new(DaxTier::open_on(two, medium).unwrap()));
    bench.write_all(3);
    let places: Vec<u64> = (0..3).map(|n| bench.lease(n).unwrap().unwrap()).collect();
    held.lock().unwrap().clone_from(&places);
    let (send, receive) = std::sync::mpsc::channel();
    let lease = |n: usize| {
        let send = send.clone();
        let done = Box::new(move |outcome: kvdepot_core::Result<Option<u64>>| drop(send.send((n, outcome))));
        bench.tier.lease(vec![kvdepot_tier::LeaseItem { key: bench.key(n as u64), done }], Bench::soon());
    };
    (0..2).for_each(lease);
    (0..2).for_each(|_| begins.recv().unwrap());
    // Both threads hang, so this one waits in the queue.
    lease(2);
    // Closing waits for the threads, which go on now.
    let Bench { tier, .. } = bench;
    let closing = std::thread::spawn(move || drop(tier));
    let (n, outcome) = Bench::answer(&receive);
    assert_eq!((n, outcome.unwrap_err().kind()), (2, ErrorKind::Closed), "what no thread had begun");
    (0..2).for_each(|_| go_on.send(()).unwrap());
    for _ in 0..2 {
        let (n, outcome) = Bench::answer(&receive);
        assert!(n < 2 && outcome.is_ok_and(|place| place == Some(places[n])));
    }
    closing.join().unwrap();
}

/// That is load, and no failure of the tier: its breaker must not count it.
#[test]
fn a_medium_whose_blocks_are_all_in_use_is_busy() {
    let media = Media::new();
    let bench = Bench::new(open(leasing(&media, Access::Auto)));
    let refused = (0..1000).find_map(|n| match bench.write(n) {
        Ok(_) => {
            bench.lease(n).unwrap().unwrap();
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(refused.unwrap().kind(), ErrorKind::Busy);
}
