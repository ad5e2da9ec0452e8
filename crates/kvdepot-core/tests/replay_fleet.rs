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
        engines: 1,
        engine_capacity: 0,
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

fn engine_hits(windows: &[Window]) -> u64 {
    windows.iter().map(|window| window.engine_hits).sum()
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

    /// What an engine has itself and what its depot has make one hit, however many engines share the depot.
    #[test]
    fn engines_and_an_endless_pool_have_what_was_named_before(
        requests in requests(), engines in 1usize..5, capacity in 0u64..30,
    ) {
        let trace = trace_of(&requests);
        let endless = replay(&trace, &[level(1 << 20)]).unwrap().hits();
        for route in [Route::Random, Route::RoundRobin, Route::LongestPrefix] {
            let many = Fleet { route, engines, engine_capacity: capacity, ..fleet(1, 1 << 20) };
            let windows = simulate(&trace, &many).unwrap();
            prop_assert_eq!(hits(&windows) + engine_hits(&windows), endless);
            prop_assert!(capacity > 0 || engine_hits(&windows) == 0);
        }
    }

    /// An engine's cache is vLLM's: least recently used, the tail of a request before its head.
    #[test]
    fn an_engine_keeps_what_a_list_keeps(requests in requests(), capacity in 1usize..30) {
        let (mut list, mut expected) = (Vec::<u64>::new(), 0);
        for request in &requests {
            expected += request.iter().take_while(|block| list.contains(block)).count() as u64;
            let kept = &request[..request.len().min(capacity)];
            list.retain(|block| !kept.contains(block));
            list.splice(0..0, kept.iter().copied());
            list.truncate(capacity);
        }
        let one = Fleet { engine_capacity: capacity as u64, ..fleet(1, 1) };
        prop_assert_eq!(engine_hits(&simulate(&trace_of(&requests), &one).unwrap()), expected);
    }

    #[test]
    fn windows_add_up(requests in requests(), windows in 1usize..9) {
        let trace = trace_of(&requests);
        let references = |windows: &[Window]| windows.iter().map(|window| window.references).sum::<u64>();
        let sum = |windows: &[Window]| (hits(windows), engine_hits(windows), references(windows));
        let whole = Fleet { engines: 2, engine_capacity: 10, ..fleet(3, 20) };
        let one = simulate(&trace, &whole).unwrap();
        let many = simulate(&trace, &Fleet { windows, ..whole }).unwrap();
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

/// A depot that restarts takes nothing from its engines; a node that is lost takes all.
#[test]
fn engines_outlive_their_depot_and_not_their_node() {
    let trace = conversations(10, 20);
    let one = Fleet { engine_capacity: 10_000, ..fleet(1, 1) };
    let all = engine_hits(&simulate(&trace, &one).unwrap());
    let after = |changes| engine_hits(&simulate(&trace, &Fleet { changes, ..one.clone() }).unwrap());
    assert_eq!(after(vec![(0.5, Change::Upgrade { node: 0, takes_over: false })]), all);
    let replaced = vec![(0.5, Change::AddNode(1)), (0.5, Change::LoseNode(0))];
    assert_eq!(after(replaced), all - 10 * 10);
    let back = vec![
        (0.4, Change::AddNode(1)),
        (0.5, Change::LoseNode(0)),
        (0.5, Change::AddNode(0)),
        (0.5, Change::LoseNode(1)),
    ];
    let prefix = Fleet { route: Route::LongestPrefix, changes: back, ..one };
    assert!(engine_hits(&simulate(&trace, &prefix).unwrap()) <= all - 10 * 10, "it comes back empty");
}

/// A router that knows the engines' caches finds the one that has the prompt itself.
#[test]
fn the_longest_prefix_prefers_the_engine_that_has_it_itself() {
    let trace = conversations(40, 20);
    let of = |route| {
        let many = Fleet { engines: 4, engine_capacity: 10_000, route, ..fleet(2, 10_000) };
        let windows = simulate(&trace, &many).unwrap();
        (engine_hits(&windows), hits(&windows))
    };
    let endless = replay(&trace, &[level(1 << 20)]).unwrap().hits();
    assert_eq!(of(Route::LongestPrefix), (endless, 0));
    let (own, depot) = of(Route::Random);
    assert!(own < endless * 3 / 4 && depot > 0, "{own} and {depot} of {endless}");
}

#[test]
fn a_reset_costs_one_tenant_everything_and_the_others_nothing() {
    let trace = conversations(10, 20);
    let many = Fleet {
        copies: 3,
        engines: 2,
        engine_capacity: 20,
        route: Route::LongestPrefix,
        ..shared(fleet(2, 50), 2, 10_000)
    };
    let found = |changes| {
        let windows = simulate(&trace, &Fleet { changes, ..many.clone() }).unwrap();
        hits(&windows) + engine_hits(&windows)
    };
    let all = found(Vec::new());
    assert_eq!(all, 3 * 10 * 190, "the servers have what was named before");
    // Ten conversations of the tenant lose the ten blocks that each had.
    assert_eq!(found(vec![(0.5, Change::Reset(1))]), all - 10 * 10);
    assert_eq!(found(vec![(0.5, Change::Reset(1)), (0.5, Change::Reset(1))]), all - 10 * 10);
    assert_eq!(found((0..3).map(|tenant| (0.5, Change::Reset(tenant))).collect()), all - 3 * 10 * 10);
    // The past epoch takes no space: the second half stores 400 blocks, as many as the pool has.
    let changes = (0..2).map(|tenant| (0.5, Change::Reset(tenant))).collect();
    let full = Fleet { copies: 2, changes, ..fleet(1, 400) };
    assert_eq!(simulate(&trace, &full).unwrap()[0].levels[0].evicted, 0);
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
    assert!(changed(Change::Reset(1)).contains("no such tenant"));
    assert!(refused(Fleet { engines: 0, ..fleet(1, 1) }).contains("1 to 4096 nodes, engines"));
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
