//! Connecting to a server: detect its protocol, prove the token, synchronise namespaces.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvdepot_core::limits::REMOTE_IDLE_LOOK_MS;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::header::MAGIC;
use kvdepot_wire::own::{ClientHandshake, Request, Response, Welcomed, feature};

use super::config::RemoteProtocol;
use super::infini::epochs::greet;
use super::job::Opened;
use super::server::{Dialect, Server};
use super::socket::Socket;
use super::spaces::Space;
use super::tcp::again;

/// Answer of a server with TLS to anything else: an alert of TLS 1.x.
const TLS_ALERT: [u8; 2] = [21, 3];

/// TCP keepalive: idle time before the first probe of a peer,
const PEER_QUIET: Duration = Duration::from_secs(30);
/// time between two probes,
const PEER_PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// and number of unanswered probes after which it is lost.
const PEER_PROBES: u32 = 3;

/// A connection that accepts requests.
pub(super) struct Link {
    pub(super) stream: Socket,
    pub(super) buffer: FrameBuffer,
    pub(super) dialect: Dialect,
    pub(super) depot: Option<u64>,
    pub(super) requests_in_flight_max: u32,
    pub(super) can_close: bool,
}

/// Reason of a failed hello.
enum Refused {
    /// The peer answered, and not as our servers do.
    Foreign(Error),
    /// It is our server and refuses us, or it did not answer: that a server of ours is slow or closing must not turn it
    /// into a second store, with blocks and epochs of its own (P12).
    Ours(Error),
}

/// Connects and completes the handshake of the server's protocol.
pub(super) fn connect(server: &Server) -> Result<Link> {
    let config = &server.shared.config;
    if config.protocol == RemoteProtocol::Infinistore {
        return infinistore(server);
    }
    match own(server) {
        Ok(link) => Ok(link),
        Err(Refused::Ours(error)) => Err(error),
        // Without the proof of a token, anyone could pose as the server and get our blocks.
        Err(Refused::Foreign(error)) if config.protocol == RemoteProtocol::Auto && config.token.is_none() => {
            infinistore(server).map_err(|_| error)
        }
        Err(Refused::Foreign(error)) => Err(error),
    }
}

fn own(server: &Server) -> Result<Link, Refused> {
    let deadline = Instant::now() + server.shared.config.timeout;
    let stream = reach(server, deadline).map_err(Refused::Ours)?;
    let mut talk = Talk { stream, buffer: FrameBuffer::responses(), deadline, server };
    let welcomed = talk.hello()?;
    talk.align().map_err(Refused::Ours)?;
    let Talk { stream, buffer, .. } = talk;
    // The receiver checks periodically whether its connection has ended.
    let look = Duration::from_millis(REMOTE_IDLE_LOOK_MS);
    stream.set_timeouts(None).and_then(|()| stream.set_read_patience(look)).map_err(|e| {
        Refused::Ours(Error::io("cannot prepare a connection", e).with("server", &server.address))
    })?;
    let Welcomed { requests_in_flight_max, depot, features } = welcomed;
    let can_close = features & feature::CLOSE != 0;
    Ok(Link { stream, buffer, dialect: Dialect::Own, depot: Some(depot), requests_in_flight_max, can_close })
}

/// Sends a request that any InfiniStore server can answer.
fn infinistore(server: &Server) -> Result<Link> {
    let deadline = Instant::now() + server.shared.config.timeout;
    let stream = reach(server, deadline)?;
    greet(server, &stream, deadline)?;
    Ok(Link {
        stream,
        buffer: FrameBuffer::responses(),
        dialect: Dialect::Infini,
        depot: None,
        requests_in_flight_max: 1,
        can_close: false,
    })
}

/// Connects, and completes the TLS handshake if configured. No later call on the socket waits longer than the tier's
/// timeout.
fn reach(server: &Server, deadline: Instant) -> Result<Socket> {
    let tcp = dial(server, deadline)?;
    let config = &server.shared.config;
    let socket = match &config.tls {
        Some(tls) => Socket::Tls(Box::new(tls.connect(tcp, &server.address, deadline)?)),
        None => Socket::Plain(tcp),
    };
    socket
        .set_timeouts(Some(config.timeout))
        .map_err(|e| Error::io("cannot prepare a connection", e).with("server", &server.address))?;
    Ok(socket)
}

