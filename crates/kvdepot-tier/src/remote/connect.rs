//! Connecting to a server: detect its protocol, prove the token, synchronise namespaces.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvdepot_core::limits::REMOTE_IDLE_LOOK_MS;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::header::MAGIC;
use kvdepot_wire::own::{ClientHandshake, Request, Response, Welcomed};

use super::config::RemoteProtocol;
use super::infini::epochs::greet;
use super::job::Opened;
use super::server::{Dialect, Server};
use super::socket::Socket;
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
}

/// Reason of a failed hello.
enum Refused {
    /// The peer is no server of ours, or did not answer.
    Foreign(Error),
    /// It is our server, but refuses us.
    Ours(Error),
}

/// Connects and completes the handshake of the server's protocol.
pub(super) fn connect(server: &Server) -> Result<Link> {
    let config = &server.shared.config;
    if config.protocol == RemoteProtocol::Infinistore {
        return infinistore(server);
    }
    let begun = Instant::now();
    match own(server) {
        Ok(link) => Ok(link),
        Err(Refused::Ours(error)) => Err(error),
        // Without the proof of a token, anyone could pose as the server and get our blocks.
        Err(Refused::Foreign(error)) if config.protocol == RemoteProtocol::Auto && config.token.is_none() => {
            if begun.elapsed() >= config.timeout {
                // A second silence must not be waited for (P2).
                server.went(&error, false);
            }
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
    let Welcomed { requests_in_flight_max, depot, .. } = welcomed;
    Ok(Link { stream, buffer, dialect: Dialect::Own, depot: Some(depot), requests_in_flight_max })
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
        Error::io("a remote server disconnected during the handshake", e).with("server", &self.server.address)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        (&self.stream).write_all(bytes).map_err(|e| self.lost(e))
    }

    fn hello(&mut self) -> Result<Welcomed, Refused> {
        let nonce = kvdepot_io::random::bytes().map_err(Refused::Ours)?;
        let mut out = Vec::new();
        let token = self.server.shared.config.token.clone();
        let mut handshake = ClientHandshake::begin(token, 0, nonce, &mut out).map_err(Refused::Ours)?;
        self.send(&out).map_err(Refused::Foreign)?;
        let mut magic = [0; 4];
        let came = (&self.stream).read_exact(&mut magic);
        // A slow server of ours must not be mistaken for another kind.
        let known = self.server.dialect() == Some(Dialect::Own);
        match came {
            Err(e) if known => return Err(Refused::Ours(self.lost(e))),
            Err(e) => return Err(Refused::Foreign(self.lost(e))),
            Ok(()) if magic != MAGIC.to_le_bytes() => {
                let what = if magic[..2] == TLS_ALERT {
                    "a remote server speaks TLS only: name the certificates to trust it by, by remote_tls_ca_file"
                } else {
                    "a remote server does not speak kvdepot's protocol"
                };
                let error = Error::new(ErrorKind::Protocol, what).with("server", &self.server.address);
                return Err(Refused::Foreign(error));
            }
            Ok(()) => self.buffer.extend(&magic),
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
    fn align(&mut self) -> Result<()> {
        let server = self.server;
        for space in server.shared.spaces() {
            let opened = self.ask(&Request::Open { canonical: space.spec.canonical() })?;
            if opened.epoch < space.epoch {
                let request = Request::SetEpoch { namespace: opened.namespace, epoch: space.epoch };
                server.move_to(&space, || self.ask(&request).map(drop))?;
            } else if opened.epoch > space.epoch {
                tracing::warn!(
                    server = %self.server.address, namespace = %space.spec.root(), epoch = space.epoch,
                    epoch_there = opened.epoch,
                    "a remote server's namespace was reset by another depot: its blocks are misses until this depot follows"
                );
            }
        }
        Ok(())
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Opened> {
        let mut out = Vec::new();
        request.encode(0, &mut out)?;
        self.send(&out)?;
        self.answer(|response| match response.into_result()? {
            Response::Namespace { namespace, epoch, .. } => Ok(Opened { namespace, epoch }),
            _ => {
                Err(Error::new(ErrorKind::Protocol, "a remote server answered something else than was asked"))
            }
        })
    }

    fn answer<T>(&mut self, take: impl FnOnce(Response<'_>) -> Result<T>) -> Result<T> {
        let address = &self.server.address;
        loop {
            if let Some(frame) = self.buffer.next_frame()? {
                return take(Response::decode(frame)?.1).map_err(|e| e.with("server", address));
            }
            if Instant::now() > self.deadline {
                return Err(self.server.too_late());
            }
            let mut stream = &self.stream;
            let count =
                self.buffer.read_with(|room| again(|| stream.read(room))).map_err(|e| self.lost(e))?;
            if count == 0 {
                return Err(Error::new(ErrorKind::Closed, "a remote server closed while greeting")
                    .with("server", address));
            }
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
