//! Replays a trace over a fleet: many nodes with a depot each, a router in front of them, and pool servers that they
//! share. Nodes and servers are lost, come back, join, and are upgraded at given moments; a tenant's cache is reset.

use std::cell::RefCell;
use std::rc::Rc;

use super::engines::Engines;
use super::level::{Level, LevelReport, TIERS_MAX};
use super::levels::{Levels, Store};
use super::router::{Route, Router, Target};
use super::servers::Servers;
use super::tenants::Tenants;
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};

/// Maximum number of nodes, of engines on a node, of servers, and of copies of the trace.
const FLEET_MAX: usize = 4096;

/// What happens to the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A node is lost, with its engines, its pool and its own tiers.
    LoseNode(usize),
    /// A node comes back, or a new one joins if the number is the next one. It is empty.
    AddNode(usize),
    /// A node's depot restarts. Engines and the node's own tiers keep their blocks; the pool keeps them if another depot
    /// takes it over.
    Upgrade {
        /// The node.
        node: usize,
        /// Whether another depot takes the pool over.
        takes_over: bool,
    },
    /// A pool server is lost, with its blocks.
    LoseServer(usize),
    /// A pool server comes back, empty.
    AddServer(usize),
    /// A tenant begins the next epoch on all nodes, as after an update of its weights: nothing stored before is valid.
    Reset(usize),
}

/// A fleet to simulate.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Number of nodes at the start.
    pub nodes: usize,
    /// Number of engines on each node.
    pub engines: usize,
    /// Blocks in each engine's own prefix cache; with 0, an engine asks the depot for every block.
    pub engine_capacity: u64,
    /// The pool of each node, and the node's own tiers below it.
    pub levels: Vec<Level>,
    /// Number of pool servers.
    pub servers: usize,
    /// The tier that they make up, below the others; the capacity is that of one server.
    pub shared: Option<Level>,
    /// How requests are routed.
    pub route: Route,
    /// Number of times that each request is sent, each time with blocks of its own, as by so many tenants.
    pub copies: usize,
    /// Changes, and after which share of all requests each happens: 0 to 1, ascending.
    pub changes: Vec<(f64, Change)>,
    /// Number of parts of the trace that are reported separately.
    pub windows: usize,
    /// Determines random routes.
    pub seed: u64,
}

/// Result of a part of the trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Blocks named by its requests.
    pub references: u64,
    /// Blocks of hits that the engines had in their own caches.
    pub engine_hits: u64,
    /// Results of the pools, of each own tier, and of the pool servers, over all nodes.
    pub levels: Vec<LevelReport>,
    /// Requests of the node that had the most.
    pub requests_max: u64,
    /// Nodes that served requests at its end.
    pub nodes: usize,
}

struct Node {
    engines: Engines,
    engine_hits: u64,
    levels: Levels,
    is_up: bool,
    requests: u64,
}

struct State<'a> {
    fleet: &'a Fleet,
    all_levels: Vec<Level>,
    nodes: Vec<Node>,
    servers: Option<Rc<RefCell<Servers>>>,
    router: Router,
    tenants: Tenants<'a>,
}

impl<'a> State<'a> {
    fn new(trace: &'a Trace, fleet: &'a Fleet) -> Result<Self> {
        let servers = match &fleet.shared {
            Some(level) => Some(Rc::new(RefCell::new(Servers::new(fleet.servers, level)?))),
            None => None,
        };
        let all_levels = fleet.levels.iter().chain(&fleet.shared).cloned().collect();
        let mut state = Self {
            fleet,
            all_levels,
            nodes: Vec::new(),
            servers,
            router: Router::new(fleet.route, fleet.engines, fleet.seed),
            tenants: Tenants::new(trace, fleet.copies),
        };
        (0..fleet.nodes).try_for_each(|_| state.add_new_node())?;
        Ok(state)
    }

