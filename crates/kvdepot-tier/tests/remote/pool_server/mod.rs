//! A small in-memory server for both protocols of the wire door, with configurable faults.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod foreign;
mod own;
pub(crate) mod waits;

use std::collections::HashMap;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::own::Token;
use parking_lot::{Condvar, Mutex};

/// Fault of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Takes requests and never answers.
    Hung,
    /// Reads nothing from its connections after the hello.
    Deaf,
    /// Does not answer a hello, nor anything else.
    HungHello,
    /// Answers a get with bytes that are not a frame.
    Garbage,
    /// Sends half of a value and closes.
    CloseAmidValue,
    /// Sends half of a value and then nothing.
    HangAmidValue,
    /// Sends a checksum other than the block's.
    WrongChecksum,
    /// Changes one bit of a value during the transfer.
    FlippedBit,
    /// Answers with an unknown request id.
    WrongId,
    /// Answers the blocks of a get in reverse order.
    Backwards,
    /// Sends values that are a byte too long.
    WrongLength,
    /// Answers nothing until the fault is over, then the requests of that time; InfiniStore's protocol only.
    Held,
    /// Reports every key as present; InfiniStore's protocol only.
    AllThere,
    /// Accepts puts (in InfiniStore's protocol the marks of blocks), and stores them when the fault is over.
    LatePuts,
    /// Reads the blocks of a get, and sends them when the fault is over; our own protocol only.
    LateGets,
    /// Moves to an epoch but reports a failure; our own protocol only.
    MovesAndFails,
    /// Does not move to an epoch, and reports that; our own protocol only.
    NeverMoves,
    /// Another depot moves it as soon as it is asked to move, once; our own protocol only.
    MovedByAnother,
}

/// Protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    Own,
    /// InfiniStore's protocol. `answers_unknown`: answers 400 to unknown requests, otherwise closes.
    Foreign {
        answers_unknown: bool,
    },
}

/// How a server answers that a tier of its own has kept waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Late {
    /// It refuses.
    #[default]
    Refuses,
    /// It opens the namespace, after so long.
    Opens(Duration),
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) namespaces: HashMap<NamespaceId, (NamespaceSpec, u32)>,
    pub(crate) roots: HashMap<NamespaceId, NamespaceId>,
    pub(crate) blocks: HashMap<BlockKey, (Vec<u8>, u64)>,
    pub(crate) values: HashMap<Vec<u8>, Vec<u8>>,
    /// A namespace that is not opened; our own protocol only.
    pub(crate) refused: Option<NamespaceId>,
    /// Namespaces about which a tier of the server would have to be asked, which hangs: on each connection one of them is
    /// answered late, and the next one never; our own protocol only.
    pub(crate) slow: Vec<NamespaceId>,
    pub(crate) late: Late,
}

pub(crate) struct State {
    pub(crate) store: Arc<Mutex<Store>>,
    pub(crate) fault: Mutex<Fault>,
    /// Signalled when the fault changes.
    changed: Condvar,
    pub(crate) token: Option<Token>,
    pub(crate) speaks: Speaks,
    pub(crate) depot: u64,
    /// Requests that a later connection may have in flight; our own protocol only.
    pub(crate) in_flight_max: AtomicU32,
    pub(crate) connections: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) removes: AtomicU64,
    /// Number of requests whether a key is present; InfiniStore's protocol only.
    pub(crate) exists: AtomicU64,
    /// Reason for which InfiniStore's own server would have crashed, or ours would have closed the connection.
    crashed: Mutex<Option<&'static str>>,
    /// Number of connections left hanging so far.
    pub(crate) hanging: AtomicU64,
    /// Number of requests that were delayed.
    pub(crate) kept_back: AtomicU64,
    /// What the requests are about that were delayed, or still are.
    held: Mutex<Vec<String>>,
    streams: Mutex<Vec<TcpStream>>,
    stopping: AtomicBool,
    /// Whether no more connections are accepted.
    is_shut: AtomicBool,
}

impl State {
    pub(crate) fn fault(&self) -> Fault {
        *self.fault.lock()
    }

    /// Records requests that the real server does not survive.
    fn survives(&self, it_does: bool, what: &'static str) -> Served {
        if it_does {
            return Ok(());
        }
        *self.crashed.lock() = Some(what);
        Err(what.into())
    }

    /// Waits for another fault, or for none.
    fn hold_still(&self) {
        let mut fault = self.fault.lock();
        while matches!(*fault, Fault::Deaf | Fault::Held) && !self.stopping.load(Ordering::SeqCst) {
            self.changed.wait(&mut fault);
        }
    }

    /// Returns whether a request about this has been delayed.
    pub(crate) fn has_held(&self, what: &str) -> bool {
        self.held.lock().iter().any(|held| held.contains(what))
    }

