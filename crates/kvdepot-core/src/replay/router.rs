//! The router in front of a simulated fleet.

use std::cmp::Reverse;
use std::collections::VecDeque;

/// Recent requests, per engine, by which the load of an engine is judged.
const RECENT_PER_ENGINE: usize = 8;

/// How the router chooses an engine for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// At random, from a seed.
    Random,
    /// One after another: each node in turn, and on each node each engine in turn.
    RoundRobin,
    /// The engine with the longest prefix in its own cache and its node's own pool and tiers; if several have it, the one
    /// with the longest prefix in its own cache, then the least loaded one. Engines that had more than twice their share
    /// of the recent requests are left out.
    LongestPrefix,
}

/// An engine of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) node: usize,
    pub(super) engine: usize,
}

/// What the router remembers.
pub(super) struct Router {
    route: Route,
    engines: usize,
    recent: VecDeque<Target>,
    /// Recent requests of each engine, one node after another.
    recent_of: Vec<usize>,
    random: u64,
    turn: usize,
}

impl Router {
    /// Makes a router for nodes with this many engines each.
    pub(super) fn new(route: Route, engines: usize, seed: u64) -> Self {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Self { route, engines, recent: VecDeque::new(), recent_of: Vec::new(), random, turn: 0 }
    }

    /// Notes that a node has joined the fleet.
    pub(super) fn add_node(&mut self) {
        self.recent_of.extend(std::iter::repeat_n(0, self.engines));
    }

    const fn index(&self, target: Target) -> usize {
        target.node * self.engines + target.engine
    }

    /// Chooses an engine of the nodes that are `up`, of which there is at least one. `prefix` returns how many leading
    /// blocks an engine has or can load from its own node, and how many of these are in its own cache.
    pub(super) fn choose(&mut self, up: &[usize], prefix: impl Fn(Target) -> (usize, usize)) -> Target {
        let target = match self.route {
            Route::Random => {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                let number = (self.random % (up.len() * self.engines) as u64) as usize;
                Target { node: up[number % up.len()], engine: number / up.len() }
            }
            Route::RoundRobin => {
                self.turn += 1;
                Target { node: up[self.turn % up.len()], engine: self.turn / up.len() % self.engines }
            }
            Route::LongestPrefix => {
                let most = (2 * self.recent.len() / (up.len() * self.engines)).max(1);
                let all = || {
                    up.iter().flat_map(|&node| (0..self.engines).map(move |engine| Target { node, engine }))
                };
                let load = |target: Target| self.recent_of[self.index(target)];
                let best = all().filter(|&target| load(target) < most);
                let best = best.max_by_key(|&target| (prefix(target), Reverse(load(target))));
                let nothing = Target { node: up[0], engine: 0 };
                best.or_else(|| all().min_by_key(|&target| load(target))).unwrap_or(nothing)
            }
        };
        self.sent(target);
        target
    }

    fn sent(&mut self, target: Target) {
        let index = self.index(target);
        self.recent.push_back(target);
        self.recent_of[index] += 1;
        if self.recent.len() > RECENT_PER_ENGINE * self.recent_of.len()
            && let Some(oldest) = self.recent.pop_front()
        {
            let index = self.index(oldest);
            self.recent_of[index] -= 1;
        }
    }
}
