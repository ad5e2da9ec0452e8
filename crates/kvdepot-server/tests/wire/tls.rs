//! TLS at the wire door: the same answers with it, and none without it.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::common::{LONG, config};
use crate::wire::{Wired, bytes, connect, is_closed};
use kvdepot_core::ErrorKind;
use kvdepot_wire::infini::{Reply, Request, TcpOp};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// Opens a server with its own certificate. Returns it with the client's configuration that trusts it.
fn open(directory: &Path) -> (Wired, Arc<ClientConfig>) {
    open_with(directory, json!({"drain_ms": 20_000}))
}

/// The same, with additional configuration of the door.
fn open_with(directory: &Path, mut wire: serde_json::Value) -> (Wired, Arc<ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(vec!["depot.test".to_owned()]).unwrap();
    let (certificate, key) = (directory.join("certificate.pem"), directory.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    wire["tls"] = json!({"certificate_file": certificate, "key_file": key});
    let wired = Wired::open(config(64 << 20, json!({})), wire);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(made.cert.der().to_vec())).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    (wired, Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

fn tls(at: std::net::SocketAddr, config: &Arc<ClientConfig>) -> Tls {
    let name = ServerName::try_from("depot.test").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::clone(config), name).unwrap(), connect(at))
}

fn put(stream: &mut Tls, key: &str, value: &[u8]) -> Reply {
    let mut out = Vec::new();
    Request::Tcp { key: key.as_bytes(), op: TcpOp::Put(value.len() as u32) }.encode(&mut out).unwrap();
    stream.write_all(&out).unwrap();
    stream.write_all(value).unwrap();
    let mut code = [0; 4];
    stream.read_exact(&mut code).unwrap();
    Reply::Code(i32::from_le_bytes(code))
}

fn ask_for(stream: &mut Tls, key: &str) {
    let mut out = Vec::new();
    Request::Tcp { key: key.as_bytes(), op: TcpOp::Get }.encode(&mut out).unwrap();
    stream.write_all(&out).unwrap();
}

/// Returns the length of the value that follows.
fn begin_value(stream: &mut Tls) -> usize {
    let mut head = [0; 8];
    stream.read_exact(&mut head).unwrap();
    u32::from_le_bytes(head[4..].try_into().unwrap()) as usize
}

fn take_value(stream: &mut Tls) -> Vec<u8> {
    let mut value = vec![0; begin_value(stream)];
    stream.read_exact(&mut value).unwrap();
    value
}

fn get(stream: &mut Tls, key: &str) -> Vec<u8> {
    ask_for(stream, key);
    take_value(stream)
}

fn http(wired: &Wired, trust: &Arc<ClientConfig>, path: &str) -> String {
    let mut http = tls(wired.manage, trust);
    write!(http, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = http.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[test]
fn values_come_back_through_tls_until_the_door_closes() {
    let directory = tempfile::tempdir().unwrap();
    let (mut wired, trust) = open(directory.path());
    let mut stream = tls(wired.at, &trust);
    for len in [1, 4096, 100_000, 7_000_001] {
        assert_eq!(put(&mut stream, "key", &bytes(len, 1)), Reply::Code(200));
        assert!(get(&mut stream, "key") == bytes(len, 1), "{len} bytes");
    }
    let answer = http(&wired, &trust, "/kvmap_len");
    assert!(answer.ends_with("{\"len\":1}"), "{answer}");
    wired.close();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

/// P2, P4: it keeps neither its place nor descriptors nor buffers.
#[test]
fn who_stops_in_the_middle_of_an_answer_is_shown_out() {
    const LEN: usize = 30_000_000;
    let directory = tempfile::tempdir().unwrap();
    let (wired, trust) = open_with(directory.path(), json!({"stall_timeout_ms": 5_000}));
    let mut stopped = tls(wired.at, &trust);
    assert_eq!(put(&mut stopped, "large", &bytes(LEN, 1)), Reply::Code(200));
    ask_for(&mut stopped, "large");
    assert_eq!(begin_value(&mut stopped), LEN);
    let wanted =
        ["kvdepot_wire_connections 0", "kvdepot_wire_connections_refused_total{reason=\"timeout\"} 1"];
    let deadline = Instant::now() + LONG;
    loop {
        let metrics = http(&wired, &trust, "/metrics");
        if wanted.iter().all(|wanted| metrics.lines().any(|line| line == *wanted)) {
            break;
        }
        assert!(Instant::now() < deadline, "the connection does not end:\n{metrics}");
    }
    wired.wait_stat("pool_leased_bytes", 0);
    let mut rest = Vec::new();
    assert!(stopped.read_to_end(&mut rest).is_err(), "no orderly end says that this was all");
    assert!(rest.len() < LEN);
}

/// Requested values arrive even if the answers are read late and the peer has finished sending.
#[test]
fn the_last_answers_come_before_an_orderly_end() {
    let directory = tempfile::tempdir().unwrap();
    let (wired, trust) = open(directory.path());
    let mut stream = tls(wired.at, &trust);
    assert_eq!(put(&mut stream, "key", &bytes(3_000_001, 2)), Reply::Code(200));
    for _ in 0..3 {
        ask_for(&mut stream, "key");
    }
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    for _ in 0..3 {
        assert!(take_value(&mut stream) == bytes(3_000_001, 2));
    }
    // Without a close_notify this is an error.
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn without_tls_or_trust_there_is_no_answer() {
    let directory = tempfile::tempdir().unwrap();
    let (wired, _) = open(directory.path());
    let mut plain = wired.infini();
    plain.send(&Request::Exists(b"key"));
    let mut alert = Vec::new();
    let _ = plain.0.read_to_end(&mut alert);
    assert!(!alert.starts_with(&200i32.to_le_bytes()));
    let other = tempfile::tempdir().unwrap();
    let (_other, trust) = open(other.path());
    let mut stream = tls(wired.at, &trust);
    assert!(
        stream.write_all(b"x").and_then(|()| stream.read_exact(&mut [0])).is_err(),
        "another certificate"
    );
    let mut garbage = connect(wired.at);
    garbage.write_all(&[0xff; 100]).unwrap();
    let _ = is_closed(&mut garbage);
    wired.wait_stat("pool_leased_bytes", 0);
}

#[test]
fn certificates_that_cannot_be_used_are_refused_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nothing.pem");
    std::fs::write(&file, "nothing").unwrap();
    let depot = Arc::new(kvdepot_depot::Depot::start_private(config(16 << 20, json!({}))).unwrap());
    for path in [file, directory.path().join("not there")] {
        let wire = json!({"service_port": 0, "tls": {"certificate_file": path, "key_file": path}});
        let wire = kvdepot_server::WireConfig::from_json(&wire.to_string()).unwrap();
        let error = kvdepot_server::WireDoor::open(wire, &depot).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}
