//! The Remote tier over TLS: the same answers, and no data to or from a server other than the intended one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{LONG, config, embedded, spec};
use crate::pool::{hand_over, layout, over, until};
use crate::wire::Wired;
use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::{self, Bench};
use kvdepot_tier::{RemoteConfig, RemoteProtocol, RemoteTier, RemoteTls, Tier, TierServer};
use kvdepot_wire::own::Token;
use serde_json::json;

const TOKEN: &str = "a token of these tests";

/// Certificate and key of a server, and the file with which a client trusts it.
struct Identity {
    directory: tempfile::TempDir,
}

impl Identity {
    fn of(names: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        std::fs::write(directory.path().join("certificate.pem"), made.cert.pem()).unwrap();
        std::fs::write(directory.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        std::fs::write(directory.path().join("token"), TOKEN).unwrap();
        Self { directory }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Opens a server with this identity and a token.
    fn open(&self) -> Wired {
        let tls = json!({"certificate_file": self.file("certificate.pem"), "key_file": self.file("key.pem")});
        Wired::open(config(128 << 20, json!({})), json!({"tls": tls, "token_file": self.file("token")}))
    }

    fn trust(&self, server_name: Option<&str>) -> RemoteTls {
        RemoteTls::new(&self.file("certificate.pem"), server_name).unwrap()
    }
}

fn client(servers: &[&str], tls: Option<RemoteTls>) -> RemoteConfig {
    let mut config = RemoteConfig::new(servers.iter().copied());
    config.token = Some(Token::new(TOKEN.as_bytes()).unwrap());
    config.tls = tls;
    config.timeout = LONG;
    (config.absent_ttl, config.present_ttl) = (LONG * 60, LONG * 60);
    config
}

/// Returns the state of a server after a client has tried to reach it.
fn refused(config: RemoteConfig) -> TierServer {
    let tier = RemoteTier::open(config).unwrap();
    until("a try", || tier.servers()[0].failures > 0);
    let state = tier.servers()[0].clone();
    assert!(!state.up && state.connections == 0, "{state:?}");
    state
}

fn says(state: &TierServer, what: &str) {
    assert!(state.last_error.as_ref().unwrap().contains(what), "{state:?}");
}

#[test]
fn the_conformance_suite_passes_over_tls() {
    let identity = Identity::of(&["127.0.0.1"]);
    let servers = std::cell::RefCell::new(Vec::new());
    let open = |server: &Wired| {
        let config = client(&[&server.at.to_string()], Some(identity.trust(None)));
        Arc::new(RemoteTier::open(config).unwrap()) as Arc<dyn Tier>
    };
    conformance::check(&|| {
        let server = identity.open();
        let tier = open(&server);
        servers.borrow_mut().push(server);
        tier
    });
    let server = identity.open();
    conformance::check_persistent(&|| open(&server));
}

/// As configured by users: blocks dumped by one depot are found by another one, through TLS and with a token.
#[test]
fn depots_hand_over_through_tls() {
    let identity = Identity::of(&["pool.test"]);
    let server = identity.open();
    let remote = json!({
        "token_file": identity.file("token"), "tls_ca_file": identity.file("certificate.pem"),
        "tls_server_name": "pool.test",
    });
    let depot = || embedded(over(server.at, "Cache|Remote", 64 << 20, &remote, &json!({})));
    let (producer, consumer) = (depot(), depot());
    let spec = spec("handover", layout());
    hand_over(&producer, &consumer, &spec);
}

#[test]
fn a_server_that_is_not_the_one_that_is_meant_gets_nothing() {
    let (identity, other) = (Identity::of(&["pool.test"]), Identity::of(&["pool.test"]));
    let server = identity.open();
    let at = server.at.to_string();
    let state = refused(client(&[&at], Some(other.trust(Some("pool.test")))));
    says(&state, "certificate is refused");
    says(&state, "invalid peer certificate");
    // Its certificate does not contain the name in the address.
    let state = refused(client(&[&at], Some(identity.trust(None))));
    says(&state, "certificate is refused");
    says(&state, "127.0.0.1");
    assert_eq!(server.stat("pool_blocks"), 0);
    // The other one of the two servers is used normally.
    let good = other.open();
    let config = client(&[&at, &good.at.to_string()], Some(other.trust(Some("pool.test"))));
    let bench = Bench::new(Arc::new(RemoteTier::open(config).unwrap()));
    let servers = || bench.tier.servers();
    until("both tried", || servers()[0].failures > 0 && servers()[1].up);
    let written = (0..32).filter(|&n| bench.write(n).is_ok()).count();
    assert!((1..32).contains(&written), "{written} of 32 at the server that is trusted");
    assert_eq!((0..32).filter(|&n| bench.read_is_right(n)).count(), written);
    assert_eq!((server.stat("pool_blocks"), good.stat("pool_blocks")), (0, written as u64));
}

#[test]
fn tls_on_one_side_only_says_so() {
    let identity = Identity::of(&["127.0.0.1"]);
    let (tls, plain) = (identity.open(), Wired::open(config(16 << 20, json!({})), json!({})));
    let state = refused(client(&[&plain.at.to_string()], Some(identity.trust(None))));
    says(&state, "TLS handshake");
    for protocol in [RemoteProtocol::Auto, RemoteProtocol::Kvdepot] {
        let state = refused(RemoteConfig { token: None, protocol, ..client(&[&tls.at.to_string()], None) });
        says(&state, "speaks TLS only");
    }
}

/// P2: the handshake has the same time limit as any answer.
#[test]
fn a_server_that_ends_no_handshake_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let identity = Identity::of(&["127.0.0.1"]);
    let at = silent.local_addr().unwrap().to_string();
    let config =
        RemoteConfig { timeout: Duration::from_secs(2), ..client(&[&at], Some(identity.trust(None))) };
    says(&refused(config), "TLS handshake in time");
}

#[test]
fn what_cannot_be_trusted_by_is_refused_at_the_start() {
    let identity = Identity::of(&["127.0.0.1"]);
    let nothing = identity.file("nothing.pem");
    std::fs::write(&nothing, "nothing").unwrap();
    let tls = |path: &Path, name: Option<&str>| {
        let mut value = json!({"servers": ["h:1"], "tls_ca_file": path});
        value["tls_server_name"] = json!(name);
        RemoteConfig::from_json(&value)
    };
    let good = identity.file("certificate.pem");
    assert!(tls(&good, Some("pool.test")).unwrap().tls.is_some());
    for (path, name, wants) in [
        (&nothing, None, "no certificate"),
        (&identity.file("not there"), None, "not there"),
        (&good, Some("not a name"), "not a name"),
    ] {
        let error = tls(path, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(wants), "{error}");
    }
    let error = RemoteConfig::from_json(&json!({"servers": ["h:1"], "tls_server_name": "x"})).unwrap_err();
    assert!(error.to_string().contains("tls_ca_file"), "{error}");
}
