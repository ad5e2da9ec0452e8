//! The HTTP answers of a depot at its socket and its port for metrics.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use common::{LONG, Served, config, hash, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_depot::Depot;
use kvdepot_server::StatusDoor;
use kvdepot_server::http::socket_of;
use serde_json::json;

fn ask(stream: impl Read + Write, request: &str) -> (u16, String) {
    ask_with(stream, request, "Host: localhost")
}

fn ask_with(stream: impl Read + Write, request: &str, headers: &str) -> (u16, String) {
    try_to_ask(stream, request, headers).expect("the door closed a connection without an answer")
}

/// `None` if the door closes the connection without an answer.
fn try_to_ask(mut stream: impl Read + Write, request: &str, headers: &str) -> Option<(u16, String)> {
    let head = format!("{request} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let status = text.split(' ').nth(1)?.parse().unwrap();
    Some((status, text.split_once("\r\n\r\n").unwrap().1.to_owned()))
}

/// Reads an answer after which the connection stays open.
fn read_answer(stream: &mut impl Read) {
    let mut text = String::new();
    let mut is_whole = false;
    while !is_whole {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
        is_whole = text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            let mut lengths = head.lines().filter_map(|line| line.split_once(": "));
            let length = lengths.find(|(name, _)| name.eq_ignore_ascii_case("content-length")).unwrap().1;
            body.len() == length.parse::<usize>().unwrap()
        });
    }
}

fn at_socket(socket: &Path, request: &str) -> (u16, String) {
    let stream = UnixStream::connect(socket_of(socket)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    ask(stream, request)
}

fn depot(more: serde_json::Value) -> Arc<Depot> {
    Arc::new(Depot::start(config(8 << 20, more)).unwrap())
}

#[test]
fn a_depot_without_a_wire_door_tells_its_health_status_and_metrics() {
    let mut served = Served::start(config(8 << 20, json!({})));
    let attachment = served.attach();
    let http = socket_of(&served.socket);
    assert_eq!(std::fs::metadata(&http).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(at_socket(&served.socket, "GET /health"), (200, "{\"status\":\"ok\"}".to_owned()));
    let (code, status) = at_socket(&served.socket, "GET /status");
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!((code, &status["pid"]), (200, &json!(std::process::id())));
    assert_eq!(at_socket(&served.socket, "POST /status").0, 405);
    let (code, why) = at_socket(&served.socket, "GET /nothing");
    assert_eq!(code, 404);
    assert!(why.contains("/metrics"), "{why}");
    let (code, metrics) = at_socket(&served.socket, "GET /metrics");
    assert_eq!(code, 200);
    assert!(metrics.lines().any(|line| line == "kvdepot_pool_bytes 8388608"), "{metrics}");
    drop(attachment);
    served.stop();
    assert!(!http.exists(), "it goes with the depot");
}

#[test]
fn the_status_page_comes_from_nowhere_else_and_its_json_tells_the_configuration() {
    let served = Served::start(config(8 << 20, json!({})));
    let _attachment = served.attach();
    let mut stream = UnixStream::connect(socket_of(&served.socket)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, page) = text.split_once("\r\n\r\n").unwrap();
    let head = head.to_lowercase();
    assert!(head.starts_with("http/1.1 200"), "{head}");
    for header in [
        "content-type: text/html; charset=utf-8",
        "content-security-policy: default-src 'none'; script-src 'sha256-",
        "frame-ancestors 'none'",
        "x-content-type-options: nosniff",
        "x-frame-options: deny",
        "referrer-policy: no-referrer",
        "cache-control: no-store",
    ] {
        assert!(head.contains(header), "{header} is not in\n{head}");
    }
    assert!(!head.contains("unsafe-inline"), "{head}");
    assert!(!page.contains("http://") && !page.contains("https://"), "nothing comes from elsewhere");
    let (code, said) = at_socket(&served.socket, "GET /config");
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &said["pool_bytes"]), (200, &json!(8 << 20)));
    assert!(said["pipeline"].is_string(), "{said}");
    let (code, errors) = at_socket(&served.socket, "GET /errors");
    assert_eq!(code, 200);
    assert!(serde_json::from_str::<serde_json::Value>(&errors).unwrap().is_array(), "{errors}");
    assert_eq!(at_socket(&served.socket, "POST /errors").0, 405);
    assert_eq!(at_socket(&served.socket, "POST /").0, 405);
    assert_eq!(at_socket(&served.socket, "POST /config").0, 405);
}

