//! Simulated fleets, as JSON.

use kvdepot_core::replay::{self, Change, Fleet, Route, Window};
use kvdepot_core::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::level::LevelJson;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetJson {
    nodes: usize,
    engines: usize,
    engine_capacity: u64,
    levels: Vec<LevelJson>,
    servers: usize,
    shared: Option<LevelJson>,
    route: RouteJson,
    copies: usize,
    changes: Vec<(f64, ChangeJson)>,
    windows: usize,
    seed: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RouteJson {
    Random,
    RoundRobin,
    LongestPrefix,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChangeJson {
    LoseNode(usize),
    AddNode(usize),
    Upgrade(usize),
    TakeOver(usize),
    LoseServer(usize),
    AddServer(usize),
    Reset(usize),
}

impl FleetJson {
    fn fleet(self) -> Result<Fleet> {
        let change = |change| match change {
            ChangeJson::LoseNode(node) => Change::LoseNode(node),
            ChangeJson::AddNode(node) => Change::AddNode(node),
            ChangeJson::Upgrade(node) => Change::Upgrade { node, takes_over: false },
            ChangeJson::TakeOver(node) => Change::Upgrade { node, takes_over: true },
            ChangeJson::LoseServer(server) => Change::LoseServer(server),
            ChangeJson::AddServer(server) => Change::AddServer(server),
            ChangeJson::Reset(tenant) => Change::Reset(tenant),
        };
        Ok(Fleet {
            nodes: self.nodes,
            engines: self.engines,
            engine_capacity: self.engine_capacity,
            levels: self.levels.into_iter().map(LevelJson::level).collect::<Result<_>>()?,
            servers: self.servers,
            shared: self.shared.map(LevelJson::level).transpose()?,
            route: match self.route {
                RouteJson::Random => Route::Random,
                RouteJson::RoundRobin => Route::RoundRobin,
                RouteJson::LongestPrefix => Route::LongestPrefix,
            },
            copies: self.copies,
            changes: self.changes.into_iter().map(|(at, what)| (at, change(what))).collect(),
            windows: self.windows,
            seed: self.seed,
        })
    }
}

/// Simulates the fleet that the JSON describes, and returns its windows as JSON.
pub(crate) fn run(trace: &replay::Trace, fleet_json: &str) -> Result<String> {
    let fleet: FleetJson = serde_json::from_str(fleet_json).map_err(|e| {
        Error::new(ErrorKind::Config, "the description of a fleet is not valid").with_source(e)
    })?;
    let windows = replay::simulate(trace, &fleet.fleet()?)?;
    let json = |window: &Window| {
        let levels: Vec<_> = window
            .levels
            .iter()
            .map(|level| serde_json::json!({"hits": level.hits, "written": level.written, "evicted": level.evicted}))
            .collect();
        serde_json::json!({
            "references": window.references,
            "engine_hits": window.engine_hits,
            "levels": levels,
            "requests_max": window.requests_max,
            "nodes": window.nodes,
        })
    };
    Ok(serde_json::Value::from(windows.iter().map(json).collect::<Vec<_>>()).to_string())
}
