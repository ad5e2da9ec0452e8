//! P2, P4 and P7 at the wire door: no connection blocks others, everything has a limit, and shutdown is orderly.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::common::{LONG, config};
use crate::wire::{Wired, bytes, is_closed};
use kvdepot_core::ErrorKind;
use kvdepot_server::wire::WireConfig;
use kvdepot_wire::infini::{Reply, Request, TcpOp};
use serde_json::json;

const MIB: u64 = 1 << 20;

#[test]
fn two_thousand_idle_connections_leave_room_for_work() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"stall_timeout_ms": 3_600_000}));
    // Partial requests on some connections block no other.
    let idle: Vec<_> = (0..2000)
        .map(|i| {
            let mut tcp = wired.connect();
            if i % 10 == 0 {
                tcp.write_all(b"\xef\xbe\xad\xde").unwrap();
            }
            tcp
        })
        .collect();
    let mut client = wired.infini();
    for i in 0..20 {
        assert_eq!(client.put(&format!("k{i}"), &bytes(10_000, i)), Reply::Code(200));
        assert!(client.get(&format!("k{i}")).unwrap() == bytes(10_000, i));
    }
    let metrics = wired.http("GET /metrics", None).1;
    assert!(metrics.contains("\nkvdepot_wire_connections 2001\n"), "{metrics}");
    drop(idle);
}

#[test]
fn the_cap_on_connections_holds_and_frees_up() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"connections_max": 3}));
    let mut held: Vec<_> = (0..3).map(|_| wired.infini()).collect();
    assert!(held.iter_mut().all(|client| !client.exists("key")));
    assert!(is_closed(&mut wired.connect()));
    drop(held.pop());
    let deadline = Instant::now() + LONG;
    loop {
        let mut client = wired.infini();
        client.send(&Request::Exists(b"key"));
        let mut answer = [0; 8];
        if client.0.read_exact(&mut answer).is_ok() {
            break;
        }
        assert!(Instant::now() < deadline, "the place of a connection that ended is free again");
    }
    assert!(held.iter_mut().all(|client| !client.exists("key")), "those inside are not disturbed");
}

#[test]
fn who_stops_in_the_middle_is_shown_out_and_who_idles_is_not() {
    let wired = Wired::open(config(64 * MIB, json!({})), json!({"stall_timeout_ms": 5_000}));
    let mut client = wired.infini();
    client.put("large", &bytes(30_000_000, 1));
    // Half a header; half a value; an answer that is not read.
    let mut half_frame = wired.connect();
    half_frame.write_all(b"\xef\xbe\xad\xdeC").unwrap();
    let mut half_value = wired.infini();
    half_value.send(&Request::Tcp { key: b"key", op: TcpOp::Put(1000) });
    half_value.0.write_all(&[1; 500]).unwrap();
    let mut slow = wired.infini();
    slow.send(&Request::Tcp { key: b"large", op: TcpOp::Get });
    assert!(is_closed(&mut half_frame));
    assert!(is_closed(&mut half_value.0));
    wired.wait_stat("pool_leased_bytes", 0);
    wired.wait_stat("pool_filling_bytes", 0);
    let mut answer = Vec::new();
    let _ = slow.0.read_to_end(&mut answer);
    assert!(answer.len() < 30_000_000, "it was cut off");
    assert!(client.exists("large") && !client.exists("key"));
    // A connection is counted after it was closed.
    let counted = "connections_refused_total{reason=\"timeout\"} 3";
    let end = Instant::now() + LONG;
    while !wired.http("GET /metrics", None).1.contains(counted) {
        assert!(Instant::now() < end, "{}", wired.http("GET /metrics", None).1);
    }
}

/// Requests in flight finish, idle connections are closed, and new ones are refused.
#[test]
fn the_door_closes_in_order() {
    let mut wired = Wired::open(config(64 * MIB, json!({})), json!({"drain_ms": 20_000}));
    let mut idle = wired.infini();
    assert!(!idle.exists("key"));
    let mut busy = wired.infini();
    let put = Request::Tcp { key: b"key", op: TcpOp::Put(1_000_000) };
    busy.send(&put);
    busy.0.write_all(&bytes(1_000_000, 1)[..500_000]).unwrap();
    wired.wait_stat("pool_filling_bytes", (1 << 20) + 4096);
    let at = wired.at;
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| wired.close());
        assert!(is_closed(&mut idle.0));
        busy.0.write_all(&bytes(1_000_000, 1)[500_000..]).unwrap();
        assert_eq!(busy.reply(&put), Reply::Code(200));
        assert!(is_closed(&mut busy.0));
        closing.join().unwrap();
    });
    assert!(std::net::TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_err());
    let values = kvdepot_depot::values::Values::open(wired.depot.direct(), 64 * MIB, 16384).unwrap();
    assert_eq!(values.count().unwrap(), 1);
}

#[test]
fn who_does_not_end_is_cut_off() {
    let mut wired = Wired::open(config(16 * MIB, json!({})), json!({"drain_ms": 50}));
    let mut client = wired.infini();
    client.send(&Request::Tcp { key: b"key", op: TcpOp::Put(1000) });
    wired.wait_stat("pool_filling_bytes", 16384 + 4096);
    wired.close();
    assert!(is_closed(&mut client.0));
    wired.wait_stat("pool_filling_bytes", 0);
}

