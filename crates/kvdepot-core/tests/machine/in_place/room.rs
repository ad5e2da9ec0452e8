//! Room in a tier's memory: whom it was promised to, and who goes on when it comes back.

use super::*;

pub(super) const fn wide(n: u16) -> BlockHash {
    let [low, high] = n.to_le_bytes();
    BlockHash([low, high, low, high, low, high, low, high, low, high, low, high, low, high, low, high])
}

fn place_of(hash: &BlockHash) -> u64 {
    BLOCK * (1 + u64::from(u16::from_le_bytes([hash.0[0], hash.0[1]])))
}

/// Grants all leases that are asked for, and those that follow. Returns how many, and the number of reads.
pub(super) fn grant_all(lab: &mut Lab) -> (usize, usize) {
    let (mut leases, mut reads) = (0, 0);
    while let commands @ [_, ..] = &lab.take()[..] {
        for command in commands {
            match command {
                Command::Lease { tier, slot, key, .. } => {
                    leases += 1;
                    let outcome = Ok(Some(place_of(&key.hash)));
                    lab.feed(Event::LeaseEnded { tier: *tier, slot: *slot, outcome });
                }
                Command::Read { tier, slot, .. } => {
                    reads += 1;
                    lab.feed(Event::ReadEnded { tier: *tier, slot: *slot, outcome: Ok(Fetched::Whole) });
                }
                _ => {}
            }
        }
    }
    (leases, reads)
}

fn settled_units(lab: &mut Lab, owner: u64, token: u64) -> usize {
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    settle(lab, owner, progress.claim)
}

/// Opens a claim and feeds what follows until it has taken a part of what was promised to it. Returns the rest.
fn admit(lab: &mut Lab, token: u64, owner: u64, request: Request) -> Vec<Event> {
    let before = lab.commands.len();
    let mut later = lab.step(Event::Request { token, owner, request });
    while lab.commands.len() == before {
        let event = later.pop().unwrap();
        later.extend(lab.step(event));
    }
    later
}

/// A lab whose tier can lease 400 blocks at a time, and whose namespace has readers that can read there.
pub(super) fn wide_lab(pool_blocks: u64) -> Lab {
    let mut lab = Lab::new(pool_blocks, 1);
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: 800 * BLOCK, unit_bytes: BLOCK });
    let first = lease(&mut lab, &[0]);
    release(&mut lab, &first);
    lab.take();
    lab
}

/// Two claims that are admitted one after the other do not count the same room.
#[test]
fn room_in_a_tiers_memory_is_promised_to_one_claim() {
    let mut lab = wide_lab(1);
    let later = admit(&mut lab, 998, 1, claim(&[0], (1..=300).map(wide).collect()));
    let other = claim(&[0], (1001..=1300).map(wide).collect());
    lab.feed(Event::Request { token: 999, owner: 2, request: other });
    later.into_iter().for_each(|event| lab.feed(event));
    grant_all(&mut lab);
    assert_eq!(settled_units(&mut lab, 1, 998), 300);
    assert_eq!(settled_units(&mut lab, 2, 999), 100, "what half of the memory has left");
}

/// A tier that goes down between two steps of a claim would fail each of its reads.
#[test]
fn nothing_is_read_for_a_claim_from_a_tier_that_is_down() {
    for event in [Event::WentDown { tier: 0 }, Event::LostMemory { tier: 0 }] {
        let mut lab = wide_lab(300);
        let later = admit(&mut lab, 998, 1, claim(&[0], (1..=300).map(wide).collect()));
        lab.feed(event);
        later.into_iter().for_each(|event| lab.feed(event));
        assert_eq!(grant_all(&mut lab).1, 0);
        assert!(settled_units(&mut lab, 1, 998) < 300);
    }
}

