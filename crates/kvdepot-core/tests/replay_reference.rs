//! Compares the replay with plain models that share no code with it.

use std::collections::{HashMap, HashSet, VecDeque};

use kvdepot_core::machine::{Placement, WriteWhen};
use kvdepot_core::replay::{Ceiling, Level, Meter, Record, Trace, belady, replay};
use proptest::prelude::*;

fn level(policy: &str, capacity: u64) -> Level {
    Level { policy: policy.into(), capacity, placement: Placement::default(), writes_per_day: 0 }
}

fn tier(capacity: u64, write: WriteWhen) -> Level {
    Level {
        policy: "lru".into(),
        capacity,
        placement: Placement { write, promote: false },
        writes_per_day: 0,
    }
}

fn trace_of(requests: &[Vec<u64>]) -> Trace {
    let mut trace = Trace::new();
    for (at, blocks) in requests.iter().enumerate() {
        trace.push(at as u64, blocks.len() as u64 * 16, 1, blocks);
    }
    trace
}

/// Least recently used, written as a vector from the oldest to the newest.
fn lru_by_row(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut row, mut hits) = (VecDeque::<u64>::new(), 0);
    for blocks in requests {
        let hit = blocks.iter().take_while(|block| row.contains(block)).count();
        hits += hit as u64;
        for (index, &block) in blocks.iter().enumerate() {
            match row.iter().position(|&held| held == block) {
                Some(_) if index >= hit => continue,
                Some(at) => drop(row.remove(at)),
                None if row.len() == capacity => drop(row.pop_front()),
                None => {}
            }
            row.push_back(block);
        }
    }
    hits
}

/// S3-FIFO from the paper with the depot's constants: a tenth is small, two uses promote, three reprieve.
fn s3fifo_by_rows(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut small, mut main) = (VecDeque::<u64>::new(), VecDeque::<u64>::new());
    let mut uses = HashMap::<u64, u8>::new();
    let mut ghosts = VecDeque::<u64>::new();
    let mut hits = 0;
    for blocks in requests {
        let hit = blocks.iter().take_while(|block| uses.contains_key(block)).count();
        hits += hit as u64;
        for (index, &block) in blocks.iter().enumerate() {
            if let Some(count) = uses.get_mut(&block) {
                *count = (*count + u8::from(index < hit)).min(3);
                continue;
            }
            if uses.len() == capacity {
                loop {
                    let from_small = small.len() >= (uses.len() / 10).max(1) || main.is_empty();
                    let queue = if from_small { &mut small } else { &mut main };
                    let Some(oldest) = queue.pop_front() else { continue };
                    let count = uses.get_mut(&oldest).expect("a block in a queue has a count");
                    if from_small && *count >= 2 {
                        *count = 0;
                        main.push_back(oldest);
                    } else if !from_small && *count > 0 {
                        *count -= 1;
                        main.push_back(oldest);
                    } else {
                        uses.remove(&oldest);
                        if from_small {
                            ghosts.retain(|&ghost| ghost != oldest);
                            ghosts.push_back(oldest);
                            while ghosts.len() > capacity {
                                ghosts.pop_front();
                            }
                        }
                        break;
                    }
                }
            }
            let known = ghosts.iter().position(|&ghost| ghost == block);
            if let Some(at) = known {
                ghosts.remove(at);
            }
            uses.insert(block, 0);
            if known.is_some() { main.push_back(block) } else { small.push_back(block) }
        }
    }
    hits
}

/// Belady's choice by its definition: evicts what is used again last, found by reading on from here.
fn belady_by_reading_on(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let in_order: Vec<u64> = requests.iter().flatten().copied().collect();
    let (mut held, mut hits, mut at) = (Vec::<u64>::new(), 0, 0);
    for blocks in requests {
        hits += blocks.iter().take_while(|block| held.contains(block)).count() as u64;
        for block in blocks {
            at += 1;
            if !held.contains(block) {
                held.push(*block);
            }
            if held.len() > capacity {
                let next_use = |block: &u64| {
                    in_order[at..].iter().position(|later| later == block).unwrap_or(usize::MAX)
                };
                let last = (0..held.len()).max_by_key(|&index| next_use(&held[index])).expect("it is full");
                held.remove(last);
            }
        }
    }
    hits
}

/// The most hits that any choice of evictions reaches, by trying all; a block may also not be kept at all.
fn most_hits(uses: &[u64], held: &mut Vec<u64>, capacity: usize) -> u64 {
    let Some((block, later)) = uses.split_first() else { return 0 };
    if held.contains(block) {
        return 1 + most_hits(later, held, capacity);
    }
    let mut best = most_hits(later, held, capacity);
    if held.len() < capacity {
        held.push(*block);
        best = best.max(most_hits(later, held, capacity));
        held.pop();
        return best;
    }
    for slot in 0..held.len() {
        let evicted = std::mem::replace(&mut held[slot], *block);
        best = best.max(most_hits(later, held, capacity));
        held[slot] = evicted;
    }
    best
}

