//! Serves a connection with our own protocol: a thread that sends, and one that receives.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::REMOTE_BATCH_BLOCKS_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::IoBuf;
use kvdepot_io::checksum::crc64_slot;
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::own::{Hashes, PutBlocks, Request};

use super::conn::Conn;
use super::job::{Job, What};
use super::parting::Parting;
use super::pending::{Asked, GetItem, PutItem};
use super::receive;
use super::sending::send_all;
use super::server::Server;

/// Serves until the connection ends. Returns the reason, and whether the server answered anything before.
pub(super) fn run(server: &Arc<Server>, conn: &Arc<Conn>, buffer: FrameBuffer) -> (Error, bool) {
    let end = std::thread::scope(|scope| {
        let sender = std::thread::Builder::new().name("kvdepot-remote-send".to_owned());
        let sender = sender.spawn_scoped(scope, || send_jobs(server, conn));
        let error = match sender {
            Ok(_) => receive::until_over(server, conn, buffer),
            Err(e) => Error::io("cannot start a thread", e),
        };
        conn.close(&**server, &error);
        (error, conn.pending.lock().answered)
    });
    let (doubtful, is_ended) = conn.pending.lock().parted();
    if is_ended {
        server.shared.beliefs.writing.lock().settle(&doubtful);
    } else if !doubtful.is_empty() {
        server.part(Parting::new(Arc::clone(&conn.stream), doubtful));
    }
    end
}

fn send_jobs(server: &Server, conn: &Conn) {
    loop {
        conn.wait_for_room();
        let is_over = || conn.pending.lock().closed.is_some();
        let mut jobs = server.take(|| is_over() || conn.has_closing(), REMOTE_BATCH_BLOCKS_MAX);
        if jobs.is_empty() {
            if is_over() || server.shared.is_stopping() {
                return;
            }
            // Not if it was opened again: no other thread sends here, so its opening comes later or is known by now.
            let is_closed =
                |spec: &Arc<NamespaceSpec>| server.shared.spaces.lock().get(spec.root()).is_none();
            let Some(spec) = conn.next_closing().filter(is_closed) else { continue };
            let deadline = Instant::now() + server.shared.config.timeout;
            jobs.push(Job { deadline, what: What::Close { spec, done: Box::new(|_| {}) } });
        }
        let is_write = jobs.iter().any(Job::is_write);
        let sent = conn.send_jobs(server, jobs);
        if is_write {
            server.write_ended();
        }
        if let Err(error) = sent {
            conn.close(server, &error);
        }
    }
}

impl Conn {
    fn send_jobs(&self, server: &Server, jobs: Vec<Job>) -> Result<()> {
        let mut frame = Vec::new();
        let id = {
            let mut pending = self.pending.lock();
            if !pending.owes() {
                self.progressed();
            }
            pending.next_id()
        };
        let (asked, bodies) = match prepare(server, id, jobs, &mut frame) {
            Ok(prepared) => prepared,
            // Nothing was sent: the connection is still usable.
            Err((jobs, error)) => {
                jobs.into_iter().for_each(|job| job.fail(error.clone()));
                return Ok(());
            }
        };
        let entered = self.pending.lock().enter(id, asked);
        if let Some((asked, error)) = entered {
            asked.fail(&error).into_iter().for_each(|end| end());
            return Err(error);
        }
        let progressed = || {
            self.progressed();
            Ok(())
        };
        let sent = send_all(&self.stream, &frame, &bodies, progressed).map_err(|e| {
            Error::io("a connection to a remote server broke", e).with("server", &server.address)
        });
        // From here on nothing reads the blocks' memory any more, so their writers may be notified (P1).
        drop(bodies);
        let ends = {
            let mut pending = self.pending.lock();
            let ends = pending.sent(id, sent.as_ref().err());
            pending.tell_doubts(&server.shared.beliefs.writing);
            ends
        };
        ends.into_iter().for_each(|end| end());
        sent
    }
}

type Prepared = (Asked, Vec<IoBuf>);