/// Loads do not ask what was promised: a claim that finds no room in the tier's memory then takes none of the pool that
/// another claim was promised.
#[test]
fn a_claim_whose_room_was_taken_takes_none_that_others_were_promised() {
    // Nine tenths are what the first claim needs, and it takes 256 blocks in a step.
    let mut lab = wide_lab(334);
    lab.open_another();
    // The readers of the second namespace read the pool only.
    let of_pool = claim(&[1], (1..=300).map(wide).collect());
    let first = admit(&mut lab, 997, 3, of_pool);
    let second = admit(&mut lab, 998, 1, claim(&[0], (1001..=1300).map(wide).collect()));
    // The second claim has 256 of the 400 blocks that may be leased; these are the others.
    for piece in 0..3 {
        lab.send_as(2, load_of((0..48).map(|n| wide(3001 + 48 * piece + n)).collect(), true));
    }
    second.into_iter().chain(first).for_each(|event| lab.feed(event));
    grant_all(&mut lab);
    assert_eq!(settled_units(&mut lab, 3, 997), 300);
}

/// Such a claim has not taken all that it was promised of the pool. It takes that for those of its blocks that it was
/// promised for.
#[test]
fn a_claim_whose_room_was_taken_keeps_what_it_was_promised_of_the_pool_for_other_blocks() {
    let mut lab = wide_lab(601);
    lab.open_another();
    let first = admit(&mut lab, 997, 3, claim(&[1], (1..=300).map(wide).collect()));
    // 300 blocks in place, and as many in the pool. One block of the pool is left.
    let second = admit(&mut lab, 998, 1, claim(&[0, 1], (1001..=1300).map(wide).collect()));
    // Loads take the rest of the 400 blocks that may be leased.
    let taken = lab.machine.gauges().in_place.blocks as u16;
    let others: Vec<_> = (taken..400).map(|n| wide(3001 + n)).collect();
    for piece in others.chunks(48) {
        lab.send_as(2, load_of(piece.to_vec(), true));
    }
    second.into_iter().chain(first).for_each(|event| lab.feed(event));
    grant_all(&mut lab);
    assert_eq!(settled_units(&mut lab, 3, 997), 300);
}