    fn add_new_node(&mut self) -> Result<()> {
        let own: Result<Vec<Store>> = self.fleet.levels.iter().map(Store::own).collect();
        let mut stores = own?;
        stores.extend(self.servers.iter().map(|servers| Store::Shared(Rc::clone(servers))));
        let levels = Levels::new(stores, &self.all_levels);
        let engines = self.new_engines()?;
        self.nodes.push(Node { engines, engine_hits: 0, levels, is_up: true, requests: 0 });
        self.router.add_node();
        Ok(())
    }

    fn new_engines(&self) -> Result<Engines> {
        Engines::new(self.fleet.engines, self.fleet.engine_capacity)
    }

    fn change(&mut self, change: Change) -> Result<()> {
        match change {
            Change::LoseNode(node) => {
                self.set_up(node, false)?;
                if !self.nodes.iter().any(|node| node.is_up) {
                    return Err(
                        Error::new(ErrorKind::Config, "a fleet needs a node that is up").with("lost", node)
                    );
                }
            }
            Change::AddNode(node) if node == self.nodes.len() && node < FLEET_MAX => self.add_new_node()?,
            Change::AddNode(node) => {
                self.set_up(node, true)?;
                for level in 0..self.fleet.levels.len() {
                    self.empty(node, level)?;
                }
                self.nodes[node].engines = self.new_engines()?;
            }
            Change::Upgrade { node, takes_over } => {
                self.node(node)?;
                if !takes_over {
                    self.empty(node, 0)?;
                }
            }
            Change::LoseServer(server) => self.servers(server)?.borrow_mut().lose(server)?,
            Change::AddServer(server) => self.servers(server)?.borrow_mut().bring_back(server)?,
            Change::Reset(tenant) => self.reset(tenant)?,
        }
        Ok(())
    }

    fn node(&mut self, node: usize) -> Result<&mut Node> {
        let nodes = self.nodes.len();
        self.nodes.get_mut(node).ok_or_else(|| {
            Error::new(ErrorKind::Config, "the fleet has no such node at that moment; its first one is 0")
                .with("node", node)
                .with("nodes", nodes)
        })
    }

    fn set_up(&mut self, node: usize, is_up: bool) -> Result<()> {
        let state = self.node(node)?;
        if state.is_up == is_up {
            let said = if is_up { "an added node is up already" } else { "a lost node is down already" };
            return Err(Error::new(ErrorKind::Config, said).with("node", node));
        }
        state.is_up = is_up;
        Ok(())
    }

    fn servers(&self, server: usize) -> Result<&RefCell<Servers>> {
        let servers = self.servers.as_deref().filter(|_| server < self.fleet.servers);
        servers.ok_or_else(|| {
            Error::new(ErrorKind::Config, "the fleet has no such pool server; its first one is 0")
                .with("server", server)
                .with("servers", self.fleet.servers)
        })
    }

    fn empty(&mut self, node: usize, level: usize) -> Result<()> {
        let store = Store::own(&self.fleet.levels[level])?;
        self.nodes[node].levels.replace(level, store);
        Ok(())
    }

    fn up(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.nodes.iter().enumerate().filter(|(_, node)| node.is_up).map(|(number, _)| number)
    }

    /// Every depot forgets the blocks of the tenant's past epoch, wherever they are.
    fn reset(&mut self, tenant: usize) -> Result<()> {
        let is_past = self.tenants.reset(tenant)?;
        for node in &mut self.nodes {
            node.engines.remove(&is_past);
            node.levels.remove(&is_past);
        }
        if let Some(servers) = &self.servers {
            servers.borrow_mut().remove(&is_past);
        }
        Ok(())
    }

    fn request(&mut self, timestamp_ms: u64, blocks: &[u64]) {
        let up: Vec<usize> = self.up().collect();
        let nodes = &self.nodes;
        let Target { node, engine } = self.router.choose(&up, |target| {
            let node = &nodes[target.node];
            let own = node.engines.prefix(target.engine, blocks);
            (own + node.levels.own_prefix(&blocks[own..]), own)
        });
        let node = &mut self.nodes[node];
        node.requests += 1;
        let hits = node.engines.request(engine, blocks);
        node.engine_hits += hits as u64;
        // The depot is asked for what the engine does not have itself.
        node.levels.request(timestamp_ms, &blocks[hits..]);
    }

