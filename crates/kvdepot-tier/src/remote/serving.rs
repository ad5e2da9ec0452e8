//! The threads of a server's connections.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_core::limits::REMOTE_PAUSE_MS;
use kvdepot_core::{Error, ErrorKind, Result};

use super::conn::Conn;
use super::connect::connect;
use super::server::{Dialect, Server};
use super::{infini, own};

/// Starts the threads of a server's connections.
pub(super) fn spawn(server: &Arc<Server>) -> Result<Vec<JoinHandle<()>>> {
    (0..server.shared.config.connections)
        .map(|index| {
            let server = Arc::clone(server);
            std::thread::Builder::new()
                .name(format!("kvdepot-remote{index}"))
                .spawn(move || keep_connected(&server, index))
                .map_err(|e| Error::io("cannot start a thread", e))
        })
        .collect()
}

/// Connects, serves until the connection ends, and repeats, with pauses that double while connecting fails.
fn keep_connected(server: &Arc<Server>, index: usize) {
    let (pause_min, pause_max) =
        (Duration::from_millis(REMOTE_PAUSE_MS.0), Duration::from_millis(REMOTE_PAUSE_MS.1));
    let mut pause = pause_min;
    loop {
        server.wait_for_turn(index);
        if server.shared.is_stopping() {
            return;
        }
        match connect(server) {
            Ok(link) => {
                let (error, answered) = match link.dialect {
                    Dialect::Own => {
                        let conn = Arc::new(Conn::new(
                            link.stream,
                            link.requests_in_flight_max,
                            link.depot,
                            link.can_close,
                        ));
                        // Registered before the server counts as up, because the check for silence must find all
                        // connections.
                        server.add_conn(&conn);
                        server.came(link.dialect, link.depot);
                        if server.shared.is_stopping() {
                            // `stop` may have run before it was registered.
                            conn.close(&**server, &Error::new(ErrorKind::Closed, "the tier is closing"));
                        }
                        let end = own::run(server, &conn, link.buffer);
                        server.forget_conn(&conn);
                        end
                    }
                    Dialect::Infini => {
                        let era = server.came(link.dialect, link.depot);
                        infini::run(server, link.stream, era)
                    }
                };
                server.went(&error, true);
                if answered {
                    pause = pause_min;
                }
            }
            Err(error) => server.went(&error, false),
        }
        server.pause(pause);
        pause = (pause * 2).min(pause_max);
    }
}