/// Requests of conversations: each continues its history, and all of a kind begin with the same blocks.
fn requests() -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec((0u64..6, 1u64..12), 1..120).prop_map(|turns| {
        let block =
            |chain: u64, at: u64| if at < 2 { chain % 2 * 1000 + at } else { (chain + 1) * 10_000 + at };
        turns.into_iter().map(|(chain, len)| (0..len).map(|at| block(chain, at)).collect()).collect()
    })
}

proptest! {
    #[test]
    fn lru_hits_what_a_plain_row_hits(requests in requests(), capacity in 1usize..40) {
        let report = replay(&trace_of(&requests), &[level("lru", capacity as u64)]).unwrap();
        prop_assert_eq!(report.hits(), lru_by_row(&requests, capacity));
        prop_assert_eq!(report.levels[0].written - report.levels[0].evicted <= capacity as u64, true);
    }

    #[test]
    fn s3fifo_hits_nearly_what_plain_queues_hit(requests in requests(), capacity in 1usize..40) {
        // If all of a queue are kept, the order in which it is left differs; the depot's own tests check its order.
        let ours = replay(&trace_of(&requests), &[level("s3fifo", capacity as u64)]).unwrap().hits();
        let plain = s3fifo_by_rows(&requests, capacity);
        let all: usize = requests.iter().map(Vec::len).sum();
        prop_assert!(ours.abs_diff(plain) as usize <= all / 10 + 12, "ours {ours}, plain {plain} of {all}");
    }

    #[test]
    fn belady_hits_what_reading_on_hits(requests in requests(), capacity in 1usize..40) {
        prop_assert_eq!(belady(&trace_of(&requests), capacity as u64), belady_by_reading_on(&requests, capacity));
    }

    #[test]
    fn no_choice_of_evictions_hits_more_than_belady(uses in prop::collection::vec(0u64..6, 1..13), capacity in 1usize..4) {
        let requests: Vec<Vec<u64>> = uses.iter().map(|&block| vec![block]).collect();
        prop_assert_eq!(belady(&trace_of(&requests), capacity as u64), most_hits(&uses, &mut Vec::new(), capacity));
    }

    #[test]
    fn an_endless_pool_hits_all_that_was_named_before(requests in requests()) {
        let trace = trace_of(&requests);
        let endless = replay(&trace, &[level("lru", 1 << 20)]).unwrap();
        prop_assert_eq!(endless.hits(), trace.references() - trace.distinct());
        prop_assert_eq!(belady(&trace, 1 << 20), endless.hits());
    }

    #[test]
    fn tiers_divide_the_hits_of_all_that_they_hold(requests in requests(), pool in 1u64..20, disk in 1u64..40) {
        let trace = trace_of(&requests);
        for write in [WriteWhen::Through, WriteWhen::OnSecondUse, WriteWhen::WhenCold] {
            let both = replay(&trace, &[level("lru", pool), tier(disk, write)]).unwrap();
            prop_assert!(both.hits() >= both.levels[0].hits);
            prop_assert!(both.hits() <= trace.references() - trace.distinct());
            prop_assert!(both.levels[1].written - both.levels[1].evicted <= disk);
        }
    }
}

#[test]
fn a_gap_ends_a_hit() {
    // With two slots the second request evicts block 1, so the third finds 2 and 3 after a gap.
    let trace = trace_of(&[vec![1, 2], vec![2, 3], vec![1, 2, 3]]);
    assert_eq!(replay(&trace, &[level("lru", 2)]).unwrap().hits(), 1);
}

#[test]
fn placement_decides_what_a_tier_is_given() {
    let trace = trace_of(&[vec![1], vec![2], vec![3], vec![3], vec![1]]);
    let run = |write| replay(&trace, &[level("lru", 2), tier(9, write)]).unwrap();
    let through = run(WriteWhen::Through);
    assert_eq!((through.levels[1].written, through.levels[1].hits, through.levels[0].hits), (3, 1, 1));
    let cold = run(WriteWhen::WhenCold); // 1 goes for 3, and 2 for 1
    assert_eq!((cold.levels[1].written, cold.levels[1].hits), (2, 1));
    let second = run(WriteWhen::OnSecondUse); // 3 alone is used again while the pool has it
    assert_eq!((second.levels[1].written, second.levels[1].hits), (1, 0));
}