/// The pages that `kvdepot why` reads.
#[test]
fn misses_are_told_and_what_is_no_question_is_refused() {
    let served = Served::start(config(8 << 20, json!({})));
    let _attachment = served.attach();
    let asked = |request: &str| {
        let (code, said) = at_socket(&served.socket, request);
        (code, serde_json::from_str::<serde_json::Value>(&said).unwrap())
    };
    for request in ["GET /misses", "GET /misses?last=0", "GET /misses?last=99999&request=a%20b"] {
        let (code, said) = asked(request);
        assert_eq!((code, &said["misses"], &said["kept"]), (200, &json!([]), &json!(256)), "{request}");
    }
    for (request, code) in [
        ("GET /misses?last=many", 400),
        ("POST /misses", 405),
        ("GET /why", 400),
        ("GET /why?namespace=3f2a", 404),
        ("GET /why?namespace=3f2a&hash=12", 400),
        ("POST /why?namespace=3f2a", 405),
    ] {
        let (answered, said) = asked(request);
        assert_eq!((answered, said["error"].is_string()), (code, true), "{request}: {said}");
    }
}

/// The page that `kvdepot reset` and other commands read if no directory lists a namespace.
#[test]
fn namespaces_are_told_with_descriptions_that_open_them() {
    let served = Served::start(config(8 << 20, json!({})));
    let attachment = served.attach();
    let asked = |request: &str| {
        let (code, said) = at_socket(&served.socket, request);
        (code, serde_json::from_str::<serde_json::Value>(&said).unwrap())
    };
    assert_eq!(asked("GET /namespaces"), (200, json!({"namespaces": [], "next": null})));
    let layout = || BlockLayout::uniform(2, &[4096, 64]).unwrap();
    let tiny = spec("tiny", layout());
    attachment.register(&tiny).unwrap();
    attachment.register(&spec("other", layout())).unwrap();
    attachment.reset(&[Arc::clone(&tiny)]).unwrap();
    let name = tiny.root().to_string();
    let (_, said) = asked(&format!("GET /namespaces?namespace={}", name[..20].to_uppercase()));
    let [one] = &said["namespaces"].as_array().unwrap()[..] else { panic!("{said}") };
    let described = json!({"facts": one["facts"], "layout": one["layout"]}).to_string();
    assert_eq!(NamespaceSpec::from_canonical(&described).unwrap(), *tiny);
    assert_eq!((&one["namespace"], &one["epoch"], &one["pool_blocks"]), (&json!(name), &json!(1), &json!(0)));
    assert_eq!(asked("GET /namespaces").1["namespaces"].as_array().unwrap().len(), 2);
    for (request, code) in [("GET /namespaces?after=x", 400), ("POST /namespaces", 405)] {
        let (answered, said) = asked(request);
        assert_eq!((answered, said["error"].is_string()), (code, true), "{request}: {said}");
    }
}

/// Whoever scrapes the port for metrics need not scrape the listener's own HTTP port, too.
#[test]
fn the_metrics_include_those_of_the_network_listener() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let mut wired = wire::Wired::over(Depot::start_private(config(1 << 20, json!({}))).unwrap(), json!({}));
    let door = StatusDoor::open(&socket, &wired.depot);
    let accepted = |text: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix("kvdepot_wire_connections_accepted_total "));
        line.map(|count| count.parse::<u64>().unwrap())
    };
    assert_eq!(accepted(&at_socket(&socket, "GET /metrics").1), None);
    door.show_listener(wired.series());
    assert_eq!(accepted(&at_socket(&socket, "GET /metrics").1), Some(0));
    wired.own(None).unwrap();
    let text = at_socket(&socket, "GET /metrics").1;
    assert_eq!(accepted(&text), Some(1));
    assert!(text.contains("kvdepot_pool_bytes "), "{text}");
    wired.close();
}

