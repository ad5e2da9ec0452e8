//! Shares the process's file descriptors among the doors, so that connections leave enough for block files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::wire::WireConfig;

/// Descriptors reserved for everything but connections: tiers, listening sockets, HTTP requests, logs. If the limit is
/// below twice this number, half of it is reserved.
const RESERVED: u64 = 512;
/// Descriptors of a local connection: its socket, the duplicate with which the door shuts it down, and its peer's
/// pidfd.
const LOCAL_DESCRIPTORS: u64 = 3;
/// Descriptors of a TLS connection: its TCP socket, and both ends of the socket pair behind it.
const TLS_DESCRIPTORS: u64 = 3;

/// The number of connections that each door may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connections {
    pub(crate) local: usize,
    pub(crate) wire: usize,
}

/// The connections that both doors want.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    local: u64,
    wire: u64,
    wire_each: u64,
}

impl Wanted {
    const fn local_descriptors(self) -> u64 {
        self.local.saturating_mul(LOCAL_DESCRIPTORS)
    }

    const fn wire_descriptors(self) -> u64 {
        self.wire.saturating_mul(self.wire_each)
    }

    const fn descriptors(self) -> u64 {
        self.local_descriptors().saturating_add(self.wire_descriptors()).saturating_add(RESERVED)
    }
}

/// Raises `RLIMIT_NOFILE` to the needs of the doors, up to the hard limit. Returns how many connections fit.
pub(crate) fn reserve(local: usize, wire: Option<&WireConfig>) -> Connections {
    let wanted = Wanted {
        local: local as u64,
        wire: wire.map_or(0, |wire| wire.connections_max as u64),
        wire_each: if wire.is_some_and(|wire| wire.tls.is_some()) { TLS_DESCRIPTORS } else { 1 },
    };
    let limit = raise(wanted.descriptors());
    let fit = fit(limit, wanted);
    if limit < wanted.descriptors() {
        tracing::warn!(
            "{limit} file descriptors are allowed, {} are wanted: at most {} local and {} wire connections are accepted; \
             raise `ulimit -n` for more",
            wanted.descriptors(),
            fit.local,
            fit.wire
        );
    }
    fit
}

/// Raises the soft limit and returns it.
fn raise(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    if current >= wanted {
        return current;
    }
    let raised = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    match setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum: limit.maximum }) {
        Ok(()) => raised,
        Err(error) => {
            tracing::warn!("the limit on file descriptors cannot be raised to {raised}: {error}");
            current
        }
    }
}

/// Returns the connections that fit a limit. If not all do, neither door takes more than half while the other one wants
/// it.
fn fit(limit: u64, wanted: Wanted) -> Connections {
    let budget = limit - RESERVED.min(limit / 2);
    let (local, wire) = (wanted.local_descriptors(), wanted.wire_descriptors());
    let local_part = local.min(budget.saturating_sub(wire.min(budget / 2)));
    let wire_part = wire.min(budget - local_part);
    let count = |part: u64, each: u64, wanted: u64| (part / each).max(1).min(wanted) as usize;
    Connections {
        local: count(local_part, LOCAL_DESCRIPTORS, wanted.local),
        wire: count(wire_part, wanted.wire_each, wanted.wire),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn wanted(local: u64, wire: u64, wire_each: u64) -> Wanted {
        Wanted { local, wire, wire_each }
    }

    fn fits(limit: u64, wanted: Wanted) -> (usize, usize) {
        let Connections { local, wire } = fit(limit, wanted);
        (local, wire)
    }

    #[test]
    fn a_tls_connection_takes_three_descriptors() {
        assert_eq!(wanted(0, 4096, 1).descriptors(), 4096 + RESERVED);
        assert_eq!(wanted(0, 4096, 3).descriptors(), 3 * 4096 + RESERVED);
        assert_eq!(wanted(0, u64::MAX, 3).descriptors(), u64::MAX, "a limit that nobody reaches");
    }

    #[test]
    fn connections_fit_the_limit_and_leave_the_reserve() {
        assert_eq!(fits(u64::MAX, wanted(1024, 4096, 3)), (1024, 4096));
        assert_eq!(fits(wanted(1024, 4096, 1).descriptors(), wanted(1024, 4096, 1)), (1024, 4096));
        assert_eq!(fits(64, wanted(1024, 0, 1)), (10, 0));
        assert_eq!(fits(256, wanted(1024, 4096, 1)), (21, 64), "a door cannot starve the other one");
        assert_eq!(
            fits(256, wanted(1024, 10, 1)),
            (39, 10),
            "what one door does not want, the other one gets"
        );
        assert_eq!(fits(256, wanted(4, 4096, 1)), (4, 116));
        assert_eq!(fits(4, wanted(1024, 4096, 3)), (1, 1), "a door that takes nobody would be none");
    }
}
