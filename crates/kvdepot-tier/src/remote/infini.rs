//! One connection to an InfiniStore server: one request at a time, because its server mixes up the answers of more.

use std::io::{Read, Write};
use std::time::Instant;

use kvdepot_core::limits::REMOTE_FOREIGN_VALUE_BYTES_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::IoBuf;
use kvdepot_io::checksum::crc64_slot;
use kvdepot_wire::infini::{Reply, ReplyReader, Request, TcpOp, code};

use super::again;
use super::job::{Job, Opened, What};
use super::sending::send_all;
use super::server::Server;
use super::socket::Socket;
use super::value::{self, HEADER_BYTES, MARK, block_name, epoch_name, mark_name};
use crate::Written;

/// What is read at a time of bytes that nobody wants.
const SCRATCH_BYTES: usize = 64 << 10;

/// How a request failed: whether the connection is still in step.
enum Failed {
    /// The server said so, or the bytes are wrong; the connection is as good as before.
    Answer(Error),
    /// The connection is over.
    Lost(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Lost(error)
    }
}

type Outcome<T> = Result<T, Failed>;

/// Serves until the connection is over: why, and whether it answered anything before.
pub(super) fn run(server: &Server, stream: Socket) -> (Error, bool) {
    let mut talk = Talk::new(server, &stream);
    let mut answered = false;
    let silences = server.silences();
    loop {
        // Nobody reads while nothing is asked: a connection that the server has closed must not take a request.
        let jobs = server.take(|| server.silences() != silences || stream.is_over());
        if jobs.is_empty() {
            let error = if server.shared.is_stopping() {
                Error::new(ErrorKind::Closed, "the tier is closing")
            } else if server.silences() != silences {
                server.too_late()
            } else {
                talk.bad(ErrorKind::Unavailable, "a remote server closed the connection")
            };
            return (error, answered);
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
            return (error, answered);
        }
    }
}

/// Splits an outcome into what the asker is told and why the connection is over.
fn told<T>(outcome: Outcome<T>) -> (Result<T>, Option<Error>) {
    match outcome {
        Ok(value) => (Ok(value), None),
        Err(Failed::Answer(error)) => (Err(error), None),
        Err(Failed::Lost(error)) => (Err(error.clone()), Some(error)),
    }
}

/// Questions and answers, one by one.
pub(super) struct Talk<'a> {
    server: &'a Server,
    stream: &'a Socket,
}

impl<'a> Talk<'a> {
    pub(super) const fn new(server: &'a Server, stream: &'a Socket) -> Self {
        Self { server, stream }
    }

    /// Does a job: why the connection is over, if it is.
    fn serve(&mut self, job: Job) -> Option<Error> {
        let deadline = job.deadline;
        match job.what {
            What::Exists { keys, done } => {
                let there =
                    keys.iter().map(|key| self.exists(mark_name(key).as_bytes())).collect::<Result<_>>();
                let (outcome, lost) = told(there.map_err(Failed::Lost));
                done(outcome);
                lost
            }
            What::Get { key, mut into, sure, done } => {
                let outcome = self.get(&key, &mut into, sure, deadline);
                drop(into);
                let (outcome, lost) = told(outcome);
                done(outcome);
                lost
            }
            What::Put { key, from, done } => {
                let outcome = self.put_block(&key, &from);
                drop(from);
                let (outcome, lost) = told(outcome);
                done(outcome);
                lost
            }
            What::Remove { key, done } => {
                let (outcome, lost) = told(self.remove(&key).map_err(Failed::Lost));
                done(outcome);
                lost
            }
            What::Open { spec, done } => {
                let (outcome, lost) = told(self.epoch(&spec).map_err(Failed::Lost));
                done(outcome.map(|epoch| Opened { namespace: spec.id(epoch), epoch }));
                lost
            }
            What::SetEpoch { spec, epoch, done, .. } => {
                let (outcome, lost) = told(self.set_epoch(&spec, epoch));
                done(outcome);
                lost
            }
        }
    }

    /// Tells the server of epochs that passed while it was away.
    pub(super) fn align(&mut self) -> Result<()> {
        for space in self.server.shared.spaces() {
            let (outcome, _) = told(self.set_epoch(&space.spec, space.epoch));
            outcome?;
        }
        Ok(())
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
        (&mut &*self.stream).write_all(&frame).map_err(|e| self.broke(e))?;
        self.reply(request)
    }

    fn reply(&mut self, request: &Request<'_>) -> Result<Reply> {
        let mut reader = ReplyReader::new(request);
        loop {
            let room = reader.room();
            let count = again(|| self.stream.read(room)).map_err(|e| self.broke(e))?;
            if count == 0 {
                return Err(self.bad(ErrorKind::Unavailable, "a remote server closed the connection"));
            }
            if let Some(reply) = reader.advance(count)? {
                return Ok(reply);
            }
        }
    }

    pub(super) fn exists(&mut self, name: &[u8]) -> Result<bool> {
        match self.ask(&Request::Exists(name))? {
            Reply::Number(0) => Ok(true),
            Reply::Number(1) => Ok(false),
            _ => Err(self.bad(ErrorKind::Protocol, "a remote server does not speak InfiniStore's protocol")),
        }
    }

