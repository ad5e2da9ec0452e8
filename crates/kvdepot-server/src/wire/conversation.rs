//! A connection from its first to its last byte.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::infini::{code, op as infini_op};
use kvdepot_wire::limits::{GREETING_BODY_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX};
use kvdepot_wire::own::{Offer, Request, ServerHandshake, feature, op as own_op};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::connection::Connection;
use super::infini::Command as InfiniCommand;
use super::own::{Command as OwnCommand, Greeting};
use super::rdma::QueuePair;
use super::shared::Door;
use super::socket::{Socket, keep_alive};
use super::stream::Stream;
use super::tls;

/// The longest time for a peer to prove that it knows the token.
const HELLO_WAIT: Duration = Duration::from_secs(10);
/// Optional protocol features of this server.
const FEATURES: u64 = feature::CLOSE;

/// A received request. It is decoded, so it borrows nothing from the buffer that its payload is taken from.
enum Arrived {
    Own(u64, OwnCommand),
    Infini(InfiniCommand),
    BadOwn(u64, Error),
    BadInfini(u8, Error),
    /// The header of a request that a stranger may not send, before its body.
    Unwanted(u8),
}

/// Serves a connection until it ends, and logs the reason.
pub(super) async fn converse(door: Arc<Door>, tcp: TcpStream, draining: watch::Receiver<bool>) {
    let (counters, peer) = (Arc::clone(&door.counters), tcp.peer_addr());
    keep_alive(&tcp);
    let outcome = async {
        let Some(acceptor) = door.tls.clone() else {
            return serve(door, Socket::Tcp(tcp), draining).await;
        };
        let outside = tls::accept(&acceptor, tcp).await?;
        let (inside, far) = UnixStream::pair().map_err(|e| Error::io("no socket for a TLS connection", e))?;
        let stall = door.config.stall();
        tls::around(outside, far, serve(door, Socket::Inside(inside), draining), stall).await
    };
    let outcome = outcome.await;
    if let Err(error) = outcome {
        let reason = match error.kind() {
            ErrorKind::Timeout => "timeout",
            ErrorKind::Protocol => "protocol",
            ErrorKind::Permission => "token",
            ErrorKind::Version => "version",
            _ => "broken",
        };
        counters.refused(reason);
        let peer = peer.map_or_else(|_| "a peer".to_owned(), |peer| peer.to_string());
        match error.kind() {
            ErrorKind::Closed | ErrorKind::Io => tracing::debug!("the connection of {peer} ended: {error}"),
            _ => tracing::warn!("the connection of {peer} was closed: {error}"),
        }
    }
}

async fn serve(door: Arc<Door>, socket: Socket, draining: watch::Receiver<bool>) -> Result<()> {
    let stream = Arc::new(Stream::new(socket, door.config.stall(), Arc::clone(&door.counters))?);
    let direct = door.depot.direct();
    let values = door.values.for_owner(direct.clone());
    let direct = direct.within(Duration::from_millis(door.config.answer_wait_ms));
    let mut connection = Connection {
        handshake: ServerHandshake::new(door.token.clone()),
        door,
        stream,
        direct,
        values,
        tasks: JoinSet::new(),
        in_flight: Arc::new(Semaphore::new(REQUESTS_IN_FLIGHT_MAX as usize)),
        rdma: None,
    };
    let outcome = connection.run(draining).await;
    if outcome.is_ok() {
        // The peer may have closed only its sending half: answers to its earlier requests are still sent.
        while connection.tasks.join_next().await.is_some() {}
    }
    outcome
}

impl Connection {
    async fn run(&mut self, mut draining: watch::Receiver<bool>) -> Result<()> {
        let mut buffer = FrameBuffer::requests();
        let hello_by = Instant::now() + HELLO_WAIT;
        loop {
            let Some(arrived) = self.next(&mut buffer, hello_by, &mut draining).await? else { return Ok(()) };
            match arrived {
                Arrived::Own(id, command) => {
                    let timed = self.door.counters.request(command.name());
                    match command {
                        OwnCommand::Greeting(greeting) => self.greet(id, &greeting).await?,
                        _ if !self.handshake.is_over() => {
                            let error = no_hello();
                            self.fail(id, &error).await?;
                            return Err(error);
                        }
                        command => self.serve_own(id, command, timed, &mut buffer).await?,
                    }
                }
                Arrived::Infini(command) => {
                    let _timed = self.door.counters.request(command.name());
                    self.may_enter().await?;
                    self.serve_infini(command, &mut buffer).await?;
                }
                Arrived::BadOwn(id, error) => {
                    self.fail(id, &error).await?;
                    return Err(error);
                }
                Arrived::BadInfini(op, error) => {
                    self.may_enter().await?;
                    self.refuse(code::INVALID, error.kind()).await?;
                    // An unreadable request for a value may be followed by the value, so the stream is out of step.
                    if op == infini_op::TCP {
                        return Err(error);
                    }
                }
                Arrived::Unwanted(op) if op < own_op::HELLO => self.may_enter().await?,
                Arrived::Unwanted(_) => {
                    let error = no_hello();
                    self.fail(0, &error).await?;
                    return Err(error);
                }
            }
        }
    }