/// Fills the pool, and half of the tier's memory. Returns what holds the memory.
fn filled(lab: &mut Lab) -> Vec<Leased> {
    let here = lease(lab, &[11, 12, 13, 14, 15, 16, 17, 18]);
    let token = lab.send_as(2, load(&[21, 22], false));
    let (_, reads) = commanded(lab);
    for (tier, slot, _) in reads {
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    let reply = lab.reply(token).unwrap();
    assert_eq!(leased(reply).len(), 2);
    here
}

#[test]
fn room_in_a_tiers_memory_wakes_a_load_that_waits() {
    let mut lab = lab(2, 1);
    let here = filled(&mut lab);
    let token = lab.send(load(&[1], true));
    assert_eq!(commanded(&mut lab), (vec![], vec![]), "no room anywhere");
    release(&mut lab, &here[..1]);
    let leases: Vec<_> = lab.take();
    let [Command::Lease { slot, .. }, ..] = leases[..] else { panic!("{leases:?}") };
    lab.feed(Event::LeaseEnded { tier: 0, slot, outcome: Ok(Some(place(1))) });
    let reply = lab.reply(token).unwrap();
    assert_eq!(leased(reply)[0].runs.to_vec(), runs(1));
}

#[test]
fn a_tier_that_comes_back_wakes_a_load_that_waits() {
    let mut lab = lab(2, 1);
    let here = filled(&mut lab);
    lab.feed(Event::WentDown { tier: 0 });
    let token = lab.send(load(&[1], true));
    release(&mut lab, &here);
    assert!(lab.reply(token).is_none());
    assert!(!lab.take().iter().any(|command| matches!(command, Command::Lease { .. })));
    lab.feed(Event::Tick);
    lab.feed(Event::CameBack { tier: 0 });
    let (leases, _) = commanded(&mut lab);
    assert_eq!(leases.len(), 1);
    grant(&mut lab, leases);
    let reply = lab.reply(token).unwrap();
    assert_eq!(leased(reply)[0].runs.to_vec(), runs(1));
}

#[test]
fn room_in_a_tiers_memory_wakes_a_claim_that_waits() {
    let mut lab = lab(2, 1);
    let here = filled(&mut lab);
    let token = lab.send(claim(&[0], vec![BlockHash([1; 16])]));
    assert_eq!((commanded(&mut lab), lab.machine.gauges().claims_queued), ((vec![], vec![]), 1));
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    release(&mut lab, &here[..1]);
    let leases: Vec<_> = lab.take();
    let [Command::Lease { slot, .. }, ..] = leases[..] else { panic!("{leases:?}") };
    lab.feed(Event::LeaseEnded { tier: 0, slot, outcome: Ok(Some(place(1))) });
    assert_eq!(settle(&mut lab, 1, progress.claim), 1);
}

/// While it is down, a claim needs room in the pool.
#[test]
fn a_tier_that_comes_back_wakes_a_claim_that_waits() {
    let mut lab = lab(2, 1);
    let here = filled(&mut lab);
    let token = lab.send(claim(&[0], vec![BlockHash([1; 16])]));
    assert_eq!(lab.machine.gauges().claims_queued, 1);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    lab.feed(Event::WentDown { tier: 0 });
    // The tier's memory has room for it now.
    release(&mut lab, &here[..1]);
    assert_eq!(grant_all(&mut lab), (0, 0));
    lab.feed(Event::CameBack { tier: 0 });
    assert_eq!(grant_all(&mut lab), (1, 0));
    assert_eq!(settle(&mut lab, 1, progress.claim), 1);
}

/// A claim of a block of the first tier that waits for room in the tier's memory, and what holds that.
fn waiting() -> (Lab, Vec<Leased>, u64) {
    let mut lab = lab(2, 2);
    let here = filled(&mut lab);
    let token = lab.send(claim(&[0], vec![BlockHash([1; 16])]));
    assert_eq!(lab.machine.gauges().claims_queued, 1);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    (lab, here, progress.claim)
}

/// Answers the probes of tiers, of which only `holder` has the block. Returns who was asked.
fn answer_probes(lab: &mut Lab, holder: TierIndex) -> Vec<TierIndex> {
    let mut asked = Vec::new();
    while let Some(at) = lab.commands.iter().position(|command| matches!(command, Command::Probe { .. })) {
        let Command::Probe { tier, ask, .. } = lab.commands.remove(at) else { continue };
        asked.push(tier);
        lab.feed(Event::Probed { ask, outcome: Ok(usize::from(tier == holder)) });
    }
    asked
}

/// Ends the reads that are under way. Returns the tier and the block of each.
fn end_reads(lab: &mut Lab) -> Vec<(TierIndex, u8)> {
    let (_, reads) = commanded(lab);
    let ended = reads.into_iter().map(|(tier, slot, block)| {
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        (tier, block)
    });
    ended.collect()
}

/// The tiers say something else than when the claim began to wait.
#[test]
fn a_claim_that_waits_asks_again_when_a_tier_goes_down() {
    for elsewhere in [Location::Absent, Location::Unknown, Location::Tier(1)] {
        let (mut lab, _here, claim) = waiting();
        lab.located = elsewhere;
        lab.feed(Event::WentDown { tier: 0 });
        if elsewhere == Location::Absent {
            assert_eq!(lab.machine.gauges().claims_queued, 0);
            continue;
        }
        if elsewhere == Location::Unknown {
            assert_eq!(answer_probes(&mut lab, 1), [0, 1]);
        }
        assert_eq!((commanded(&mut lab), lab.machine.gauges().claims_queued), ((vec![], vec![]), 1));
        // Their owner has the pool's blocks.
        lab.feed(Event::OwnerEnded { owner: 2 });
        assert_eq!(end_reads(&mut lab), [(1, 1)]);
        assert_eq!(settle(&mut lab, 1, claim), 1);
    }
}

/// The tier that came back needs no room in the pool.
#[test]
fn a_claim_that_waits_asks_again_when_a_tier_comes_back() {
    for elsewhere in [Location::Unknown, Location::Tier(1)] {
        let (mut lab, here, claim) = waiting();
        lab.located = elsewhere;
        lab.feed(Event::WentDown { tier: 0 });
        answer_probes(&mut lab, 1);
        release(&mut lab, &here[..1]);
        assert_eq!((grant_all(&mut lab), lab.machine.gauges().claims_queued), ((0, 0), 1));
        lab.located = if elsewhere == Location::Unknown { elsewhere } else { Location::Tier(0) };
        lab.feed(Event::CameBack { tier: 0 });
        assert_eq!(answer_probes(&mut lab, 0).is_empty(), elsewhere != Location::Unknown);
        assert_eq!(grant_all(&mut lab), (1, 0));
        assert_eq!(settle(&mut lab, 1, claim), 1);
    }
}

/// Room comes while a tier is asked for the claim at the head of the queue.
#[test]
fn a_claim_that_waits_keeps_its_turn_while_tiers_are_asked() {
    let (mut lab, _here, first) = waiting();
    let token = lab.send(claim(&[0], vec![BlockHash([2; 16])]));
    let Some(Reply::Claim(second)) = lab.reply(token) else { panic!("no claim") };
    lab.located = Location::Unknown;
    lab.feed(Event::WentDown { tier: 0 });
    lab.feed(Event::OwnerEnded { owner: 2 });
    assert_eq!(lab.machine.gauges().claims_queued, 2);
    assert_eq!(answer_probes(&mut lab, 1), [0, 1, 0, 1], "one after the other");
    assert_eq!(lab.machine.gauges().claims_queued, 0);
    assert_eq!(end_reads(&mut lab), [(1, 1), (1, 2)]);
    for claim in [first, second.claim] {
        assert_eq!(settle(&mut lab, 1, claim), 1);
    }
}

#[test]
fn a_claim_of_blocks_to_be_leased_waits_for_its_turn() {
    let mut lab = lab(2, 1);
    let here = filled(&mut lab);
    let first = lab.send(claim(&[0], vec![BlockHash([1; 16]), BlockHash([2; 16])]));
    assert_eq!(lab.machine.gauges().claims_queued, 1);
    // Only one block fits, and the first claim needs two.
    release(&mut lab, &here[..1]);
    lab.take();
    lab.send_as(2, claim(&[0], vec![BlockHash([3; 16])]));
    assert_eq!(commanded(&mut lab), (vec![], vec![]));
    assert_eq!(lab.machine.gauges().claims_queued, 2);
    release(&mut lab, &here[1..3]);
    let leased = lab.take().into_iter().filter_map(|command| match command {
        Command::Lease { key, .. } => Some(key.hash.0[0]),
        _ => None,
    });
    assert_eq!(leased.collect::<Vec<_>>(), [1, 2, 3], "one after the other");
    assert!(lab.reply(first).is_some());
}

/// Where the blocks at the front are the ones that do not fit, cutting what lies behind them helps nothing.
#[test]
fn a_long_claim_is_cut_in_few_steps() {
    const POOL: u16 = 1000;
    let mut lab = Lab::new(u64::from(POOL), 1);
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: 8000 * BLOCK, unit_bytes: BLOCK });
    for from in (0..POOL).step_by(50) {
        let token = lab.send(load_of((from..from + 50).map(wide).collect(), false));
        grant_all(&mut lab);
        let reply = lab.reply(token).unwrap();
        release(&mut lab, &leased(reply));
    }
    let in_place = lease(&mut lab, &[255]);
    release(&mut lab, &in_place);
    lab.take();
    // The pool's share is 900 blocks, and these have 901 there.
    let hashes = (0..901).chain(5000..8000).map(wide).collect();
    let mut todo = vec![Event::Request { token: 999, owner: 2, request: claim(&[0], hashes) }];
    let mut steps = 0;
    while let Some(event) = todo.pop() {
        todo.extend(lab.step(event));
        steps += 1;
    }
    assert!(steps < 60, "{steps} steps");
    grant_all(&mut lab);
    let units = settled_units(&mut lab, 2, 999);
    assert!((700..=900).contains(&units), "{units} of 900");
}