    /// Only a block whose mark is there may be asked for.
    fn get(&mut self, key: &BlockKey, into: &mut IoBuf, sure: bool, deadline: Instant) -> Outcome<()> {
        let absent =
            || Failed::Answer(Error::new(ErrorKind::NotFound, "a remote server has not got a block"));
        if !sure && !self.exists(mark_name(key).as_bytes())? {
            return Err(absent());
        }
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
        let block_bytes = into.len();
        if value_bytes != (HEADER_BYTES + block_bytes) as u64 {
            self.discard(value_bytes)?;
            return Err(Failed::Answer(self.bad(ErrorKind::Corrupt, "a remote value has another length")));
        }
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).map_err(|e| self.broke(e))?;
        let expected = match value::check(&header, key, block_bytes) {
            Ok(expected) => expected,
            Err(error) => {
                self.discard(block_bytes as u64)?;
                return Err(Failed::Answer(error));
            }
        };
        let mut have = 0;
        while have < block_bytes {
            let mut stream = self.stream;
            let count =
                again(|| stream.read_vectored(&mut into.slices_mut(have))).map_err(|e| self.broke(e))?;
            if count == 0 {
                return Err(Failed::Lost(
                    self.bad(ErrorKind::Unavailable, "a remote server closed amid a value"),
                ));
            }
            have += count;
            if have < block_bytes && Instant::now() > deadline {
                // Its server does not survive a client that leaves amid a value: the rest is taken and dropped.
                self.discard((block_bytes - have) as u64)?;
                return Err(Failed::Answer(self.server.too_late()));
            }
        }
        if crc64_slot(into.body(), 0, block_bytes) == Some(expected) {
            return Ok(());
        }
        Err(Failed::Answer(
            self.bad(ErrorKind::Corrupt, "a block's bytes changed at a remote server or on their way"),
        ))
    }

    fn discard(&mut self, mut left: u64) -> Result<()> {
        let mut scratch = vec![0; SCRATCH_BYTES];
        while left > 0 {
            let room = usize::try_from(left).unwrap_or(SCRATCH_BYTES).min(SCRATCH_BYTES);
            let mut stream = self.stream;
            let count = again(|| stream.read(&mut scratch[..room])).map_err(|e| self.broke(e))?;
            if count == 0 {
                return Err(self.bad(ErrorKind::Unavailable, "a remote server closed amid a value"));
            }
            left -= count as u64;
        }
        Ok(())
    }

    fn put_block(&mut self, key: &BlockKey, from: &IoBuf) -> Outcome<Written> {
        let (name, mark) = (block_name(key), mark_name(key));
        if self.exists(mark.as_bytes())? {
            return Ok(Written::AlreadyThere);
        }
        let crc64 = crc64_slot(from.body(), 0, from.len())
            .ok_or_else(|| Failed::Answer(self.bad(ErrorKind::Config, "a slot is smaller than its block")))?;
        let header = value::encode(key, from.len(), crc64);
        self.put(name.as_bytes(), &header, Some(from))?;
        self.put(mark.as_bytes(), MARK, None)?;
        Ok(Written::New)
    }

    /// Puts `head` and a body as one value.
    fn put(&mut self, name: &[u8], head: &[u8], body: Option<&IoBuf>) -> Outcome<()> {
        let value_bytes = head.len() + body.map_or(0, IoBuf::len);
        let too_long =
            |_| Failed::Answer(Error::new(ErrorKind::Unsupported, "a block is too large for the wire"));
        let request =
            Request::Tcp { key: name, op: TcpOp::Put(u32::try_from(value_bytes).map_err(too_long)?) };
        let mut front = Vec::new();
        request.encode(&mut front).map_err(Failed::Answer)?;
        front.extend_from_slice(head);
        let bodies = body.map(std::slice::from_ref).unwrap_or_default();
        send_all(self.stream, &front, bodies, || ()).map_err(|e| Failed::Lost(self.broke(e)))?;
        match self.reply(&request)? {
            Reply::Code(code::FINISH) => Ok(()),
            // It takes what follows the refusal for requests: the connection is out of step.
            Reply::Code(code) => Err(Failed::Lost(self.refused(code))),
            _ => Err(Failed::Lost(self.bad(ErrorKind::Protocol, "a remote server's answer makes no sense"))),
        }
    }

    /// The mark first, so that nobody asks for a block that is going.
    fn remove(&mut self, key: &BlockKey) -> Result<()> {
        let (name, mark) = (block_name(key), mark_name(key));
        match self.ask(&Request::Delete(vec![mark.as_bytes()]))? {
            // Without its mark the block may be on its way, and the server does not survive its removal then.
            Reply::Number(1) => self.ask(&Request::Delete(vec![name.as_bytes()])).map(drop),
            _ => Ok(()),
        }
    }

    /// The newest epoch that the server was told of.
    fn epoch(&mut self, spec: &NamespaceSpec) -> Result<u32> {
        let mut epoch = 0;
        while epoch < u32::MAX && self.exists(epoch_name(spec, epoch + 1).as_bytes())? {
            epoch += 1;
        }
        Ok(epoch)
    }

    fn set_epoch(&mut self, spec: &NamespaceSpec, epoch: u32) -> Outcome<()> {
        for epoch in self.epoch(spec)?.saturating_add(1)..=epoch {
            self.put(epoch_name(spec, epoch).as_bytes(), MARK, None)?;
        }
        Ok(())
    }
}