    /// Delays a put or the answer to a get until this fault is over.
    fn keep_back(&self, late: Fault, what: String) {
        if self.fault() == late {
            self.held.lock().push(what);
            self.hanging.fetch_add(1, Ordering::SeqCst);
            let mut fault = self.fault.lock();
            while *fault == late && !self.stopping.load(Ordering::SeqCst) {
                self.changed.wait(&mut fault);
            }
            drop(fault);
            self.kept_back.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits for the connection's end, like a hung server.
    fn hang(&self, mut stream: &TcpStream) {
        self.hanging.fetch_add(1, Ordering::SeqCst);
        let mut nothing = [0; 4096];
        loop {
            let came = stream.read(&mut nothing);
            if self.stopping.load(Ordering::SeqCst) || !came.is_ok_and(|count| count > 0) {
                return;
            }
        }
    }
}

/// A running server.
pub(crate) struct PoolServer {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

impl PoolServer {
    pub(crate) fn start(speaks: Speaks, token: Option<&str>) -> Self {
        Self::start_on("127.0.0.1:0".parse().unwrap(), speaks, token, Arc::default())
    }

    pub(crate) fn own() -> Self {
        Self::start(Speaks::Own, None)
    }

    pub(crate) fn foreign() -> Self {
        Self::start(Speaks::Foreign { answers_unknown: true }, None)
    }

    /// Starts on this address, with the content of an earlier server.
    pub(crate) fn start_on(
        address: SocketAddr,
        speaks: Speaks,
        token: Option<&str>,
        store: Arc<Mutex<Store>>,
    ) -> Self {
        static DEPOTS: AtomicU64 = AtomicU64::new(1);
        let listener = bind(address);
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            store,
            fault: Mutex::new(Fault::None),
            changed: Condvar::new(),
            token: token.map(|token| Token::new(token.as_bytes()).unwrap()),
            speaks,
            depot: DEPOTS.fetch_add(1, Ordering::SeqCst),
            in_flight_max: AtomicU32::new(16),
            connections: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            removes: AtomicU64::new(0),
            exists: AtomicU64::new(0),
            crashed: Mutex::default(),
            hanging: AtomicU64::new(0),
            kept_back: AtomicU64::new(0),
            held: Mutex::default(),
            streams: Mutex::default(),
            stopping: AtomicBool::new(false),
            is_shut: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&state);
        let acceptor = std::thread::spawn(move || accept(&listener, &accepting));
        Self { address, state, acceptor: Some(acceptor) }
    }

    pub(crate) fn name(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.state.fault.lock() = fault;
        self.state.changed.notify_all();
    }

    /// Ends all connections, and accepts new ones.
    pub(crate) fn disconnect(&self) {
        for stream in self.state.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Accepts no more connections; those that are open live on. Another server may take the address.
    pub(crate) fn shut(&mut self) {
        self.state.is_shut.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().unwrap();
        }
    }

    /// Ends the latest connection.
    pub(crate) fn disconnect_one(&self) {
        let _ = self.state.streams.lock().pop().unwrap().shutdown(Shutdown::Both);
    }

    /// Stops immediately, like a killed process. Returns the address and the content.
    pub(crate) fn kill(mut self) -> (SocketAddr, Arc<Mutex<Store>>) {
        self.stop();
        (self.address, Arc::clone(&self.state.store))
    }

    fn stop(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        self.set(Fault::None);
        for stream in self.state.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(acceptor) = self.acceptor.take() {
            // Wakes it.
            let _ = TcpStream::connect(self.address);
            acceptor.join().unwrap();
        }
        for stream in self.state.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for PoolServer {
    fn drop(&mut self) {
        self.stop();
        if !std::thread::panicking() {
            assert_eq!(
                *self.state.crashed.lock(),
                None,
                "a real server would be dead, or closed the connection"
            );
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.stopping.load(Ordering::SeqCst) || state.is_shut.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        stream.set_nodelay(true).unwrap();
        state.streams.lock().push(stream.try_clone().unwrap());
        state.connections.fetch_add(1, Ordering::SeqCst);
        let state = Arc::clone(state);
        std::thread::spawn(move || {
            // A client that disconnects ends its connection, and nothing else.
            let _ = serve(&stream, &state);
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}

pub(crate) type Served<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn serve(stream: &TcpStream, state: &State) -> Served {
    if state.fault() == Fault::HungHello {
        state.hang(stream);
        return Ok(());
    }
    match state.speaks {
        Speaks::Own => own::serve(stream, state),
        Speaks::Foreign { answers_unknown } => foreign::serve(stream, state, answers_unknown),
    }
}

/// Reads until a frame is complete. Returns its operation and body.
fn next(mut stream: &TcpStream, buffer: &mut FrameBuffer) -> Served<Option<(u8, Vec<u8>)>> {
    loop {
        if let Some(frame) = buffer.next_frame()? {
            return Ok(Some((frame.op, frame.body.to_vec())));
        }
        if buffer.read_with(|room| stream.read(room))? == 0 {
            return Ok(None);
        }
    }
}

/// Reads the payload after a frame.
fn payload(mut stream: &TcpStream, buffer: &mut FrameBuffer, bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    let had = buffer.take_payload(&mut out);
    stream.read_exact(&mut out[had..])?;
    Ok(out)
}

/// Listens at this address. A connection of another process may have its port for a moment.
fn bind(address: SocketAddr) -> TcpListener {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        match TcpListener::bind(address) {
            Ok(listener) => return listener,
            Err(error) => assert!(std::time::Instant::now() < end, "{address}: {error}"),
        }
        std::thread::yield_now();
    }
}
