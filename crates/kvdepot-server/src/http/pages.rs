//! The pages of every depot. Each door decides by what a page reveals who may read it.

use hyper::{Method, StatusCode};
use kvdepot_depot::Depot;
use prometheus_client::registry::Registry;

use super::answer::{Answer, json};
use super::{metrics, page, questions};
use crate::logging::recent;

/// A page. A new one needs a line in [`Page::ALL`], in [`Page::entry`] and in [`Page::answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    Root,
    Config,
    Errors,
    Health,
    History,
    Metrics,
    Misses,
    Namespaces,
    Status,
    Why,
}

/// What a page reveals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reveals {
    /// That the depot lives.
    Life,
    /// Nothing of the depot: it reads other pages.
    Frame,
    /// Numbers. Namespaces are named only to those who may read [`Reveals::State`].
    Numbers,
    /// The configuration and state of the depot.
    State,
    /// Single requests and blocks, and all facts of namespaces, which may be secret.
    Blocks,
}

/// What pages tell about.
pub(crate) struct Subject<'a> {
    pub(crate) depot: &'a Depot,
    /// The network listener's series of metrics.
    pub(crate) series: Option<&'a Registry>,
    /// Whether the reader may know the names of namespaces.
    pub(crate) names_namespaces: bool,
}

impl Page {
    /// In the order in which they are listed to clients.
    pub(crate) const ALL: [Self; 10] = [
        Self::Root,
        Self::Config,
        Self::Errors,
        Self::Health,
        Self::History,
        Self::Metrics,
        Self::Misses,
        Self::Namespaces,
        Self::Status,
        Self::Why,
    ];
    /// The method of all of them: they change nothing.
    pub(crate) const METHOD: Method = Method::GET;

    /// Returns the page at a path.
    pub(crate) fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|page| page.path() == path)
    }

    pub(crate) const fn path(self) -> &'static str {
        self.entry().0
    }

    pub(crate) const fn reveals(self) -> Reveals {
        self.entry().1
    }

    const fn entry(self) -> (&'static str, Reveals) {
        match self {
            Self::Root => ("/", Reveals::Frame),
            Self::Config => ("/config", Reveals::State),
            Self::Errors => ("/errors", Reveals::State),
            Self::Health => ("/health", Reveals::Life),
            Self::History => ("/history", Reveals::State),
            Self::Metrics => ("/metrics", Reveals::Numbers),
            Self::Misses => ("/misses", Reveals::Blocks),
            Self::Namespaces => ("/namespaces", Reveals::Blocks),
            Self::Status => ("/status", Reveals::State),
            Self::Why => ("/why", Reveals::Blocks),
        }
    }

    /// Answers a request for it.
    pub(crate) async fn answer(self, subject: &Subject<'_>, query: Option<&str>) -> Answer {
        let depot = subject.depot;
        match self {
            Self::Root => page::page(),
            Self::Config => json(StatusCode::OK, &page::config(depot.config())),
            Self::Errors => json(StatusCode::OK, &recent::list()),
            Self::Health => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
            Self::History => json(StatusCode::OK, &depot.direct().history()),
            Self::Metrics if subject.names_namespaces => {
                metrics::metrics(subject.series, depot.direct().stats())
            }
            Self::Metrics => metrics::public_metrics(subject.series, depot.direct().stats()),
            Self::Misses => questions::misses(&depot.direct(), query),
            Self::Namespaces => questions::namespaces(&depot.direct(), query),
            // Everything that `kvdepot stat` shows.
            Self::Status => json(StatusCode::OK, &depot.direct().stats()),
            Self::Why => questions::why(depot.direct(), query).await,
        }
    }
}