/// Writes the frame of a batch. Returns the jobs on failure.
fn prepare(
    server: &Server,
    id: u64,
    jobs: Vec<Job>,
    frame: &mut Vec<u8>,
) -> Result<Prepared, (Vec<Job>, Error)> {
    if let Err(error) = encode(server, id, &jobs, frame) {
        return Err((jobs, error));
    }
    let mut bodies = Vec::new();
    let (mut gets, mut puts) = (Vec::new(), Vec::new());
    for Job { deadline, what } in jobs {
        match what {
            What::Get { into, done, .. } => gets.push(Some(GetItem { into, deadline, done })),
            What::Put { key, from, done } => {
                bodies.push(from);
                puts.push(Some(PutItem { key, done }));
            }
            What::Exists { keys, done } => {
                return Ok((Asked::Exists { count: keys.len(), deadline, done: Some(done) }, bodies));
            }
            What::Remove { done, .. } | What::Close { done, .. } => {
                return Ok((Asked::Remove { deadline, done: Some(done) }, bodies));
            }
            What::Open { done, .. } => return Ok((Asked::Open { deadline, done: Some(done) }, bodies)),
            What::SetEpoch { done, .. } => {
                return Ok((Asked::SetEpoch { deadline, done: Some(done) }, bodies));
            }
        }
    }
    if puts.is_empty() {
        Ok((Asked::Get { answered: vec![false; gets.len()], items: gets }, bodies))
    } else {
        Ok((Asked::Put { items: puts, sending: true, early: None }, bodies))
    }
}

/// Appends the hashes of keys of one namespace, and returns the namespace.
fn push_hashes(keys: &[BlockKey], bytes: &mut Vec<u8>) -> NamespaceId {
    keys.iter().for_each(|key| bytes.extend_from_slice(&key.hash.0));
    keys.first().map_or(NamespaceId([0; 16]), |key| key.namespace)
}

fn encode(server: &Server, id: u64, jobs: &[Job], frame: &mut Vec<u8>) -> Result<()> {
    let Some(first) = jobs.first() else {
        return Err(Error::new(ErrorKind::Protocol, "nothing is asked"));
    };
    let mut bytes = Vec::new();
    match &first.what {
        What::Exists { keys, .. } => {
            let namespace = push_hashes(keys, &mut bytes);
            Request::Exists { namespace, hashes: Hashes::new(&bytes)? }.encode(id, frame)
        }
        What::Get { key: first_key, .. } => {
            // Half of the silence that ends a connection: the server must have time to report that it has not got it.
            let mut wait = server.shared.config.timeout / 2;
            for job in jobs {
                wait = wait.min(job.deadline.saturating_duration_since(Instant::now()));
                if let What::Get { key, .. } = &job.what {
                    bytes.extend_from_slice(&key.hash.0);
                }
            }
            let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
            Request::Get { namespace: first_key.namespace, wait_ms, hashes: Hashes::new(&bytes)? }
                .encode(id, frame)
        }
        What::Put { key: first_key, from: first_from, .. } => {
            for job in jobs {
                if let What::Put { key, from, .. } = &job.what {
                    let crc64 = crc64_slot(from.body(), 0, from.len())
                        .ok_or_else(|| Error::new(ErrorKind::Config, "a slot is smaller than its block"))?;
                    PutBlocks::push(&mut bytes, key.hash, crc64);
                }
            }
            let block_bytes = u32::try_from(first_from.len())
                .map_err(|_| Error::new(ErrorKind::Unsupported, "a block is too large for the wire"))?;
            Request::Put { namespace: first_key.namespace, block_bytes, blocks: PutBlocks::new(&bytes)? }
                .encode(id, frame)
        }
        What::Remove { keys, .. } => {
            let namespace = push_hashes(keys, &mut bytes);
            Request::Remove { namespace, hashes: Hashes::new(&bytes)? }.encode(id, frame)
        }
        What::Open { spec, .. } => Request::Open { canonical: spec.canonical() }.encode(id, frame),
        What::Close { spec, .. } => Request::Close { canonical: spec.canonical() }.encode(id, frame),
        What::SetEpoch { now, epoch, .. } => {
            Request::SetEpoch { namespace: *now, epoch: *epoch }.encode(id, frame)
        }
    }
}
