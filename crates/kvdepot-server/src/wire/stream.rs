//! A connection's socket: bytes go straight between it and slots, and every wait has a deadline (P2).

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvdepot_core::limits::IO_VECTORS_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::direct::{ReadSlot, WriteSlot};
use kvdepot_depot::values::{Value, ValueSlot};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::limits::READ_BYTES;
use smallvec::SmallVec;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::counters::Counters;
use super::socket::{Socket, Wake};
use super::spare;

/// The slowest accepted rate of a peer after its initial patience.
const BYTES_PER_S_MIN: u64 = 1 << 20;
/// Number of bytes after which a connection yields its thread.
const TURN_BYTES: usize = 4 << 20;
/// Payload up to this size is copied from the connection's buffer, which one call fills for many requests.
const BULK_BYTES_MAX: usize = READ_BYTES / 4;
/// Payload from this size on has probably not arrived completely.
const LARGE_BYTES: usize = 64 << 10;
/// Bytes read at a time when payload is discarded.
const DISCARD_BYTES: usize = 64 << 10;

/// Memory to receive into.
pub(super) trait Sink {
    fn pieces(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]>;
}

impl Sink for WriteSlot {
    fn pieces(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        self.io_slices_mut(start, end)
    }
}

impl Sink for ValueSlot {
    fn pieces(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        self.io_slices_mut(start, end)
    }
}

/// Memory to send from.
pub(super) trait Source: Sync {
    fn len(&self) -> usize;
    fn pieces(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]>;
}

impl Source for ReadSlot {
    fn len(&self) -> usize {
        self.block_bytes()
    }

    fn pieces(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.io_slices(start, end)
    }
}

impl Source for Value {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn pieces(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.io_slices(start, end)
    }
}

/// An answer with its payload.
pub(super) struct Answer<'a> {
    pub(super) head: &'a [u8],
    pub(super) payload: Option<&'a dyn Source>,
}

impl Answer<'_> {
    fn len(&self) -> usize {
        self.head.len() + self.payload.map_or(0, Source::len)
    }
}

/// What is known about the next bytes of a payload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum More {
    /// The runtime reported them, or was not asked yet.
    Told,
    /// They arrived before the runtime reported them.
    Near,
    /// The patience has ended: too few bytes for a notification have arrived, or none.
    Late,
}

/// A socket that one task reads and many tasks send answers to in turn.
#[derive(Debug)]
pub(super) struct Stream {
    socket: Socket,
    /// Held while sending.
    turn: Mutex<()>,
    /// Whether an answer was cut off: later bytes would be read as its rest.
    broken: AtomicBool,
    stall: Duration,
    counters: Arc<Counters>,
}

fn closed(what: &str) -> Error {
    Error::new(ErrorKind::Closed, what.to_owned())
}

fn late(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, what.to_owned())
}

fn stopped() -> Error {
    late("a peer stopped in the middle of a message")
}

impl Stream {
    pub(super) fn new(socket: Socket, stall: Duration, counters: Arc<Counters>) -> Result<Self> {
        socket.prepare()?;
        Ok(Self { socket, turn: Mutex::new(()), broken: AtomicBool::new(false), stall, counters })
    }

    /// Returns the deadline of a message of `bytes` that begins now.
    pub(super) fn deadline(&self, bytes: u64) -> Instant {
        Instant::now() + self.stall + Duration::from_millis(bytes * 1000 / BYTES_PER_S_MIN)
    }