fn dial(server: &Server, deadline: Instant) -> Result<TcpStream> {
    let failed =
        |e: std::io::Error| Error::io("cannot connect to a remote server", e).with("server", &server.address);
    let mut last = std::io::Error::other("its name has no address");
    let addresses = server.addresses.find(&server.address, deadline)?;
    for (index, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = share_of(left, addresses.len() - index);
        if share.is_zero() {
            last = std::io::ErrorKind::TimedOut.into();
            break;
        }
        match TcpStream::connect_timeout(address, share) {
            Ok(stream) => {
                stream.set_nodelay(true).map_err(failed)?;
                keep_alive(&stream).map_err(failed)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// Enables TCP keepalive: a peer that vanished is detected within a minute, even if nothing is requested from it, or if
/// only its end of the connection is waited for.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_keepidle(stream, PEER_QUIET)?;
    sockopt::set_tcp_keepintvl(stream, PEER_PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PEER_PROBES)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

/// Returns how long the next of `untried` addresses may take if `left` is left for all, so that an address that never
/// answers leaves time for the others.
fn share_of(left: Duration, untried: usize) -> Duration {
    left / u32::try_from(untried).unwrap_or(u32::MAX).max(1)
}

/// A conversation with one question and one answer at a time, before requests are pipelined.
struct Talk<'a> {
    stream: Socket,
    buffer: FrameBuffer,
    deadline: Instant,
    server: &'a Server,
}

impl Talk<'_> {
    fn lost(&self, e: std::io::Error) -> Error {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        if matches!(e.kind(), TimedOut | WouldBlock) {
            return self.server.too_late();
        }
        Error::io("a remote server disconnected during the handshake", e).with("server", &self.server.address)
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut stream = &self.stream;
            let sent = self.stream.bound(self.deadline).and_then(|()| again(|| stream.write(bytes)));
            match sent.map_err(|e| self.lost(e))? {
                0 => return Err(self.lost(std::io::ErrorKind::WriteZero.into())),
                count => bytes = &bytes[count..],
            }
        }
        Ok(())
    }

    /// Receives some bytes by the deadline.
    fn receive(&mut self) -> Result<()> {
        let Self { stream, buffer, deadline, .. } = self;
        let mut reading = &*stream;
        let read = |room: &mut [u8]| stream.bound(*deadline).and_then(|()| again(|| reading.read(room)));
        match buffer.read_with(read).map_err(|e| self.lost(e))? {
            0 => Err(self.lost(std::io::ErrorKind::UnexpectedEof.into())),
            _ => Ok(()),
        }
    }

    fn hello(&mut self) -> Result<Welcomed, Refused> {
        let nonce = kvdepot_io::random::bytes().map_err(Refused::Ours)?;
        let mut out = Vec::new();
        let token = self.server.shared.config.token.clone();
        let mut handshake =
            ClientHandshake::begin(token, feature::CLOSE, nonce, &mut out).map_err(Refused::Ours)?;
        self.send(&out).map_err(Refused::Ours)?;
        while self.buffer.len() < size_of_val(&MAGIC) {
            self.receive().map_err(Refused::Ours)?;
        }
        if !self.buffer.begins_with(&MAGIC.to_le_bytes()) {
            let what = if self.buffer.begins_with(&TLS_ALERT) {
                "a remote server speaks TLS only: name the certificates to trust it by, by remote_tls_ca_file"
            } else {
                "a remote server does not speak kvdepot's protocol"
            };
            let error = Error::new(ErrorKind::Protocol, what).with("server", &self.server.address);
            return Err(Refused::Foreign(error));
        }
        loop {
            out.clear();
            let welcomed =
                self.answer(|response| handshake.step(&response, &mut out)).map_err(Refused::Ours)?;
            if let Some(welcomed) = welcomed {
                return Ok(welcomed);
            }
            self.send(&out).map_err(Refused::Ours)?;
        }
    }

    /// Synchronises the server's namespaces with ours: it may have been unreachable while an epoch passed.
    ///
    /// A server asks its own tiers about a namespace that it does not know. If these hang, each question costs time, and
    /// the connection must be made before there is none left: the rest counts as refused.
    fn align(&mut self) -> Result<()> {
        let spaces = self.server.shared.spaces();
        let (mut refused, mut first) = (0, None);
        for (index, space) in spaces.iter().enumerate() {
            let outcome = self.align_one(space)?;
            let is_timeout = matches!(&outcome, Err(error) if error.kind() == ErrorKind::Timeout);
            // It is not found there, or owes a reset and is not used: the others are served.
            if let Err(error) = outcome {
                refused += 1;
                first.get_or_insert(error);
            }
            let unasked = spaces.len() - index - 1;
            if unasked > 0 && (is_timeout || self.is_half_over()) {
                refused += unasked;
                first.get_or_insert_with(|| self.server.too_late());
                break;
            }
        }
        if let Some(error) = first {
            tracing::warn!(
                server = %self.server.address, namespaces = refused, %error,
                "a remote server refused namespaces: their blocks are misses there until it takes them"
            );
        }
        Ok(())
    }

    fn is_half_over(&self) -> bool {
        self.deadline.saturating_duration_since(Instant::now()) < self.server.shared.config.timeout / 2
    }

    /// Returns the server's refusal inside. Any other failure ends the connection.
    fn align_one(&mut self, space: &Space) -> Result<Result<()>> {
        let server = self.server;
        let opened = match self.ask(&Request::Open { canonical: space.spec.canonical() })? {
            Ok(opened) => opened,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if opened.epoch < space.epoch {
            let request = Request::SetEpoch { namespace: opened.namespace, epoch: space.epoch };
            let mut lost = None;
            let moved = server.move_to(space, || match self.ask(&request) {
                Ok(answer) => answer.map(drop),
                Err(error) => Err(lost.insert(error).clone()),
            });
            return lost.map_or(Ok(moved), Err);
        }
        if opened.epoch > space.epoch {
            tracing::warn!(
                server = %server.address, namespace = %space.spec.root(), epoch = space.epoch,
                epoch_there = opened.epoch,
                "a remote server's namespace was reset by another depot: its blocks are misses until this depot follows"
            );
        }
        Ok(Ok(()))
    }

    /// Returns the server's refusal inside.
    fn ask(&mut self, request: &Request<'_>) -> Result<Result<Opened>> {
        let mut out = Vec::new();
        request.encode(0, &mut out)?;
        self.send(&out)?;
        self.answer(|response| match response {
            Response::Namespace { namespace, epoch, .. } => Ok(Ok(Opened { namespace, epoch })),
            Response::Failed { kind, message } => Ok(Err(Error::new(kind, message))),
            _ => {
                Err(Error::new(ErrorKind::Protocol, "a remote server answered something else than was asked"))
            }
        })
    }

    fn answer<T>(&mut self, take: impl FnOnce(Response<'_>) -> Result<T>) -> Result<T> {
        loop {
            if let Some(frame) = self.buffer.next_frame()? {
                return take(Response::decode(frame)?.1).map_err(|e| e.with("server", &self.server.address));
            }
            self.receive()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt;

    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_found_out_within_a_minute() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        keep_alive(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let probes = sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        assert!(sockopt::tcp_keepidle(&stream).unwrap() + probes <= Duration::from_secs(60));
    }

    #[test]
    fn no_address_takes_the_time_of_those_behind_it() {
        let whole = Duration::from_secs(2);
        for count in [1_usize, 2, 3, 64] {
            let mut left = whole;
            for untried in (1..=count).rev() {
                let share = share_of(left, untried);
                let fair = whole / u32::try_from(count).unwrap();
                assert!(share.abs_diff(fair) < Duration::from_micros(1), "{untried} of {count}: {share:?}");
                left -= share;
            }
            assert!(left.is_zero(), "the last one may use what is left");
            // Later addresses get the time that earlier ones did not use.
            assert_eq!(share_of(whole, 1), whole);
        }
        assert!(share_of(Duration::ZERO, 2).is_zero());
    }
}
