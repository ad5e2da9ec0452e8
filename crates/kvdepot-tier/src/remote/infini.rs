//! One connection to an InfiniStore server. It sends one request at a time, because the server mixes up the answers of
//! several.

pub(super) mod epochs;

use std::cell::Cell;
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{REMOTE_FOREIGN_DISCARD_TIMEOUTS, REMOTE_FOREIGN_VALUE_BYTES_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::IoBuf;
use kvdepot_io::checksum::crc64_slot;
use kvdepot_wire::infini::{Reply, ReplyReader, Request, TcpOp, code};

use super::job::{Job, Opened, What};
use super::parting::Parting;
use super::sending::send_all;
use super::server::Server;
use super::socket::Socket;
use super::tcp::again;
use super::value::{self, HEADER_BYTES, MARK, block_name, mark_name};
use crate::{Done, Written};

/// Number of requests that a connection takes at a time: they would wait for each other here, while other connections
/// are idle.
const BATCH_MAX: usize = 1;
/// Bytes read at a time when they are discarded.
const SCRATCH_BYTES: usize = 64 << 10;

/// A failed request, and whether the connection is still in sync.
enum Failed {
    /// The server reported an error, or the bytes are wrong; the connection is fine.
    Answer(Error),
    /// Like [`Failed::Answer`] after this many more bytes were received: the server does not survive a client that
    /// disconnects in the middle of a value.
    Amid(Error, u64),
    /// The connection is lost.
    Lost(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Lost(error)
    }
}

type Outcome<T> = Result<T, Failed>;

/// Serves until the connection ends. Returns the reason, and whether the server answered anything before.
pub(super) fn run(server: &Server, stream: Socket, era: u64) -> (Error, bool) {
    let (error, answered, doubtful) = serve_until_over(server, &stream, era);
    if let Some(key) = doubtful {
        // The server may have received the write that was sent before the connection was lost, and may still store it.
        let _ = stream.end_sending();
        server.part(Parting::new(Arc::new(stream), vec![key]));
    }
    (error, answered)
}

/// Also returns the block that was being written at the end.
fn serve_until_over(server: &Server, stream: &Socket, era: u64) -> (Error, bool, Option<BlockKey>) {
    let mut talk = Talk::new(server, stream, Instant::now(), server.shared.config.timeout);
    let mut answered = false;
    let silences = server.silences();
    loop {
        // Nothing reads while no request is in flight: a connection that the server has closed must not take a request.
        let is_over = || server.silences() != silences || server.era() != era || stream.is_over();
        let jobs = server.take(is_over, BATCH_MAX);
        if jobs.is_empty() {
            let error = if server.shared.is_stopping() {
                Error::new(ErrorKind::Closed, "the tier is closing")
            } else if server.silences() != silences {
                server.too_late()
            } else if server.era() != era {
                server.is_replaced()
            } else {
                talk.bad(ErrorKind::Unavailable, "a remote server closed the connection")
            };
            return (error, answered, None);
        }
        let is_write = jobs.iter().any(Job::is_write);
        let mut lost: Option<Error> = None;
        for job in jobs {
            if let Some(error) = &lost {
                job.fail(error.clone());
            } else if job.deadline <= Instant::now() {
                job.fail(server.too_late());
            } else {
                lost = talk.serve(job);
                answered |= lost.is_none();
            }
        }
        if is_write {
            server.write_ended();
        }
        if let Some(error) = lost {
            if error.kind() == ErrorKind::Timeout {
                server.fell_silent();
            }
            return (error, answered, talk.doubtful.take());
        }
    }
}

/// Questions and answers, one at a time.
struct Talk<'a> {
    server: &'a Server,
    stream: &'a Socket,
    /// The caller's deadline: no other question begins after it.
    deadline: Instant,
    /// How long an answer may take after the deadline, so that the connection stays in sync.
    grace: Duration,
    /// Time by which the question in flight must be answered, or the connection ends.
    until: Instant,
    /// A block whose write was lost with the connection.
    doubtful: Option<BlockKey>,
    /// Notifies the caller that the deadline has passed.
    late: Option<Box<dyn FnOnce(Error)>>,
}

/// A block's memory, until it is used or its owner was told that it will not be.
type Lent = Cell<Option<IoBuf>>;