#[test]
fn many_namespaces_are_told_in_pieces() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let depot = depot(json!({}));
    let _door = StatusDoor::open(&socket, &depot);
    let user = depot.direct();
    let specs: Vec<_> =
        (0..300).map(|n| spec(&n.to_string(), BlockLayout::uniform(1, &[64]).unwrap())).collect();
    let descriptions: Vec<String> = specs.iter().map(|spec| spec.canonical().to_owned()).collect();
    user.open_namespaces(&descriptions).unwrap();
    let (mut told, mut after, mut pieces) = (Vec::new(), String::new(), 0);
    loop {
        let said = at_socket(&socket, &format!("GET /namespaces?{after}")).1;
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        told.extend(said["namespaces"].as_array().unwrap().iter().map(|one| one["namespace"].clone()));
        pieces += 1;
        match said["next"].as_u64() {
            Some(next) => after = format!("after={next}"),
            None => break,
        }
    }
    let mut expected: Vec<_> = specs.iter().map(|spec| json!(spec.root().to_string())).collect();
    let by_name = |name: &serde_json::Value| name.as_str().unwrap().to_owned();
    told.sort_by_key(by_name);
    expected.sort_by_key(by_name);
    assert_eq!((told, pieces), (expected, 2));
}

/// A number added to `stat` must be described there, too.
#[test]
fn every_number_of_the_status_is_a_series_with_help() {
    let served = Served::start(config(8 << 20, json!({})));
    let _attachment = served.attach();
    let status: serde_json::Value =
        serde_json::from_str(&at_socket(&served.socket, "GET /status").1).unwrap();
    let metrics = at_socket(&served.socket, "GET /metrics").1;
    for (name, _) in status.as_object().unwrap().iter().filter(|(_, value)| value.is_u64()) {
        let name = match name.strip_suffix("_us").or_else(|| name.strip_suffix("_s")) {
            _ if name == "pid" => continue,
            Some(stem) => format!("{stem}_seconds"),
            None => name.clone(),
        };
        assert!(metrics.contains(&format!("# HELP kvdepot_{name} ")), "{name} is not in\n{metrics}");
    }
}

#[test]
fn a_depot_serves_without_what_it_cannot_tell_its_status_at() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    std::fs::write(socket_of(&socket), "something of somebody's").unwrap();
    let door = StatusDoor::open(&socket, &depot(json!({"metrics_port": taken.local_addr().unwrap().port()})));
    assert_eq!(door.port_address(), None);
    drop(door);
    assert_eq!(std::fs::read_to_string(socket_of(&socket)).unwrap(), "something of somebody's");
}

#[test]
fn the_port_is_the_loopbacks_and_silent_connections_make_room() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let door = StatusDoor::open(&socket, &depot(json!({"metrics_port": 0})));
    let at = door.port_address().unwrap();
    assert!(at.ip().is_loopback());
    // Accepted, because its first request is answered, and idle from then on.
    let mut local = UnixStream::connect(socket_of(&socket)).unwrap();
    local.set_read_timeout(Some(LONG)).unwrap();
    local.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    read_answer(&mut local);
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(at).unwrap()).collect();
    let asked = || {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        try_to_ask(stream, "GET /health", "Host: localhost")
    };
    // A silent connection that the door accepts later may displace one whose request has not been read.
    let (end, mut answered) = (Instant::now() + LONG, 0);
    while answered < 3 {
        assert!(Instant::now() < end, "silent connections keep others out");
        if let Some((status, _)) = asked() {
            assert_eq!(status, 200);
            answered += 1;
        }
    }
    assert_eq!(ask(local, "GET /health").0, 200, "connections to the port displace nobody at the socket");
    drop(silent);
}

