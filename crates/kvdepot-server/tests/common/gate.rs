//! A proxy to a server that can be shut: then connections are accepted and no bytes move, as if the server hung.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

#[derive(Default)]
struct State {
    is_shut: bool,
    is_over: bool,
    streams: Vec<TcpStream>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Waits while the gate is shut. Returns `false` if it is taken away.
    fn pass(&self) -> bool {
        let mut state = self.state.lock();
        while state.is_shut && !state.is_over {
            self.changed.wait(&mut state);
        }
        !state.is_over
    }
}

/// A gate in front of a server.
pub(crate) struct Gate {
    pub(crate) at: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Gate {
    pub(crate) fn before(server: SocketAddr) -> Self {
        Self::holding(server, 0)
    }

    /// No byte of its first connection moves, as if the server had stopped for a while.
    pub(crate) fn holding_first(server: SocketAddr) -> Self {
        Self::holding(server, 1)
    }

    fn holding(server: SocketAddr, count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let passing = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            for (number, inner) in listener.incoming().enumerate() {
                let (inner, outer) = (inner.unwrap(), TcpStream::connect(server));
                let Ok(outer) = outer else { continue };
                let mut state = passing.state.lock();
                if state.is_over {
                    return;
                }
                state.streams.extend([inner.try_clone().unwrap(), outer.try_clone().unwrap()]);
                drop(state);
                if number < count {
                    continue;
                }
                for (from, to) in [(inner.try_clone().unwrap(), outer.try_clone().unwrap()), (outer, inner)] {
                    let passing = Arc::clone(&passing);
                    std::thread::spawn(move || pump(&passing, from, to));
                }
            }
        });
        Self { at, shared, acceptor: Some(acceptor) }
    }

    pub(crate) fn set_shut(&self, is_shut: bool) {
        self.shared.state.lock().is_shut = is_shut;
        self.shared.changed.notify_all();
    }
}

fn pump(shared: &Shared, mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = vec![0; 64 << 10];
    while shared.pass() {
        let Ok(count) = from.read(&mut bytes) else { break };
        if count == 0 || !shared.pass() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

impl Drop for Gate {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_over = true;
        for stream in state.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.shared.changed.notify_all();
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.at);
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().unwrap();
        }
    }
}