impl<'a> Talk<'a> {
    const fn new(server: &'a Server, stream: &'a Socket, deadline: Instant, grace: Duration) -> Self {
        Self { server, stream, deadline, grace, until: deadline, doubtful: None, late: None }
    }

    /// Does a job. Returns the reason if the connection has ended.
    fn serve(&mut self, job: Job) -> Option<Error> {
        self.deadline = job.deadline;
        match job.what {
            What::Exists { keys, done } => self.answer(done, None, |talk, _| {
                keys.iter().map(|key| talk.exists(mark_name(key).as_bytes())).collect()
            }),
            What::Get { key, into, sure, done } => {
                self.answer(done, Some(into), |talk, into| talk.get(&key, into, sure))
            }
            // The caller may store or remove the same block next, which must not overlap with the rest of this job
            // (P1).
            What::Put { key, from, done } => {
                let outcome = self.put_block(&key, from);
                if matches!(outcome, Err(Failed::Lost(_))) {
                    self.doubtful = Some(key);
                    self.server.shared.beliefs.writing.lock().doubt(&[key]);
                }
                self.end(Some(done), outcome)
            }
            What::Remove { keys, done } => {
                let outcome = keys.iter().try_for_each(|key| self.remove(key));
                self.end(Some(done), outcome)
            }
            What::Open { spec, done } => self.answer(done, None, |talk, _| {
                talk.epoch(&spec).map(|epoch| Opened { namespace: spec.id(epoch), epoch })
            }),
            What::Close { done, .. } => self.end(Some(done), Ok(())),
            What::SetEpoch { spec, epoch, done, .. } => {
                self.answer(done, None, |talk, _| talk.set_epoch(&spec, epoch))
            }
        }
    }