#[test]
fn the_port_answers_no_web_page() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let door = StatusDoor::open(&socket, &depot(json!({"metrics_port": 0})));
    let asked = |request: &str, headers: &str| {
        let stream = TcpStream::connect(door.port_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        ask_with(stream, request, headers)
    };
    for request in ["GET /", "GET /config", "GET /errors", "GET /status", "GET /metrics"] {
        for own in [
            "Host: localhost:1",
            "Host: 127.0.0.1",
            "Host: localhost\r\nSec-Fetch-Site: none",
            "Host: localhost\r\nSec-Fetch-Site: same-origin",
        ] {
            assert_eq!(asked(request, own).0, 200, "{request} {own}");
        }
        for page in [
            "Host: evil.example",
            "Host: localhost\r\nOrigin: null",
            "Host: localhost\r\nSec-Fetch-Site: cross-site",
            "Host: evil.example\r\nSec-Fetch-Site: same-origin",
        ] {
            let (code, said) = asked(request, page);
            assert_eq!(code, 403, "{request} {page}");
            assert!(!said.contains("pool"), "{said}");
        }
    }
    assert_eq!(asked("GET /health", "Host: probe.example").0, 200);
    // Every user of the machine reaches the port.
    for request in ["GET /misses", "GET /misses?last=3", "GET /namespaces", "GET /why?namespace=3f2a"] {
        let (code, said) = asked(request, "Host: localhost");
        assert_eq!(code, 403, "{request}");
        let place = socket_of(&socket).display().to_string();
        assert!(said.contains(&place) && !said.contains("hash"), "{said}");
    }
    // No browser reaches the socket, so any Host is accepted there.
    for request in ["GET /status", "GET /misses"] {
        let stream = UnixStream::connect(socket_of(&socket)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(ask_with(stream, request, "Host: depot").0, 200);
    }
}

#[test]
fn a_door_leaves_the_socket_of_the_one_that_took_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let first = StatusDoor::open(&socket, &depot(json!({})));
    let second = StatusDoor::open(&socket, &depot(json!({})));
    drop(first);
    assert_eq!(at_socket(&socket, "GET /health").0, 200);
    drop(second);
    assert!(!socket_of(&socket).exists());
}

/// As at the network listener: numbers for everyone, the depot's state and its blocks for those with the token.
#[test]
fn a_port_on_the_network_asks_for_its_token() {
    const TOKEN: &str = "the token of these tests";
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let file = directory.path().join("token");
    std::fs::write(&file, TOKEN).unwrap();
    let more = json!({"metrics_port": 0, "metrics_host": "0.0.0.0", "metrics_token_file": file});
    let depot = depot(more);
    let direct = depot.direct();
    let spec = spec("a", BlockLayout::uniform(1, &[4096]).unwrap());
    let used = direct.open_namespace(spec.canonical()).unwrap();
    assert_eq!(direct.prefix(used.handle, &hash(1).0).unwrap(), 0);
    let door = StatusDoor::open(&socket, &depot);
    let at = door.port_address().unwrap();
    assert!(at.ip().is_unspecified(), "{at}");
    let asked = |request: &str, token: Option<&str>| {
        let stream = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let sent = token.map_or(String::new(), |token| format!("\r\nAuthorization: Bearer {token}"));
        // A name that only the network knows: a scraper's service discovery may use one.
        ask_with(stream, request, &format!("Host: depot.cluster.example{sent}"))
    };
    for request in ["GET /", "GET /health", "GET /metrics"] {
        assert_eq!(asked(request, None).0, 200, "{request}");
    }
    for request in
        ["GET /config", "GET /errors", "GET /history", "GET /misses", "GET /namespaces", "GET /status"]
    {
        assert_eq!(asked(request, None).0, 401, "{request}");
        assert_eq!(asked(request, Some("another token than that")).0, 401, "{request}");
        assert_eq!(asked(request, Some(TOKEN)).0, 200, "{request}");
    }
    let named = |token| asked("GET /metrics", token).1.contains("kvdepot_namespace_misses_total{");
    assert_eq!(
        (named(None), named(Some(TOKEN))),
        (false, true),
        "namespaces are named to those with the token"
    );
}

/// Without a token the checks against web pages hold at every address.
#[test]
fn a_port_on_the_network_without_a_token_answers_no_web_page() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let door = StatusDoor::open(&socket, &depot(json!({"metrics_port": 0, "metrics_host": "0.0.0.0"})));
    let asked = |headers: &str| {
        let stream = TcpStream::connect(("127.0.0.1", door.port_address().unwrap().port())).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        ask_with(stream, "GET /metrics", headers).0
    };
    assert_eq!((asked("Host: 10.0.0.7:9400"), asked("Host: evil.example")), (200, 403));
}

#[test]
fn a_port_whose_token_cannot_be_read_stays_closed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("depot.sock");
    let more = json!({"metrics_port": 0, "metrics_token_file": directory.path().join("missing")});
    let door = StatusDoor::open(&socket, &depot(more));
    assert_eq!(door.port_address(), None);
    assert_eq!(at_socket(&socket, "GET /health").0, 200);
}