#[test]
fn a_block_loaded_from_below_is_promoted_where_a_tier_takes_such() {
    let trace = trace_of(&[vec![1], vec![2], vec![3], vec![1]]);
    let near = |promote| Level {
        policy: "lru".into(),
        capacity: 1,
        placement: Placement { write: WriteWhen::Through, promote },
        writes_per_day: 0,
    };
    for (promote, written) in [(false, 3), (true, 4)] {
        let report = replay(&trace, &[level("lru", 1), near(promote), tier(9, WriteWhen::Through)]).unwrap();
        assert_eq!((report.levels[2].hits, report.levels[1].written), (1, written));
    }
}

#[test]
fn a_block_that_a_tier_evicts_goes_to_the_next_one_that_gets_such_blocks() {
    let trace = trace_of(&[vec![1], vec![2], vec![3], vec![4], vec![1]]);
    let demoted = |capacity| tier(capacity, WriteWhen::OnDemotion);
    let through = || tier(2, WriteWhen::Through);
    let report = replay(&trace, &[level("lru", 1), through(), demoted(1), demoted(9)]).unwrap();
    // The first tier evicts 1 and 2, and the second one 1 for 2. Then 1 is read from the third.
    assert_eq!((report.levels[1].written, report.levels[2].written, report.levels[3].written), (4, 2, 1));
    assert_eq!(report.levels[3].hits, 1);
    let kept = replay(&trace, &[level("lru", 1), tier(9, WriteWhen::Through), demoted(9)]).unwrap();
    assert_eq!((kept.levels[1].hits, kept.levels[2].written), (1, 0), "nothing is evicted");
}

/// The depot's own budget: an hour's share is saved up, and a block that was left out is written at its next use.
#[test]
fn a_tier_s_budget_leaves_blocks_out_until_they_are_used_again() {
    let mut trace = Trace::new();
    let minute = 60_000;
    for (at, block) in [(0, 1), (0, 2), (minute, 2), (61 * minute, 2), (62 * minute, 3)] {
        trace.push(at, 16, 1, &[block]);
    }
    let limited = Level { writes_per_day: 24, ..tier(9, WriteWhen::Through) };
    let report = replay(&trace, &[level("lru", 9), limited]).unwrap();
    // 1 takes the first hour's block and 2 the second one's.
    assert_eq!((report.levels[1].written, report.levels[1].over_budget), (2, 3));
    let all = replay(&trace, &[level("lru", 9), tier(9, WriteWhen::Through)]).unwrap();
    assert_eq!((all.levels[1].written, all.levels[1].over_budget), (3, 0));
}

#[test]
fn a_pool_that_keeps_nothing_gives_every_block_to_every_tier() {
    let trace = trace_of(&[vec![1, 2], vec![1, 2, 3], vec![3]]);
    let report = replay(&trace, &[level("lru", 0), tier(9, WriteWhen::OnSecondUse)]).unwrap();
    assert_eq!((report.levels[0].hits, report.levels[1].hits, report.levels[1].written), (0, 3, 3));
}

#[test]
fn belady_is_never_worse_than_what_knows_no_future() {
    let requests: Vec<Vec<u64>> =
        (0..400u64).map(|i| (0..1 + i * 7 % 9).map(|at| i * i % 13 * 100 + at).collect()).collect();
    let trace = trace_of(&requests);
    for capacity in [4, 10, 30, 60] {
        let best = belady(&trace, capacity);
        for policy in ["lru", "s3fifo", "lhd"] {
            assert!(
                replay(&trace, &[level(policy, capacity)]).unwrap().hits() <= best,
                "{policy} at {capacity}"
            );
        }
    }
}

#[test]
fn wrong_levels_are_refused() {
    let trace = trace_of(&[vec![1]]);
    assert!(replay(&trace, &[]).is_err());
    assert!(replay(&trace, &[level("lru", 0)]).is_ok(), "a pool may keep nothing");
    assert!(replay(&trace, &[level("lru", 1), level("lru", 0)]).is_err());
    assert!(replay(&trace, &[level("mru", 1)]).is_err());
    assert!(replay(&trace, &vec![level("lru", 1); 10]).is_err());
}

/// Returns a number that represents a hash.
fn mixed(number: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes())
}

#[test]
fn the_sketch_counts_what_is_new_within_a_hundredth() {
    let (mut ceiling, mut counted, mut seen) = (Ceiling::new(), 0.0, HashSet::new());
    for step in 0..3_000_000u64 {
        let block = mixed(step * step % 1_000_003);
        seen.insert(block);
        counted += ceiling.see(block);
        if [1_000, 30_000, 400_000, 2_999_999].contains(&step) {
            let wrong = (counted - seen.len() as f64).abs() / seen.len() as f64;
            assert!(wrong < 0.015, "{counted} of {} after {step}", seen.len());
        }
    }
}

