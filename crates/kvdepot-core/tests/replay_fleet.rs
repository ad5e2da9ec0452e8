//! Fleets of simulated depots, compared with single replays and with what must hold whatever the load.
#![allow(clippy::unwrap_used, reason = "a failure is a failure of the test")]

use kvdepot_core::machine::Placement;
use kvdepot_core::replay::{Change, Fleet, Level, Route, Trace, Window, replay, simulate};
use proptest::prelude::*;

fn level(capacity: u64) -> Level {
    Level { policy: "lru".to_owned(), capacity, placement: Placement::default(), writes_per_day: 0 }
}

fn fleet(nodes: usize, capacity: u64) -> Fleet {
    Fleet {
        nodes,
        levels: vec![level(capacity)],
        servers: 0,
        shared: None,
        route: Route::RoundRobin,
        copies: 1,
        changes: Vec::new(),
        windows: 1,
        seed: 1,
    }
}

fn shared(fleet: Fleet, servers: usize, capacity: u64) -> Fleet {
    Fleet { servers, shared: Some(level(capacity)), ..fleet }
}

fn trace_of(requests: &[Vec<u64>]) -> Trace {
    let mut trace = Trace::new();
    requests.iter().zip(0..).for_each(|(blocks, at)| trace.push(at, 0, 0, blocks));
    trace
}

/// Conversations: request `n` continues conversation `n % count` by one block.
fn conversations(count: u64, turns: u64) -> Trace {
    let request = |n: u64| (0..=n / count).map(|turn| (n % count) << 32 | turn).collect();
    trace_of(&(0..count * turns).map(request).collect::<Vec<_>>())
}

fn hits(windows: &[Window]) -> u64 {
    windows.iter().flat_map(|window| &window.levels).map(|level| level.hits).sum()
}

fn requests() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let request = (0u64..12, 1u64..9).prop_map(|(first, len)| (0..len).map(|n| first * 100 + n).collect());
    prop::collection::vec(request, 1..200)
}

proptest! {
    #[test]
    fn a_fleet_of_one_node_is_a_replay(requests in requests(), pool in 1u64..40, disk in 1u64..60) {
        let trace = trace_of(&requests);
        let levels = vec![level(pool), level(disk)];
        for route in [Route::Random, Route::RoundRobin, Route::LongestPrefix] {
            let one = Fleet { levels: levels.clone(), route, ..fleet(1, pool) };
            let windows = simulate(&trace, &one).unwrap();
            let report = replay(&trace, &levels).unwrap();
            prop_assert_eq!(windows.len(), 1);
            prop_assert_eq!(&windows[0].levels, &report.levels);
            prop_assert_eq!(windows[0].references, report.references);
        }
    }

    /// Wherever requests go, servers with enough space have all that was named before.
    #[test]
    fn shared_servers_have_what_any_node_stored(requests in requests(), nodes in 1usize..6, servers in 1usize..5) {
        let trace = trace_of(&requests);
        let endless = replay(&trace, &[level(1 << 20)]).unwrap().hits();
        for route in [Route::Random, Route::RoundRobin, Route::LongestPrefix] {
            let many = Fleet { route, ..shared(fleet(nodes, 4), servers, 1 << 20) };
            prop_assert_eq!(hits(&simulate(&trace, &many).unwrap()), endless);
        }
    }

    #[test]
    fn windows_add_up(requests in requests(), windows in 1usize..9) {
        let trace = trace_of(&requests);
        let sum = |windows: &[Window]| (hits(windows), windows.iter().map(|window| window.references).sum::<u64>());
        let one = simulate(&trace, &fleet(3, 20)).unwrap();
        let many = simulate(&trace, &Fleet { windows, ..fleet(3, 20) }).unwrap();
        prop_assert_eq!(sum(&one), sum(&many));
    }
}

#[test]
fn each_copy_of_the_trace_has_blocks_of_its_own() {
    let trace = conversations(5, 8);
    let once = hits(&simulate(&trace, &fleet(1, 1 << 20)).unwrap());
    let thrice = hits(&simulate(&trace, &Fleet { copies: 3, ..fleet(1, 1 << 20) }).unwrap());
    assert_eq!((once, thrice), (5 * 28, 3 * 5 * 28));
}

/// A router that knows what each node holds finds all hits without a shared tier; one that does not loses most of them.
#[test]
fn the_longest_prefix_finds_the_node_that_has_it() {
    let trace = conversations(40, 20);
    let of = |route| hits(&simulate(&trace, &Fleet { route, ..fleet(4, 10_000) }).unwrap());
    let endless = replay(&trace, &[level(1 << 20)]).unwrap().hits();
    assert_eq!(of(Route::LongestPrefix), endless);
    assert!(of(Route::Random) < endless * 3 / 4, "{} of {endless}", of(Route::Random));
}

/// The router must not send everything to the one node that has a prompt that all requests begin with.
#[test]
fn the_longest_prefix_keeps_the_load_even() {
    let requests: Vec<Vec<u64>> = (0..2000).map(|n| vec![1, 2, 3, 100 + n]).collect();
    let prefix = Fleet { route: Route::LongestPrefix, ..fleet(8, 10_000) };
    let windows = simulate(&trace_of(&requests), &prefix).unwrap();
    assert!(windows[0].requests_max <= 2 * 2000 / 8 + 8, "{}", windows[0].requests_max);
}