    /// Returns the next request; `None` if the peer left between two requests, or the door closes.
    async fn next(
        &self,
        buffer: &mut FrameBuffer,
        hello_by: Instant,
        draining: &mut watch::Receiver<bool>,
    ) -> Result<Option<Arrived>> {
        let mut begun = None;
        loop {
            if let Some(op) = self.unwanted(buffer) {
                return Ok(Some(Arrived::Unwanted(op)));
            }
            if let Some(frame) = buffer.next_frame()? {
                return Ok(Some(if frame.op >= own_op::HELLO {
                    match OwnCommand::decode(frame) {
                        Ok((id, command)) => Arrived::Own(id, command),
                        Err(error) => Arrived::BadOwn(Request::id_of(frame), error),
                    }
                } else {
                    match InfiniCommand::decode(frame) {
                        Ok(command) => Arrived::Infini(command),
                        Err(error) => Arrived::BadInfini(frame.op, error),
                    }
                }));
            }
            let idle = buffer.is_empty();
            if idle && *draining.borrow() {
                return Ok(None);
            }
            let deadline = if !idle {
                Some(*begun.get_or_insert_with(|| self.stream.deadline(0)))
            } else if self.door.token.is_some() && !self.handshake.is_over() {
                Some(hello_by)
            } else {
                None
            };
            let count = tokio::select! {
                biased;
                count = self.stream.fill(buffer, deadline) => count?,
                () = over(self.rdma.as_ref()) => {
                    return Err(Error::new(ErrorKind::Closed, "its RDMA connection broke"));
                }
                _ = draining.changed(), if idle => continue,
            };
            if count == 0 {
                if idle {
                    return Ok(None);
                }
                return Err(Error::new(ErrorKind::Closed, "a peer left in the middle of a request"));
            }
        }
    }

    /// Returns the operation of a request that is refused by its header: whoever has not proved the token must not make this
    /// side hold more than a greeting.
    fn unwanted(&self, buffer: &FrameBuffer) -> Option<u8> {
        if self.door.token.is_none() || self.handshake.is_over() {
            return None;
        }
        let header = buffer.next_header()?;
        let is_short = header.op >= own_op::HELLO && header.body_bytes as usize <= GREETING_BODY_BYTES_MAX;
        (!is_short).then_some(header.op)
    }

    /// InfiniStore's protocol has no token: if one is required, its requests are served only after our handshake.
    async fn may_enter(&self) -> Result<()> {
        if self.door.token.is_none() || self.handshake.is_over() {
            return Ok(());
        }
        self.refuse(code::INVALID, ErrorKind::Permission).await?;
        Err(Error::new(ErrorKind::Permission, "a token is required, but InfiniStore's protocol has none"))
    }

    async fn greet(&mut self, id: u64, greeting: &Greeting) -> Result<()> {
        let offer = Offer {
            features: FEATURES,
            requests_in_flight_max: REQUESTS_IN_FLIGHT_MAX,
            depot: self.door.depot.id(),
            nonce: kvdepot_io::random::bytes()?,
        };
        let mut answer = Vec::new();
        let outcome = self.handshake.step(id, &greeting.request(), offer, &mut answer);
        if let Err(error) = outcome {
            self.fail(id, &error).await?;
            return Err(error);
        }
        self.stream.send(&answer, None).await
    }
}

fn no_hello() -> Error {
    Error::new(ErrorKind::Permission, "a connection begins with a hello")
}

/// Waits for the end of a connection's queue pair, forever if it has none.
async fn over(rdma: Option<&QueuePair>) {
    match rdma {
        Some(queue_pair) => queue_pair.over().await,
        None => std::future::pending().await,
    }
}