    /// Reads available bytes into the buffer, waiting for them; returns 0 when the peer has closed.
    pub(super) async fn fill(&self, buffer: &mut FrameBuffer, deadline: Option<Instant>) -> Result<usize> {
        loop {
            spare::lend(buffer);
            match buffer.read_with(|room| self.socket.try_read(room)) {
                Ok(count) => return Ok(count),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    spare::take_back(buffer);
                    self.readable(deadline).await?;
                }
                Err(e) => return Err(Error::io("a connection broke", e)),
            }
        }
    }

    async fn readable(&self, deadline: Option<Instant>) -> Result<()> {
        let ready = match deadline {
            None => self.socket.readable().await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline, self.socket.readable()).await.map_err(|_| stopped())?
            }
        };
        ready.map_err(|e| Error::io("a connection broke", e))
    }

    /// Receives `bytes` of payload into memory. Calls `each` for every received piece.
    pub(super) async fn receive<S: Sink>(
        &self,
        buffer: &mut FrameBuffer,
        sink: &mut S,
        bytes: usize,
        mut each: impl FnMut(&S, usize, usize),
    ) -> Result<()> {
        let deadline = self.deadline(bytes as u64);
        let (mut at, mut turn) = (0, 0);
        // Payload too small to be worth its own call is read together with what follows it, and copied.
        while bytes <= BULK_BYTES_MAX && buffer.len() < bytes {
            if self.fill(buffer, Some(deadline)).await? == 0 {
                return Err(closed("a peer left in the middle of its payload"));
            }
        }
        while at < bytes && !buffer.is_empty() {
            let mut pieces = sink.pieces(at, bytes);
            let Some(piece) = pieces.first_mut() else { break };
            let count = buffer.take_payload(piece);
            drop(pieces);
            each(sink, at, at + count);
            at += count;
        }
        let mut wake = Wake::any(&self.socket);
        let mut more = More::Told;
        while at < bytes {
            if bytes - at >= LARGE_BYTES {
                wake.at(bytes - at);
            }
            let outcome = {
                let mut pieces = sink.pieces(at, bytes);
                pieces.truncate(IO_VECTORS_MAX);
                match more {
                    More::Told => self.socket.try_read_vectored(&mut pieces),
                    More::Near | More::Late => self.socket.read_untold(&mut pieces),
                }
            };
            match outcome {
                Ok(0) => return Err(closed("a peer left in the middle of its payload")),
                Ok(count) => {
                    more = More::Told;
                    each(sink, at, at + count);
                    at += count;
                    turn += count;
                    if turn >= TURN_BYTES && at < bytes {
                        turn = 0;
                        tokio::task::yield_now().await;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && more == More::Late => {
                    return Err(stopped());
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    wake.at(bytes - at);
                    more = self.wait_for_more(&wake, deadline).await?;
                }
                Err(e) => return Err(Error::io("a connection broke", e)),
            }
        }
        self.counters.received_bytes.inc_by(bytes as u64);
        Ok(())
    }

    async fn wait_for_more(&self, wake: &Wake<'_>, deadline: Instant) -> Result<More> {
        if wake.comes_soon() {
            return Ok(More::Near);
        }
        match self.readable(Some(deadline.min(Instant::now() + self.stall))).await {
            Err(e) if e.kind() == ErrorKind::Timeout && Instant::now() < deadline => Ok(More::Late),
            outcome => outcome.map(|()| More::Told),
        }
    }

    /// Discards payload, so that the next request is found after it.
    pub(super) async fn discard(&self, buffer: &mut FrameBuffer, bytes: u64) -> Result<()> {
        let deadline = self.deadline(bytes);
        let mut left = bytes - buffer.skip_payload(bytes);
        let mut scratch = if left > 0 { vec![0; DISCARD_BYTES] } else { Vec::new() };
        while left > 0 {
            let room = scratch.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match self.socket.try_read(&mut scratch[..room]) {
                Ok(0) => return Err(closed("a peer left in the middle of its payload")),
                Ok(count) => left -= count as u64,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable(Some(deadline.min(Instant::now() + self.stall))).await?;
                }
                Err(e) => return Err(Error::io("a connection broke", e)),
            }
        }
        Ok(())
    }

    /// Sends an answer and its payload together when its turn has come.
    pub(super) async fn send(&self, head: &[u8], payload: Option<&dyn Source>) -> Result<()> {
        self.send_all(&[Answer { head, payload }]).await
    }

    /// Sends answers together when their turn has come.
    pub(super) async fn send_all(&self, answers: &[Answer<'_>]) -> Result<()> {
        let _turn = self.turn.lock().await;
        if self.broken.load(Ordering::Acquire) {
            return Err(closed("an answer before this one was cut off"));
        }
        // Until everything is sent: a task cancelled in between leaves an unusable connection.
        self.broken.store(true, Ordering::Release);
        let payload_bytes: usize = answers.iter().filter_map(|answer| answer.payload).map(Source::len).sum();
        let all: usize = answers.iter().map(Answer::len).sum();
        let deadline = self.deadline(all as u64);
        // The answer being sent, and how much of it was sent.
        let (mut index, mut at, mut turn) = (0, 0, 0);
        while index < answers.len() {
            let outcome = self.socket.try_write_vectored(&next_pieces(&answers[index..], at));
            match outcome {
                Ok(count) => {
                    at += count;
                    while let Some(answer) = answers.get(index).filter(|answer| answer.len() <= at) {
                        (index, at) = (index + 1, at - answer.len());
                    }
                    turn += count;
                    if turn >= TURN_BYTES && index < answers.len() {
                        turn = 0;
                        tokio::task::yield_now().await;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let patience = deadline.min(Instant::now() + self.stall);
                    tokio::time::timeout_at(patience, self.socket.writable())
                        .await
                        .map_err(|_| late("a peer does not take its answer"))?
                        .map_err(|e| Error::io("a connection broke", e))?;
                }
                Err(e) => return Err(Error::io("a connection broke", e)),
            }
        }
        self.counters.sent_bytes.inc_by(payload_bytes as u64);
        self.broken.store(false, Ordering::Release);
        Ok(())
    }
}

/// Returns the pieces for one call that sends some answers, of whose first one `sent` bytes were sent.
fn next_pieces<'a>(answers: &'a [Answer<'_>], sent: usize) -> SmallVec<[IoSlice<'a>; 8]> {
    let (mut pieces, mut skip) = (SmallVec::new(), sent);
    for Answer { head, payload } in answers {
        if pieces.len() >= IO_VECTORS_MAX {
            break;
        }
        if skip < head.len() {
            pieces.push(IoSlice::new(&head[skip..]));
        }
        if let Some(payload) = payload {
            pieces.extend(payload.pieces(skip.saturating_sub(head.len()), payload.len()));
        }
        skip = 0;
    }
    pieces.truncate(IO_VECTORS_MAX);
    pieces
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::mpsc;

    use rustix::io::ioctl_fionread;
    use tokio::net::TcpListener;
    use tokio::task::spawn_blocking;

    use super::*;

    const STALL: Duration = Duration::from_secs(5);
    /// Too little to wake a reader of `BYTES`.
    static PART: [u8; 20_000] = [7; 20_000];
    const BYTES: usize = 20 << 20;

    impl Sink for Vec<u8> {
        fn pieces(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
            SmallVec::from_iter([IoSliceMut::new(&mut self[start..end])])
        }
    }

    /// The other end of a stream.
    struct Peer {
        socket: TcpStream,
        /// The stream's end, to see what has arrived.
        seen: OwnedFd,
    }

    impl Peer {
        fn write(&mut self, bytes: &[u8]) {
            self.socket.write_all(bytes).unwrap();
        }

        /// Writes too little to wake the reader, and waits until it has arrived.
        fn write_part(&mut self) {
            let wanted = ioctl_fionread(&self.seen).unwrap() + PART.len() as u64;
            self.write(&PART);
            while ioctl_fionread(&self.seen).unwrap() < wanted {
                std::thread::yield_now();
            }
        }
    }

    async fn pair() -> (Stream, Peer) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().await.unwrap().0;
        let seen = accepted.as_fd().try_clone_to_owned().unwrap();
        let stream = Stream::new(Socket::Tcp(accepted), STALL, Arc::new(Counters::new())).unwrap();
        (stream, Peer { socket, seen })
    }

    /// Time is simulated: it advances as soon as nothing else can happen, and stands still while a blocking task runs,
    /// so that none passes while bytes are in flight.
    async fn send_slowly(mut peer: Peer, parts: usize) -> Peer {
        for _ in 0..parts {
            tokio::time::sleep(STALL * 2 / 3).await;
            let written = spawn_blocking(move || {
                peer.write_part();
                peer
            });
            peer = written.await.unwrap();
        }
        peer
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_moves_is_waited_for_though_it_does_not_wake_the_reader() {
        let (stream, peer) = pair().await;
        let (mut buffer, mut received) = (FrameBuffer::requests(), vec![0; BYTES]);
        let (received_all, until_received) = mpsc::channel::<()>();
        let send = async {
            let mut peer = send_slowly(peer, 5).await;
            let written = spawn_blocking(move || {
                peer.write(&vec![7; BYTES - 5 * PART.len()]);
                // The other side is dropped after everything was received, or after a failure.
                let _ = until_received.recv();
                peer
            });
            written.await.unwrap()
        };
        // Fails immediately: what is being sent would never be received.
        let receive = async {
            let received_all = received_all;
            stream.receive(&mut buffer, &mut received, BYTES, |_, _, _| {}).await.unwrap();
            drop(received_all);
        };
        let begun = Instant::now();
        tokio::join!(receive, send);
        assert!(received.iter().all(|&byte| byte == 7));
        assert!(begun.elapsed() >= STALL * 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_stops_is_left() {
        let (stream, peer) = pair().await;
        let (mut buffer, mut received) = (FrameBuffer::requests(), vec![0; BYTES]);
        let receive = stream.receive(&mut buffer, &mut received, BYTES, |_, _, _| {});
        let begun = Instant::now();
        let (outcome, _peer) = tokio::join!(receive, send_slowly(peer, 1));
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(begun.elapsed() < STALL * 3);
    }
}
