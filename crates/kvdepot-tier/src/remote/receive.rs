//! The receiving side of a connection with our own protocol: answers in any order, blocks directly into their slots.

use std::io::Read;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::IoBuf;
use kvdepot_io::checksum::crc64_slot;
use kvdepot_wire::own::{Response, Status};
use kvdepot_wire::{Frame, FrameBuffer};

use super::conn::Conn;
use super::job::Opened;
use super::pending::{Answer, GetItem};
use super::server::Server;
use super::tcp::again;

/// Bytes read at a time when they are discarded.
const SCRATCH_BYTES: usize = 64 << 10;

/// Receives until the connection ends. Returns the reason.
pub(super) fn until_over(server: &Server, conn: &Conn, buffer: FrameBuffer) -> Error {
    let mut receiver = Receiver { server, conn, buffer };
    loop {
        if let Err(error) = receiver.step() {
            let why = conn.pending.lock().closed.clone();
            return why.unwrap_or(error).with("server", &server.address);
        }
    }
}

struct Receiver<'a> {
    server: &'a Server,
    conn: &'a Conn,
    buffer: FrameBuffer,
}

/// Content of a frame.
enum Came {
    Block { id: u64, index: u32, status: Status, block_bytes: usize, crc64: u64 },
    Answer(u64, Answer),
}

fn read(frame: Frame<'_>) -> Result<Came> {
    let (id, response) = Response::decode(frame)?;
    let answer = match response {
        Response::Block { index, status, block_bytes, crc64 } => {
            return Ok(Came::Block { id, index, status, block_bytes: block_bytes as usize, crc64 });
        }
        Response::Present(bytes) => Answer::Present(bytes.iter().map(|&byte| byte == 1).collect()),
        Response::Stored(statuses) => Answer::Stored(statuses),
        Response::Done => Answer::Done,
        Response::Namespace { namespace, epoch, .. } => Answer::Namespace(Opened { namespace, epoch }),
        Response::Failed { kind, message } => Answer::Failed(Error::new(kind, message)),
        _ => return Err(Error::new(ErrorKind::Protocol, "a remote server sent an answer out of turn")),
    };
    Ok(Came::Answer(id, answer))
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "a remote server closed the connection")
}

impl Receiver<'_> {
    /// Processes the next frame, or receives more bytes.
    fn step(&mut self) -> Result<()> {
        let came = self.buffer.next_frame()?.map(read).transpose()?;
        match came {
            None => {
                let Self { conn, buffer, .. } = self;
                let count = arrived(conn, None, || buffer.read_with(|room| (&*conn.stream).read(room)))?;
                debug_assert!(count > 0, "an end is an error");
                Ok(())
            }
            Some(Came::Answer(id, answer)) => {
                let ends = self.conn.pending.lock().answer(id, answer)?;
                ends.into_iter().for_each(|end| end());
                self.conn.answered();
                Ok(())
            }
            Some(Came::Block { id, index, status, block_bytes, crc64 }) => {
                let item = self.conn.pending.lock().block(id, index)?;
                self.conn.answered();
                let received = match (item, status) {
                    (None, _) => self.discard(block_bytes),
                    (Some(item), Status::Ok) => self.block(item, block_bytes, crc64),
                    (Some(item), status) => {
                        let kind = match status {
                            Status::Failed(kind) => kind,
                            Status::Ok | Status::Had => ErrorKind::Protocol,
                        };
                        fail(item, Error::new(kind, "the pool server did not deliver the block"));
                        Ok(())
                    }
                };
                self.conn.pending.lock().receiving = false;
                received
            }
        }
    }

    /// Receives a block into its slot and compares its checksum (P1).
    fn block(&mut self, mut item: GetItem, block_bytes: usize, crc64: u64) -> Result<()> {
        if block_bytes != item.into.len() {
            let error = Error::new(ErrorKind::Corrupt, "a remote server sent a block of another length")
                .with("block_bytes", block_bytes)
                .with("block_bytes_expected", item.into.len());
            fail(item, error);
            return self.discard(block_bytes);
        }
        let mut have = 0;
        while have < block_bytes {
            match self.piece(&mut item.into, have, item.deadline) {
                Ok(count) => have += count,
                Err(error) => {
                    fail(item, error.clone());
                    return Err(error);
                }
            }
            if have < block_bytes && Instant::now() > item.deadline {
                fail(item, self.server.too_late());
                return self.discard(block_bytes - have);
            }
        }
        let right = crc64_slot(item.into.body(), 0, block_bytes) == Some(crc64);
        let outcome = if right {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::Corrupt, "a block's bytes changed on their way from a remote server")
                .with("server", &self.server.address))
        };
        drop(item.into);
        (item.done)(outcome);
        Ok(())
    }

    /// Receives some bytes; none if the deadline passes before any come.
    fn piece(&mut self, into: &mut IoBuf, from: usize, deadline: Instant) -> Result<usize> {
        let mut slices = into.slices_mut(from);
        if !self.buffer.is_empty() {
            let first = slices.first_mut().ok_or_else(closed)?;
            return Ok(self.buffer.take_payload(first));
        }
        arrived(self.conn, Some(deadline), || (&*self.conn.stream).read_vectored(&mut slices))
    }

    /// Skips the bytes of a block that is no longer waited for, to stay in sync.
    fn discard(&mut self, count: usize) -> Result<()> {
        let mut left = count - usize::try_from(self.buffer.skip_payload(count as u64)).unwrap_or(count);
        let mut scratch = vec![0; SCRATCH_BYTES.min(left)];
        while left > 0 {
            let room = left.min(scratch.len());
            left -= arrived(self.conn, None, || (&*self.conn.stream).read(&mut scratch[..room]))?;
        }
        Ok(())
    }
}

fn fail(item: GetItem, error: Error) {
    let GetItem { into, done, .. } = item;
    drop(into);
    done(Err(error));
}

/// Receives the next bytes, however long that takes while the connection is open. Returns 0 if a deadline passes first.
fn arrived(
    conn: &Conn,
    deadline: Option<Instant>,
    mut read: impl FnMut() -> std::io::Result<usize>,
) -> Result<usize> {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    loop {
        let error = match again(&mut read) {
            Ok(0) => closed(),
            Ok(count) => {
                conn.progressed();
                return Ok(count);
            }
            Err(e) if matches!(e.kind(), TimedOut | WouldBlock) => match conn.pending.lock().closed.clone() {
                Some(error) => return Err(error),
                None if deadline.is_some_and(|deadline| Instant::now() > deadline) => return Ok(0),
                None => continue,
            },
            Err(e) => broke(e),
        };
        conn.pending.lock().ended();
        return Err(error);
    }
}

fn broke(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "a connection to a remote server broke").with_source(e)
}
