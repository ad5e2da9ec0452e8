//! Blocks that are leased ahead of a load.

use super::*;

fn prefetch(lab: &mut Lab, blocks: &[(u8, TierIndex)]) {
    let blocks = blocks.iter().map(|&(hash, tier)| (BlockHash([hash; 16]), tier)).collect();
    lab.ask(Request::Prefetch { namespace: 0, blocks, deadline: 1 << 40 });
}

/// Loads blocks and releases them, so that they are leased and used.
fn use_once(lab: &mut Lab, hashes: &[u8]) {
    let used = lease(lab, hashes);
    release(lab, &used);
}

#[test]
fn no_more_blocks_are_leased_ahead_than_stay_leased() {
    let mut lab = lab(4, 2);
    use_once(&mut lab, &[9]);
    lab.take();
    prefetch(&mut lab, &[(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)]);
    let (leases, reads) = commanded(&mut lab);
    assert_eq!((leases.len(), reads.len()), (2, 1), "an eighth is two blocks");
    assert_eq!(reads[0].2, 5, "other tiers' blocks come through the pool");
    grant(&mut lab, leases);
    assert_eq!(ended(&mut lab), [place(9)]);
    prefetch(&mut lab, &[(3, 0)]);
    assert_eq!(commanded(&mut lab), (vec![], vec![]), "nobody has used those");
    // They are leased when they are loaded.
    lease(&mut lab, &[3, 4]);
}

#[test]
fn blocks_that_were_used_make_way_for_those_that_are_leased_ahead() {
    let mut lab = lab(4, 1);
    use_once(&mut lab, &[8, 9]);
    lab.take();
    prefetch(&mut lab, &[(1, 0), (2, 0)]);
    let (leases, _) = commanded(&mut lab);
    assert_eq!(leases.len(), 2, "an eighth of the memory is leased, and was used");
    grant(&mut lab, leases);
    assert_eq!(ended(&mut lab), [place(8), place(9)]);
    // Others come and go before they are used.
    use_once(&mut lab, &[5, 6, 7]);
    assert_eq!(ended(&mut lab), [place(5), place(6), place(7)]);
    let first = leased(lab.ask(load(&[1], true)));
    assert!(lab.take().iter().all(|command| matches!(command, Command::Touch { .. })), "no second lease");
    release(&mut lab, &first);
    prefetch(&mut lab, &[(3, 0)]);
    let (leases, _) = commanded(&mut lab);
    assert_eq!(leases.len(), 1, "it is used now, and goes before the other");
    grant(&mut lab, leases);
    assert_eq!(ended(&mut lab), [place(1)]);
}

#[test]
fn what_was_leased_ahead_and_is_not_used_makes_way_in_the_end() {
    let mut lab = lab(4, 1);
    use_once(&mut lab, &[9]);
    lab.take();
    prefetch(&mut lab, &[(1, 0), (2, 0)]);
    let (leases, _) = commanded(&mut lab);
    grant(&mut lab, leases);
    assert_eq!(ended(&mut lab), [place(9)]);
    lab.now += 29_000_000_000;
    prefetch(&mut lab, &[(3, 0)]);
    assert_eq!(commanded(&mut lab).0, []);
    lab.now += 1_000_000_000;
    prefetch(&mut lab, &[(3, 0)]);
    let (leases, _) = commanded(&mut lab);
    grant(&mut lab, leases);
    assert_eq!(ended(&mut lab), [place(1)]);
    use_once(&mut lab, &[4]);
    assert_eq!(ended(&mut lab), [place(2)], "it was leased long before");
}