#[test]
fn management_answers() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({}));
    let mut client = wired.infini();
    for i in 0..5 {
        client.put(&format!("k{i}"), b"value");
    }
    assert_eq!(wired.http("GET /health", None), (200, "{\"status\":\"ok\"}".to_owned()));
    assert_eq!(wired.http("GET /kvmap_len", None), (200, "{\"len\":5}".to_owned()));
    assert_eq!(wired.http("GET /selftest", None), (200, "{\"status\":\"ok\"}".to_owned()));
    assert_eq!(wired.http("GET /purge", None).0, 405);
    let (code, pages) = wired.http("GET /nothing", None);
    assert!(code == 404 && pages.contains("/metrics") && pages.contains("/kvmap_len"), "{code} {pages}");
    let (status, metrics) = wired.http("GET /metrics", None);
    assert_eq!(status, 200);
    for line in [
        "kvdepot_wire_requests_total{op=\"infini_put\"} 5",
        "kvdepot_wire_received_bytes_total 25",
        "kvdepot_pool_blocks 5",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    assert_eq!(wired.http("POST /purge", None), (200, "{\"num\":5,\"status\":\"ok\"}".to_owned()));
    assert_eq!(wired.http("GET /kvmap_len", None), (200, "{\"len\":0}".to_owned()));
    assert!(!client.exists("k0"));
    assert_eq!(client.put("k0", b"again"), Reply::Code(200));
    assert_eq!(client.get("k0").unwrap(), b"again");
}

#[test]
fn eviction_ahead_of_need_keeps_to_its_thresholds() {
    let evict = json!({"periodic": true, "interval_ms": 20, "min_percent": 30.0, "max_percent": 50.0});
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"evict": evict}));
    let mut client = wired.infini();
    for i in 0..12 {
        client.put(&format!("k{i}"), &bytes(1_000_000, i));
    }
    let deadline = Instant::now() + LONG;
    let direct = wired.depot.direct();
    while direct.used_percent() >= 50.0 {
        assert!(Instant::now() < deadline, "{} % are in use", direct.used_percent());
        std::thread::yield_now();
    }
    assert!(client.get("k11").unwrap() == bytes(1_000_000, 11), "the last one used stays");
}

#[test]
fn nonsense_is_refused_before_anything_opens() {
    for text in [
        "{}",
        "{\"service_port\": 1, \"port\": 2}",
        "{\"service_port\": 70000}",
        "{\"service_port\": 1, \"host\": \"a name\"}",
        "{\"service_port\": 1, \"connections_max\": 0}",
        "{\"service_port\": 1, \"evict\": {\"periodic\": true, \"interval_ms\": 1, \"min_percent\": 9, \"max_percent\": 8}}",
    ] {
        assert_eq!(WireConfig::from_json(text).unwrap_err().kind(), ErrorKind::Config, "{text}");
    }
}

/// Half-open connections wait for an hour here: a health check only gets in if one is displaced.
#[test]
fn half_open_http_connections_do_not_delay_a_health_check() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({"stall_timeout_ms": 3_600_000}));
    let half_open: Vec<_> = (0..200)
        .map(|i| {
            let mut tcp = crate::wire::connect(wired.manage);
            if i % 2 == 0 {
                tcp.write_all(b"GET /health HTT").unwrap();
            }
            tcp
        })
        .collect();
    for _ in 0..3 {
        assert_eq!(wired.http("GET /health", None).0, 200);
    }
    let is_open = |tcp: &std::net::TcpStream| {
        tcp.set_nonblocking(true).unwrap();
        tcp.peek(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(half_open.iter().filter(|tcp| is_open(tcp)).count() >= 60, "no more make room than must");
}

/// A page in an administrator's browser can send requests here, even under its own name.
#[test]
fn web_pages_change_nothing_at_a_door_without_a_token() {
    let wired = Wired::open(config(16 * MIB, json!({})), json!({}));
    wired.infini().put("key", b"value");
    let ask = |lines: &str| {
        let mut tcp = crate::wire::connect(wired.manage);
        write!(tcp, "{lines}\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        tcp.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for foreign in [
        "POST /purge HTTP/1.1\r\nHost: evil.example:18080",
        "POST /purge HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example",
        "POST /purge HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: null",
        "POST /purge HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: cross-site",
        "GET /selftest HTTP/1.1\r\nHost: evil.example",
        "GET /kvmap_len HTTP/1.1\r\nHost: evil.example",
        "GET /config HTTP/1.1\r\nHost: evil.example\r\nSec-Fetch-Site: same-origin",
        "GET / HTTP/1.1\r\nHost: evil.example",
    ] {
        assert_eq!(ask(foreign), 403, "{foreign}");
    }
    assert_eq!(ask("GET /health HTTP/1.1\r\nHost: evil.example"), 200, "probes ask by any name");
    assert_eq!(wired.http("GET /kvmap_len", None), (200, "{\"len\":1}".to_owned()), "nothing was purged");
    for own in ["/", "/config", "/status"] {
        let asked = format!("GET {own} HTTP/1.1\r\nHost: 127.0.0.1:18080\r\nSec-Fetch-Site: same-origin");
        assert_eq!(ask(&asked), 200, "{own}");
    }
    assert_eq!(ask("POST /purge HTTP/1.1\r\nHost: 127.0.0.1:18080"), 200);
    assert_eq!(ask("POST /purge HTTP/1.0"), 200);
    assert_eq!(wired.http("GET /kvmap_len", None), (200, "{\"len\":0}".to_owned()));
}
