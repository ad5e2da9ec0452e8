//! A small server of both protocols of the wire door, in memory, with faults to order.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod foreign;
mod own;
pub(crate) mod waits;

use std::collections::HashMap;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::own::Token;
use parking_lot::{Condvar, Mutex};

/// What is wrong with a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Takes requests and never answers.
    Hung,
    /// Takes nothing off its connections after the hello.
    Deaf,
    /// Says nothing to a hello.
    HungHello,
    /// Answers a get with bytes that are no frame.
    Garbage,
    /// Sends half of a value and closes.
    CloseAmidValue,
    /// Sends half of a value and then nothing.
    HangAmidValue,
    /// Tells another checksum than the block's.
    WrongChecksum,
    /// Changes one bit of a value on its way.
    FlippedBit,
    /// Answers with the id of no request.
    WrongId,
    /// Answers the blocks of a get from the last to the first.
    Backwards,
    /// Sends values that are a byte too long.
    WrongLength,
    /// Answers nothing until the fault is over, and then what it was asked meanwhile; InfiniStore's protocol only.
    Held,
    /// Says of every key that it is there; InfiniStore's protocol only.
    AllThere,
    /// Takes puts (in InfiniStore's protocol the marks of blocks) and stores them when the fault is over.
    LatePuts,
    /// Moves to an epoch and says that it failed; our own protocol only.
    MovesAndFails,
    /// Does not move to an epoch, and says so; our own protocol only.
    NeverMoves,
    /// Is moved by another depot as soon as it is asked to move, once; our own protocol only.
    MovedByAnother,
}

/// What a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    Own,
    /// InfiniStore's protocol; `answers_unknown`: says 400 to what it does not know, else closes.
    Foreign {
        answers_unknown: bool,
    },
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) namespaces: HashMap<NamespaceId, (NamespaceSpec, u32)>,
    pub(crate) roots: HashMap<NamespaceId, NamespaceId>,
    pub(crate) blocks: HashMap<BlockKey, (Vec<u8>, u64)>,
    pub(crate) values: HashMap<Vec<u8>, Vec<u8>>,
}

pub(crate) struct State {
    pub(crate) store: Arc<Mutex<Store>>,
    pub(crate) fault: Mutex<Fault>,
    /// Signalled when the fault changes.
    changed: Condvar,
    pub(crate) token: Option<Token>,
    pub(crate) speaks: Speaks,
    pub(crate) depot: u64,
    pub(crate) connections: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) removes: AtomicU64,
    /// Questions whether a key is there; InfiniStore's protocol only.
    pub(crate) exists: AtomicU64,
    /// What InfiniStore's own server would have crashed of.
    crashed: Mutex<Option<&'static str>>,
    /// Connections that were left hanging so far.
    pub(crate) hanging: AtomicU64,
    /// Puts that were stored late.
    pub(crate) kept_back: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
    stopping: AtomicBool,
}

impl State {
    pub(crate) fn fault(&self) -> Fault {
        *self.fault.lock()
    }

    /// Notes what the real server does not survive.
    fn survives(&self, it_does: bool, what: &'static str) -> Served {
        if it_does {
            return Ok(());
        }
        *self.crashed.lock() = Some(what);
        Err(what.into())
    }

    /// Waits for another fault, or none.
    fn hold_still(&self) {
        let mut fault = self.fault.lock();
        while matches!(*fault, Fault::Deaf | Fault::Held) && !self.stopping.load(Ordering::SeqCst) {
            self.changed.wait(&mut fault);
        }
    }

    /// Keeps a put back until the fault is over.
    fn keep_back(&self) {
        if self.fault() == Fault::LatePuts {
            self.hanging.fetch_add(1, Ordering::SeqCst);
            let mut fault = self.fault.lock();
            while *fault == Fault::LatePuts && !self.stopping.load(Ordering::SeqCst) {
                self.changed.wait(&mut fault);
            }
            drop(fault);
            self.kept_back.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits for the connection's end: what a hung server does.
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

    /// On this address, with what an earlier server held.
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
            connections: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            removes: AtomicU64::new(0),
            exists: AtomicU64::new(0),
            crashed: Mutex::default(),
            hanging: AtomicU64::new(0),
            kept_back: AtomicU64::new(0),
            streams: Mutex::default(),
            stopping: AtomicBool::new(false),
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

    /// Ends all connections, and takes new ones.
    pub(crate) fn disconnect(&self) {
        for stream in self.state.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends at once, as a killed process does; the address and what was held.
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
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
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
            assert_eq!(*self.state.crashed.lock(), None, "InfiniStore's own server would be dead");
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        stream.set_nodelay(true).unwrap();
        state.streams.lock().push(stream.try_clone().unwrap());
        state.connections.fetch_add(1, Ordering::SeqCst);
        let state = Arc::clone(state);
        std::thread::spawn(move || {
            // A client that leaves ends its connection and nothing else.
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

/// Reads until a frame is whole; its operation and body.
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

/// Payload behind a frame.
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
