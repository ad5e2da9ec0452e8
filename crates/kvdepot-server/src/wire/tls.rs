//! TLS around a connection, by rustls. The inner connection is a socket pair, so that it is served exactly as without
//! TLS. That costs one more copy each way, in addition to the encryption.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_buf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The longest time for a handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// Size of one copy: a few TLS records.
const COPY_BYTES: usize = 64 << 10;

/// Reads certificate chain and key, both PEM.
pub(super) fn acceptor(certificates: &Path, key: &Path) -> Result<TlsAcceptor> {
    let bad =
        |what: &str, path: &Path| Error::new(ErrorKind::Config, what.to_owned()).with("path", path.display());
    let unreadable = "cannot read the certificates: they must be PEM, the server's own first";
    let chain = CertificateDer::pem_file_iter(certificates)
        .and_then(|all| all.collect::<Result<Vec<_>, _>>())
        .map_err(|e| bad(unreadable, certificates).with_source(e))?;
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|e| bad("cannot read the private key: it must be PEM", key).with_source(e))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|e| bad("certificates and private key cannot be used", certificates).with_source(e))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Performs the handshake.
pub(super) async fn accept(acceptor: &TlsAcceptor, tcp: TcpStream) -> Result<TlsStream<TcpStream>> {
    // Complete messages are sent immediately on the inside, too.
    tcp.set_nodelay(true).map_err(|e| Error::io("cannot prepare a connection", e))?;
    let shaken = tokio::time::timeout(HANDSHAKE_WAIT, acceptor.accept(tcp)).await;
    let late = |_| Error::new(ErrorKind::Timeout, "a peer did not end its TLS handshake");
    shaken.map_err(late)?.map_err(|e| Error::new(ErrorKind::Protocol, "no TLS handshake").with_source(e))
}

/// Serves a TLS connection with `served`, which uses the other end of `inside`. After that has ended, its last bytes
/// have `patience` to leave: a peer that takes nothing keeps neither its place nor descriptors nor buffers (P2, P4).
pub(super) async fn around<S: AsyncRead + AsyncWrite, T>(
    outside: S,
    inside: UnixStream,
    served: impl Future<Output = T>,
    patience: Duration,
) -> T {
    let (mut carried, mut served) = (pin!(carry(outside, inside)), pin!(served));
    tokio::select! {
        outcome = &mut served => {
            if tokio::time::timeout(patience, carried).await.is_err() {
                tracing::debug!("a peer did not take the end of its TLS connection within {patience:?}");
            }
            outcome
        }
        () = &mut carried => served.await,
    }
}

/// Carries bytes between the TLS connection and `inside`, until `inside` has ended and its bytes are sent. Waits for
/// the peer without a limit.
async fn carry<S: AsyncRead + AsyncWrite>(outside: S, inside: UnixStream) {
    let (outside_read, mut outside_write) = tokio::io::split(outside);
    let (inside_read, mut inside_write) = inside.into_split();
    let out = async {
        let mut from = tokio::io::BufReader::with_capacity(COPY_BYTES, inside_read);
        let _ = copy_buf(&mut from, &mut outside_write).await;
        let _ = outside_write.shutdown().await;
    };
    let into = async {
        let mut from = tokio::io::BufReader::with_capacity(COPY_BYTES, outside_read);
        let _ = copy_buf(&mut from, &mut inside_write).await;
        let _ = inside_write.shutdown().await;
        // The peer has finished sending; its answers continue.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = out => {}
        () = into => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::time::Instant;

    use super::*;

    const STALL: Duration = Duration::from_secs(5);
    const WAY_BYTES: usize = 1000;
    /// More than can be in flight at a time.
    static LAST: [u8; 40_000] = [7; 40_000];

    /// Sends its last bytes and ends.
    async fn end(mut near: UnixStream) -> u32 {
        near.write_all(&LAST).await.unwrap();
        5
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_stops_keeps_nothing_after_the_end() {
        let ((near, far), (outside, mut peer)) = (UnixStream::pair().unwrap(), tokio::io::duplex(WAY_BYTES));
        let begun = Instant::now();
        assert_eq!(around(outside, far, end(near), STALL).await, 5);
        assert!(begun.elapsed() >= STALL);
        let mut rest = Vec::new();
        peer.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest.len(), WAY_BYTES, "nobody is there any more to send the rest");
    }

    /// Time is simulated: it advances as soon as nothing else can happen.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_is_only_late_is_given_the_last_bytes() {
        let ((near, far), (outside, mut peer)) = (UnixStream::pair().unwrap(), tokio::io::duplex(WAY_BYTES));
        let read = async {
            tokio::time::sleep(STALL * 2 / 3).await;
            let mut all = Vec::new();
            peer.read_to_end(&mut all).await.unwrap();
            all
        };
        let (outcome, all) = tokio::join!(around(outside, far, end(near), STALL), read);
        assert_eq!(outcome, 5);
        assert!(all == LAST);
    }
}