    fn engine_hits(&self) -> u64 {
        self.nodes.iter().map(|node| node.engine_hits).sum()
    }

    /// Returns the sums over all nodes since the start.
    fn sums(&self) -> Vec<LevelReport> {
        let mut sums = vec![LevelReport::default(); self.all_levels.len()];
        for node in &self.nodes {
            for (sum, level) in sums.iter_mut().zip(node.levels.reports()) {
                sum.hits += level.hits;
                sum.written += level.written;
                sum.evicted += level.evicted;
                sum.over_budget += level.over_budget;
            }
        }
        sums
    }
}

fn check(fleet: &Fleet) -> Result<()> {
    let counts = [
        ("nodes", fleet.nodes),
        ("engines", fleet.engines),
        ("copies", fleet.copies),
        ("windows", fleet.windows),
    ];
    if let Some((what, count)) = counts.into_iter().find(|(_, count)| !(1..=FLEET_MAX).contains(count)) {
        return Err(Error::new(
            ErrorKind::Config,
            "a fleet has 1 to 4096 nodes, engines on each, copies and windows",
        )
        .with("of", what)
        .with("count", count));
    }
    if fleet.levels.is_empty() || fleet.levels.len() + usize::from(fleet.shared.is_some()) > 1 + TIERS_MAX {
        return Err(Error::new(ErrorKind::Config, "a node has a pool and up to 8 tiers"));
    }
    if fleet.shared.is_some() != (1..=FLEET_MAX).contains(&fleet.servers) {
        return Err(Error::new(
            ErrorKind::Config,
            "a shared tier needs 1 to 4096 pool servers, and they need one",
        )
        .with("servers", fleet.servers));
    }
    let moments = || fleet.changes.iter().map(|(at, _)| at);
    if !moments().all(|at| (0.0..=1.0).contains(at)) || !moments().is_sorted() {
        return Err(Error::new(
            ErrorKind::Config,
            "changes of a fleet happen after ascending shares of 0 to 1",
        )
        .with("shares", format!("{:?}", moments().collect::<Vec<_>>())));
    }
    Ok(())
}

/// Simulates a fleet. Returns the result of each part of the trace.
pub fn simulate(trace: &Trace, fleet: &Fleet) -> Result<Vec<Window>> {
    check(fleet)?;
    let mut state = State::new(trace, fleet)?;
    let total = trace.requests().len() * fleet.copies;
    let mut changes = fleet.changes.iter().peekable();
    let (mut windows, mut before) = (Vec::with_capacity(fleet.windows), state.sums());
    let mut engine_hits = 0;
    let (mut references, mut sent, mut blocks) = (0, 0, Vec::new());
    for request in trace.requests() {
        for copy in 0..fleet.copies {
            while let Some((_, change)) = changes.next_if(|(at, _)| *at * total as f64 <= sent as f64) {
                state.change(*change)?;
            }
            blocks.clear();
            blocks.extend(trace.blocks(request).iter().map(|&block| state.tenants.number(copy, block)));
            references += blocks.len() as u64;
            state.request(request.timestamp_ms, &blocks);
            sent += 1;
            if sent * fleet.windows / total > windows.len() {
                let sums = state.sums();
                let since = |(now, then): (&LevelReport, &LevelReport)| LevelReport {
                    hits: now.hits - then.hits,
                    written: now.written - then.written,
                    evicted: now.evicted - then.evicted,
                    over_budget: now.over_budget - then.over_budget,
                };
                windows.push(Window {
                    references: std::mem::take(&mut references),
                    engine_hits: state.engine_hits() - engine_hits,
                    levels: sums.iter().zip(&before).map(since).collect(),
                    requests_max: state.nodes.iter().map(|node| node.requests).max().unwrap_or(0),
                    nodes: state.up().count(),
                });
                state.nodes.iter_mut().for_each(|node| node.requests = 0);
                (before, engine_hits) = (sums, state.engine_hits());
            }
        }
    }
    // What happens after the last request changes no result, but may be wrong.
    changes.try_for_each(|(_, change)| state.change(*change))?;
    Ok(windows)
}