#[test]
fn a_meter_counts_what_replays_count() {
    let requests: Vec<Vec<u64>> =
        (0..3000u64).map(|i| (0..1 + i * 7 % 19).map(|at| mixed(i * i % 131 * 100 + at)).collect()).collect();
    let trace = trace_of(&requests);
    let mut meter = Meter::new("lru", &[200, 1 << 20]).unwrap();
    for blocks in &requests {
        meter.look_up(blocks);
        meter.store(blocks);
    }
    let found: Vec<u64> = meter.sizes().map(|size| size.hits).collect();
    let asked = meter.asked() as f64;
    assert_eq!(meter.asked(), trace.references());
    for (hits, capacity) in found.iter().zip([200, 1 << 20]) {
        let replayed = replay(&trace, &[level("lru", capacity)]).unwrap().hits();
        assert!((*hits as f64 - replayed as f64).abs() / asked < 0.01, "{hits} and {replayed} of {asked}");
    }
    let endless = (trace.references() - trace.distinct()) as f64;
    assert!((meter.ceiling() as f64 - endless).abs() / asked < 0.01);
}

#[test]
fn the_ceiling_counts_what_was_stored_and_never_asked_for() {
    let mut meter = Meter::new("lru", &[1000]).unwrap();
    let blocks: Vec<u64> = (0..100).map(mixed).collect();
    meter.store(&blocks); // an answer, which the next prompt contains
    meter.look_up(&blocks);
    assert_eq!((meter.asked(), meter.ceiling()), (100, 100));
    assert_eq!(meter.sizes().next().unwrap().hits, 100);
}

#[test]
fn lines_of_all_kinds_are_read() {
    let mut trace = Trace::new();
    trace
        .push_json(r#"{"timestamp": 27000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}"#)
        .unwrap();
    trace
        .push_json(
            r#"{"timestamp": "28000000000", "input_length": 512, "output_length": 5, "hash_ids": [0]}"#,
        )
        .unwrap();
    trace
        .push_json(r#"{"timestamp": 1.5, "input_length": 9, "hash_ids": ["a", "b"], "model": "m"}"#)
        .unwrap();
    trace
        .push_json(
            r#"{"id": "c1", "block_size": 64, "requests": [{"t": 2.5, "type": "n", "in": 128, "out": 3, "hash_ids": [0, 1]},
            {"t": 3, "type": "subagent", "requests": [{"t": 3, "in": 64, "out": 1, "hash_ids": [0]}]}]}"#,
        )
        .unwrap();
    trace.push_json(r#"{"id": "c2", "requests": [{"t": 1, "in": 64, "out": 1, "hash_ids": [0]}]}"#).unwrap();
    trace.sort();
    let times: Vec<u64> = trace.requests().iter().map(|request| request.timestamp_ms).collect();
    assert_eq!(times, [1, 1000, 2500, 3000, 27_000, 28_000]);
    let first = |at: usize| trace.blocks(&trace.requests()[at])[0];
    assert_eq!(first(4), first(5), "numbers of lines are global");
    assert_eq!(first(2), first(3), "a subagent shares its session's numbers");
    assert_ne!(first(1), first(2), "another session has numbers of its own");
    assert_ne!(first(2), first(4));
    assert_eq!(trace.distinct(), 2 + 2 + 2 + 1);
}

#[test]
fn lines_that_are_none_are_refused_with_what_is_wrong() {
    for (line, word) in [
        ("", "EOF"),
        ("[1]", "expected"),
        (r#"{"timestamp": 1}"#, "hash_ids"),
        (r#"{"hash_ids": [1]}"#, "timestamp"),
        (r#"{"timestamp": -1.0, "hash_ids": []}"#, "time"),
        (r#"{"timestamp": 1, "hash_ids": [1.5]}"#, "hash"),
        (r#"{"requests": []}"#, "id"),
    ] {
        let error = Trace::new().push_json(line).unwrap_err().to_string();
        assert!(error.contains(word), "{line}: {error}");
    }
}

#[test]
fn a_record_is_read_back_as_it_was() {
    let hashes: Vec<_> = (1..4u8).map(|n| kvdepot_core::BlockHash([n; 16])).collect();
    let record = Record {
        timestamp_ms: 7,
        input_length: 50,
        output_length: 3,
        block_tokens: 16,
        hashes: hashes.clone(),
    };
    let mut line = Vec::new();
    record.write_line(&mut line);
    let text = String::from_utf8(line).unwrap();
    assert!(text.starts_with(r#"{"timestamp": 7, "input_length": 50, "output_length": 3, "block_tokens": 16, "hash_ids": ["01010101"#));
    assert!(text.ends_with("\"]}\n"));
    let mut trace = Trace::new();
    trace.push_json(&text).unwrap();
    let request = trace.requests()[0];
    assert_eq!((request.timestamp_ms, request.input_length, request.output_length), (7, 50, 3));
    let numbers: Vec<u64> = hashes.iter().map(kvdepot_core::replay::block_number).collect();
    assert_eq!(trace.blocks(&request), numbers);
}
