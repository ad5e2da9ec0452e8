//! TLS to a server, by rustls: the trusted certificates, and a socket with TLS.

use std::io::{ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Result as IoResult, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::REMOTE_SEND_BYTES_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::tcp::{again, bound};

/// Bytes received from a socket at a time: a few TLS records.
const RECEIVE_BYTES: usize = 64 << 10;

/// Certificates that servers must be trusted by. If it is set, they must use TLS.
#[derive(Clone, Debug)]
pub struct RemoteTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
}

impl RemoteTls {
    /// Trusts the certificates of a PEM file, and those that they have signed. Servers must have a certificate for
    /// `server_name`, or, without one, for the configured host of each.
    pub fn new(ca_file: &Path, server_name: Option<&str>) -> Result<Self> {
        let bad = |what: &str| {
            Error::new(ErrorKind::Config, what.to_owned())
                .with("tier", "Remote")
                .with("path", ca_file.display())
        };
        let wanted = "cannot read the certificates to trust servers by: they must be PEM";
        let certificates = CertificateDer::pem_file_iter(ca_file)
            .and_then(|all| all.collect::<Result<Vec<_>, _>>())
            .map_err(|e| bad(wanted).with_source(e))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            roots
                .add(certificate)
                .map_err(|e| bad("a certificate cannot be used to trust servers by").with_source(e))?;
        }
        if roots.is_empty() {
            return Err(bad("there is no certificate in the file to trust servers by: it must be PEM"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| bad("TLS cannot be set up").with_source(e))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let server_name = server_name.map(|name| named(name).map_err(|e| e.with("key", "tls_server_name")));
        Ok(Self { config: Arc::new(config), server_name: server_name.transpose()? })
    }

    /// Returns the name for which a server at `host:port` must have a certificate.
    pub(super) fn name_of(&self, address: &str) -> Result<ServerName<'static>> {
        if let Some(name) = &self.server_name {
            return Ok(name.clone());
        }
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        named(host.trim_start_matches('[').trim_end_matches(']')).map_err(|e| e.with("server", address))
    }

    /// Completes the handshake, which ends by `deadline` in any case.
    pub(super) fn connect(&self, tcp: TcpStream, address: &str, deadline: Instant) -> Result<TlsSocket> {
        let failed = |kind: ErrorKind, what: &str| Error::new(kind, what.to_owned()).with("server", address);
        let name = self.name_of(address)?;
        let shown = name.to_str().into_owned();
        let mut session = ClientConnection::new(Arc::clone(&self.config), name).map_err(|e| {
            failed(ErrorKind::Config, "TLS to a remote server cannot be set up").with_source(e)
        })?;
        session.set_buffer_limit(Some(REMOTE_SEND_BYTES_MAX));
        let lost = |e: std::io::Error| match e.kind() {
            IoKind::TimedOut | IoKind::WouldBlock => {
                failed(ErrorKind::Timeout, "a remote server did not end its TLS handshake in time")
            }
            _ => failed(ErrorKind::Unavailable, "a remote server disconnected during the TLS handshake")
                .with_source(e),
        };
        while session.is_handshaking() || session.wants_write() {
            bound(&tcp, deadline).map_err(lost)?;
            if session.wants_write() {
                again(|| session.write_tls(&mut &tcp)).map_err(lost)?;
                continue;
            }
            if again(|| session.read_tls(&mut &tcp)).map_err(lost)? == 0 {
                return Err(lost(IoKind::UnexpectedEof.into()));
            }
            if let Err(error) = session.process_new_packets() {
                // Tells the server why, if it is still listening.
                let _ = session.write_tls(&mut &tcp);
                return Err(match error {
                    rustls::Error::InvalidCertificate(_) => failed(
                        ErrorKind::Permission,
                        "a remote server's certificate is refused: it must be vouched for by remote_tls_ca_file, and \
                         for the name that is expected",
                    )
                    .with("name", shown),
                    _ => failed(ErrorKind::Protocol, "no TLS handshake with a remote server: does it speak TLS?"),
                }
                .with_source(error));
            }
        }
        let received = Received { bytes: vec![0; RECEIVE_BYTES], from: 0, to: 0 };
        Ok(TlsSocket {
            tcp,
            session: Mutex::new(session),
            sending: Mutex::default(),
            received: Mutex::new(received),
        })
    }
}

fn named(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).map_err(|e| {
        Error::new(ErrorKind::Config, "a certificate cannot be for this name")
            .with("name", name)
            .with_source(e)
    })
}

/// Bytes received from the socket that are not decrypted yet.
#[derive(Debug)]
struct Received {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

/// A socket with TLS. The session is locked only while it works on memory, never while the socket waits, so one thread
/// can send while another waits for bytes. Every message has its length, so an end without a close alert cannot
/// truncate one unnoticed.
#[derive(Debug)]
pub(super) struct TlsSocket {
    tcp: TcpStream,
    session: Mutex<ClientConnection>,
    /// Locked until all bytes are sent, because they must be sent in the order of their encryption.
    sending: Mutex<Vec<u8>>,
    received: Mutex<Received>,
}

impl TlsSocket {
    pub(super) const fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Encrypts as many bytes as are taken at a time, and sends all of them.
    pub(super) fn send(&self, bufs: &[IoSlice<'_>]) -> IoResult<usize> {
        let mut out = self.sending.lock();
        out.clear();
        let count = {
            let mut session = self.session.lock();
            let count = session.writer().write_vectored(bufs)?;
            while session.wants_write() {
                session.write_tls(&mut *out)?;
            }
            count
        };
        (&self.tcp).write_all(&out)?;
        Ok(count)
    }

    /// Fills `bufs` with the bytes that have arrived; waits only if there are none.
    pub(super) fn receive(&self, bufs: &mut [IoSliceMut<'_>]) -> IoResult<usize> {
        let mut received = self.received.lock();
        let Received { bytes, from, to } = &mut *received;
        let (mut count, mut at) = (0, (0, 0));
        loop {
            {
                let mut session = self.session.lock();
                loop {
                    let (taken, is_over) = take(&mut session, bufs, &mut at)?;
                    count += taken;
                    if is_over || (*from == *to && count > 0) {
                        return Ok(count);
                    }
                    if *from == *to {
                        break;
                    }
                    *from += session.read_tls(&mut &bytes[*from..*to])?;
                    session.process_new_packets().map_err(|e| std::io::Error::new(IoKind::InvalidData, e))?;
                }
            }
            (*from, *to) = (0, 0);
            *to = (&self.tcp).read(bytes)?;
            if *to == 0 {
                return Ok(0);
            }
        }
    }
}

/// Copies decrypted bytes to `bufs`, from `at` on. Returns how many, and whether that is all: `bufs` are full, or the
/// peer has closed the session.
fn take(
    session: &mut ClientConnection,
    bufs: &mut [IoSliceMut<'_>],
    at: &mut (usize, usize),
) -> IoResult<(usize, bool)> {
    let mut count = 0;
    while let Some(buf) = bufs.get_mut(at.0) {
        if at.1 == buf.len() {
            *at = (at.0 + 1, 0);
            continue;
        }
        match session.reader().read(&mut buf[at.1..]) {
            Ok(0) => return Ok((count, true)),
            Ok(taken) => {
                at.1 += taken;
                count += taken;
            }
            Err(e) if e.kind() == IoKind::WouldBlock => return Ok((count, false)),
            Err(e) => return Err(e),
        }
    }
    Ok((count, true))
}