    /// Runs `work` and reports its result to `done`: by the deadline, unless a byte arrives in the memory at that
    /// moment.
    fn answer<T: 'static>(
        &mut self,
        done: Done<T>,
        lent: Option<IoBuf>,
        work: impl FnOnce(&mut Self, &Lent) -> Outcome<T>,
    ) -> Option<Error> {
        let asker = Rc::new((Cell::new(Some(done)), Lent::new(lent)));
        let waiting = Rc::clone(&asker);
        self.late = Some(Box::new(move |error| {
            drop(waiting.1.take());
            if let Some(done) = waiting.0.take() {
                done(Err(error));
            }
        }));
        let outcome = work(self, &asker.1);
        self.late = None;
        drop(asker.1.take());
        self.end(asker.0.take(), outcome)
    }

    /// Notifies the caller, if that was not done, and synchronises the connection again. Returns the reason if it has
    /// ended.
    fn end<T>(&mut self, done: Option<Done<T>>, outcome: Outcome<T>) -> Option<Error> {
        let (outcome, rest, lost) = match outcome {
            Ok(value) => (Ok(value), 0, None),
            Err(Failed::Answer(error)) => (Err(error), 0, None),
            Err(Failed::Amid(error, rest)) => (Err(error), rest, None),
            Err(Failed::Lost(error)) => (Err(error.clone()), 0, Some(error)),
        };
        if let Some(done) = done {
            done(outcome);
        }
        lost.or_else(|| self.discard(rest).err())
    }

    /// Called before each question, except those that finish what the previous one began.
    fn turn(&self) -> Outcome<()> {
        if self.server.shared.is_stopping() {
            return Err(Failed::Lost(self.bad(ErrorKind::Closed, "the tier is closing")));
        }
        if Instant::now() >= self.deadline {
            return Err(Failed::Answer(self.server.too_late()));
        }
        Ok(())
    }

    fn begin(&mut self) {
        self.until = self.deadline.max(Instant::now() + self.grace);
    }

    /// Returns the time by which a call that begins now must have moved a byte, or the connection ends.
    fn quiet(&self) -> Instant {
        self.until.min(Instant::now() + self.server.shared.config.timeout)
    }

    /// Sends this question completely.
    fn send(&self, front: &[u8], bodies: &[IoBuf]) -> Result<()> {
        let bound = || self.stream.bound(self.quiet());
        bound().and_then(|()| send_all(self.stream, front, bodies, bound)).map_err(|e| self.broke(e))
    }

    /// Receives bytes. Returns `None` if nothing arrived by `patience`; the connection stays usable.
    fn receive(
        &self,
        patience: Option<Instant>,
        mut read: impl FnMut(&Socket) -> std::io::Result<usize>,
    ) -> Result<Option<usize>> {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        let quiet = self.quiet();
        loop {
            let now = Instant::now();
            if patience.is_some_and(|patience| now >= patience) {
                return Ok(None);
            }
            let next = patience.map_or(quiet, |patience| patience.min(quiet));
            self.stream.bound(next).map_err(|e| self.broke(e))?;
            match again(|| read(self.stream)) {
                // The system's timer may fire a little early.
                Err(e) if matches!(e.kind(), TimedOut | WouldBlock) && Instant::now() < quiet => {}
                Ok(0) => {
                    return Err(self.bad(
                        ErrorKind::Unavailable,
                        "a remote server closed the connection before it had answered",
                    ));
                }
                outcome => return outcome.map(Some).map_err(|e| self.broke(e)),
            }
        }
    }

    fn bad(&self, kind: ErrorKind, what: &str) -> Error {
        Error::new(kind, what.to_owned()).with("server", &self.server.address)
    }

    fn refused(&self, code: i32) -> Error {
        let kind = match code {
            code::NOT_FOUND => ErrorKind::NotFound,
            code::OUT_OF_MEMORY => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        self.bad(kind, "a remote server refused a request").with("code", code)
    }

    fn broke(&self, e: std::io::Error) -> Error {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        if matches!(e.kind(), TimedOut | WouldBlock) {
            return self.server.too_late();
        }
        self.bad(ErrorKind::Unavailable, "a connection to a remote server broke").with_source(e)
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Reply> {
        let mut frame = Vec::new();
        request.encode(&mut frame)?;
        self.begin();
        self.send(&frame, &[])?;
        self.reply(request)
    }

    fn reply(&mut self, request: &Request<'_>) -> Result<Reply> {
        let mut reader = ReplyReader::new(request);
        loop {
            let patience = self.late.is_some().then_some(self.deadline);
            match self.receive(patience, |mut stream| stream.read(reader.room()))? {
                Some(count) => {
                    if let Some(reply) = reader.advance(count)? {
                        return Ok(reply);
                    }
                }
                None => {
                    if let Some(late) = self.late.take() {
                        late(self.server.too_late());
                    }
                }
            }
        }
    }

    fn exists(&mut self, name: &[u8]) -> Outcome<bool> {
        self.turn()?;
        match self.ask(&Request::Exists(name))? {
            Reply::Number(0) => Ok(true),
            Reply::Number(1) => Ok(false),
            _ => Err(Failed::Lost(
                self.bad(ErrorKind::Protocol, "a remote server does not speak InfiniStore's protocol"),
            )),
        }
    }

    /// Only a block whose mark is present may be requested.
    fn get(&mut self, key: &BlockKey, into: &Lent, sure: bool) -> Outcome<()> {
        let absent =
            || Failed::Answer(Error::new(ErrorKind::NotFound, "the pool server does not have the block"));
        if !sure && !self.exists(mark_name(key).as_bytes())? {
            return Err(absent());
        }
        self.turn()?;
        let name = block_name(key);
        let value_bytes = match self.ask(&Request::Tcp { key: name.as_bytes(), op: TcpOp::Get })? {
            Reply::Value(bytes) => u64::from(bytes),
            Reply::Code(code::NOT_FOUND) => return Err(absent()),
            Reply::Code(code @ (code::INVALID | code::INTERNAL | code::SYSTEM | code::OUT_OF_MEMORY)) => {
                return Err(Failed::Answer(self.refused(code)));
            }
            _ => {
                return Err(Failed::Lost(
                    self.bad(ErrorKind::Protocol, "a remote server's answer makes no sense"),
                ));
            }
        };
        if value_bytes > REMOTE_FOREIGN_VALUE_BYTES_MAX {
            return Err(Failed::Lost(self.bad(ErrorKind::Corrupt, "a remote value is too long")));
        }
        let Some(mut into) = into.take() else {
            return Err(Failed::Amid(self.server.too_late(), value_bytes));
        };
        let block_bytes = into.len();
        if value_bytes != (HEADER_BYTES + block_bytes) as u64 {
            let error = self.bad(ErrorKind::Corrupt, "a remote value has another length");
            return Err(Failed::Amid(error, value_bytes));
        }
        let mut header = [0; HEADER_BYTES];
        self.fill(HEADER_BYTES, block_bytes, |mut stream, have| stream.read(&mut header[have..]))?;
        let expected = value::check(&header, key, block_bytes)
            .map_err(|error| Failed::Amid(error, block_bytes as u64))?;
        self.fill(block_bytes, 0, |mut stream, have| stream.read_vectored(&mut into.slices_mut(have)))?;
        if crc64_slot(into.body(), 0, block_bytes) == Some(expected) {
            return Ok(());
        }
        Err(Failed::Answer(
            self.bad(ErrorKind::Corrupt, "a block's bytes changed at a remote server or on their way"),
        ))
    }

    /// Receives `bytes` bytes of a value that is followed by `rest` more. `read` gets the number received so far.
    fn fill(
        &self,
        bytes: usize,
        rest: usize,
        mut read: impl FnMut(&Socket, usize) -> std::io::Result<usize>,
    ) -> Outcome<()> {
        let mut have = 0;
        while have < bytes {
            match self.receive(Some(self.deadline), |stream| read(stream, have))? {
                Some(count) => have += count,
                None => return Err(Failed::Amid(self.server.too_late(), (bytes - have + rest) as u64)),
            }
        }
        Ok(())
    }

    /// Discards the rest of a value, for a limited time.
    fn discard(&mut self, mut left: u64) -> Result<()> {
        if left == 0 {
            return Ok(());
        }
        let timeout = self.server.shared.config.timeout;
        self.until = Instant::now() + timeout * REMOTE_FOREIGN_DISCARD_TIMEOUTS;
        let mut is_closing = false;
        let mut scratch = vec![0; SCRATCH_BYTES];
        while left > 0 {
            if !is_closing && self.server.shared.is_stopping() {
                // Closing waits for this thread.
                is_closing = true;
                self.until = self.until.min(Instant::now() + timeout);
            }
            let room = usize::try_from(left).unwrap_or(SCRATCH_BYTES).min(SCRATCH_BYTES);
            let count = self.receive(None, |mut stream| stream.read(&mut scratch[..room]))?;
            left -= count.unwrap_or(0) as u64;
        }
        Ok(())
    }

    fn put_block(&mut self, key: &BlockKey, from: IoBuf) -> Outcome<Written> {
        let (name, mark) = (block_name(key), mark_name(key));
        if self.exists(mark.as_bytes())? {
            return Ok(Written::AlreadyThere);
        }
        self.turn()?;
        let crc64 = crc64_slot(from.body(), 0, from.len())
            .ok_or_else(|| Failed::Answer(self.bad(ErrorKind::Config, "a slot is smaller than its block")))?;
        let header = value::encode(key, from.len(), crc64);
        self.put(name.as_bytes(), &header, Some(from))?;
        self.put(mark.as_bytes(), MARK, None)?;
        Ok(Written::New)
    }

    /// Stores `head` and a body as one value.
    fn put(&mut self, name: &[u8], head: &[u8], body: Option<IoBuf>) -> Outcome<()> {
        let value_bytes = head.len() + body.as_ref().map_or(0, IoBuf::len);
        let too_long =
            |_| Failed::Answer(Error::new(ErrorKind::Unsupported, "a block is too large for the wire"));
        let request =
            Request::Tcp { key: name, op: TcpOp::Put(u32::try_from(value_bytes).map_err(too_long)?) };
        let mut front = Vec::new();
        request.encode(&mut front).map_err(Failed::Answer)?;
        front.extend_from_slice(head);
        self.begin();
        self.send(&front, body.as_slice())?;
        match self.reply(&request)? {
            Reply::Code(code::FINISH) => Ok(()),
            // The server takes the bytes after the refusal for requests: the connection is out of sync.
            Reply::Code(code) => Err(Failed::Lost(self.refused(code))),
            _ => Err(Failed::Lost(self.bad(ErrorKind::Protocol, "a remote server's answer makes no sense"))),
        }
    }

    /// Removes the mark first, so that no client requests a block that is being removed.
    fn remove(&mut self, key: &BlockKey) -> Outcome<()> {
        self.turn()?;
        let (name, mark) = (block_name(key), mark_name(key));
        // Without its mark the block may still be arriving, and the server does not survive its removal then.
        if self.ask(&Request::Delete(vec![mark.as_bytes()]))? == Reply::Number(1) {
            self.ask(&Request::Delete(vec![name.as_bytes()]))?;
        }
        Ok(())
    }
}