#[test]
fn a_lost_node_costs_its_blocks_and_a_shared_tier_has_them() {
    let trace = conversations(40, 20);
    let prefix = Fleet { route: Route::LongestPrefix, ..fleet(4, 10_000) };
    let lost = Fleet { changes: vec![(0.5, Change::LoseNode(2))], ..prefix.clone() };
    let (all, without) = (simulate(&trace, &prefix).unwrap(), simulate(&trace, &lost).unwrap());
    assert!(hits(&without) < hits(&all));
    assert_eq!((all[0].nodes, without[0].nodes), (4, 3));
    let backed = |fleet| hits(&simulate(&trace, &shared(fleet, 2, 10_000)).unwrap());
    assert_eq!(backed(lost), hits(&all));
    // It comes back empty, and serves again.
    let back = vec![(0.5, Change::LoseNode(2)), (0.75, Change::AddNode(2)), (0.8, Change::AddNode(4))];
    assert_eq!(simulate(&trace, &Fleet { changes: back, ..prefix }).unwrap()[0].nodes, 5);
}

#[test]
fn an_upgrade_keeps_the_pool_only_if_it_is_taken_over() {
    let trace = conversations(10, 20);
    let one = fleet(1, 10_000);
    let upgraded = |takes_over, levels: usize| {
        let changes = vec![(0.5, Change::Upgrade { node: 0, takes_over })];
        let levels = vec![level(10_000); levels];
        hits(&simulate(&trace, &Fleet { changes, levels, ..one.clone() }).unwrap())
    };
    let all = hits(&simulate(&trace, &one).unwrap());
    assert_eq!(upgraded(true, 1), all);
    // Ten conversations lose the ten blocks that each had.
    assert_eq!(upgraded(false, 1), all - 10 * 10);
    assert_eq!(upgraded(false, 2), all, "its own tier keeps its blocks");
}

#[test]
fn a_lost_server_costs_its_share_only() {
    // One block each, asked for twice, by nodes that cannot hold them.
    let requests: Vec<Vec<u64>> = (0..2).flat_map(|_| (0..3000).map(|n| vec![n * 7919])).collect();
    let trace = trace_of(&requests);
    let all = shared(fleet(2, 1), 3, 10_000);
    assert_eq!(hits(&simulate(&trace, &all).unwrap()), 3000);
    let lost = Fleet { changes: vec![(0.5, Change::LoseServer(1))], windows: 2, ..all.clone() };
    let windows = simulate(&trace, &lost).unwrap();
    let found = windows[1].levels[1];
    assert!((1800..2200).contains(&found.hits), "{found:?}");
    assert_eq!(found.written, 0, "the others have theirs, and the lost one takes none");
    let back = vec![(0.5, Change::LoseServer(1)), (0.5, Change::AddServer(1))];
    let windows = simulate(&trace, &Fleet { changes: back, windows: 2, ..all }).unwrap();
    assert_eq!(windows[1].levels[1].hits, found.hits);
    assert_eq!(windows[1].levels[1].written, 3000 - found.hits);
}

#[test]
fn wrong_fleets_are_refused() {
    let trace = conversations(2, 2);
    let refused = |fleet: Fleet| simulate(&trace, &fleet).unwrap_err().to_string();
    assert!(refused(fleet(0, 1)).contains("1 to 4096 nodes"));
    assert!(refused(Fleet { servers: 2, ..fleet(1, 1) }).contains("pool servers"));
    assert!(refused(Fleet { shared: Some(level(1)), ..fleet(1, 1) }).contains("pool servers"));
    assert!(refused(Fleet { levels: Vec::new(), ..fleet(1, 1) }).contains("a pool"));
    let changed = |change| refused(Fleet { changes: vec![(0.0, change)], ..fleet(1, 1) });
    assert!(changed(Change::LoseNode(0)).contains("a node that is up"));
    assert!(changed(Change::LoseNode(1)).contains("no such node"));
    assert!(changed(Change::AddNode(2)).contains("no such node"));
    assert!(changed(Change::LoseServer(0)).contains("no such pool server"));
    assert!(changed(Change::AddNode(0)).contains("up already"));
    let all = |changes: Vec<(f64, Change)>| refused(Fleet { changes, ..shared(fleet(2, 1), 1, 1) });
    assert!(all(vec![(0.0, Change::AddServer(0))]).contains("up already"));
    assert!(all(vec![(0.0, Change::LoseServer(0)); 2]).contains("down already"));
    assert!(all(vec![(0.0, Change::LoseNode(0)); 2]).contains("down already"));
    assert!(all(vec![(1.0, Change::LoseNode(7))]).contains("no such node"), "after the last request, too");
    for wrong in [vec![1.1], vec![-0.1], vec![f64::NAN], vec![0.5, 0.4]] {
        let changes = wrong.into_iter().map(|at| (at, Change::Upgrade { node: 0, takes_over: true }));
        assert!(all(changes.collect()).contains("ascending shares"));
    }
    assert_eq!(simulate(&Trace::new(), &fleet(1, 1)).unwrap(), []);
}
