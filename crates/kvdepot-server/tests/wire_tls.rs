//! TLS at the wire door: the same answers through it, and nothing without it.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use common::config;
use kvdepot_core::ErrorKind;
use kvdepot_wire::infini::{Reply, Request, TcpOp};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;
use wire::{Wired, bytes, connect, is_closed};

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A server with a certificate of its own, and what a client needs to trust it.
fn open(directory: &Path) -> (Wired, Arc<ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(vec!["depot.test".to_owned()]).unwrap();
    let (certificate, key) = (directory.join("certificate.pem"), directory.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = json!({"certificate_file": certificate, "key_file": key});
    let wired = Wired::open(config(64 << 20, json!({})), json!({"tls": tls, "drain_ms": 20_000}));
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

fn get(stream: &mut Tls, key: &str) -> Vec<u8> {
    let mut out = Vec::new();
    Request::Tcp { key: key.as_bytes(), op: TcpOp::Get }.encode(&mut out).unwrap();
    stream.write_all(&out).unwrap();
    let mut head = [0; 8];
    stream.read_exact(&mut head).unwrap();
    let mut value = vec![0; u32::from_le_bytes(head[4..].try_into().unwrap()) as usize];
    stream.read_exact(&mut value).unwrap();
    value
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
    let mut http = tls(wired.manage, &trust);
    http.write_all(b"GET /kvmap_len HTTP/1.1\r\nHost: depot\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = http.read_to_end(&mut answer);
    assert!(answer.ends_with(b"{\"len\":1}"), "{}", String::from_utf8_lossy(&answer));
    wired.close();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
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
