//! P1 on the wire: InfiniStore's messages are read as the official FlatBuffers library (25.12, Python) writes them, and
//! no message makes the reader follow an offset out of it.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_wire::Frame;
use kvdepot_wire::infini::{RemoteMeta, Request, TcpOp, op};

const PUT: &str = "1000000000000a0010000c00080007000a0000000000005000000100040000000500000061206b6579000000";
const GET: &str = "1000000000000a000c000800000007000a00000000000047040000000500000061206b6579000000";
const KEYS: &str = "0c00000000000600080004000600000004000000040000002c000000200000001400000004000000\
    0700000070332d6c6f6e6700000000000000000002000000703100000200000070300000";
const META: &str = "1400000000000e00180008000c001000140007000e000000000000572800000000100000efbeedfe\
    040000000200000000100000007f000000200000007f00000000000002000000100000000400000002000000723100000200000072300000";

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter_map(|c| char::from(c).to_digit(16)).map(|d| d as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

#[test]
fn the_official_library_s_messages_are_read() {
    let put = bytes(PUT);
    let request = Request::decode(Frame { op: op::TCP, body: &put }).unwrap();
    assert_eq!(request, Request::Tcp { key: b"a key", op: TcpOp::Put(65_536) });
    let get = bytes(GET);
    let request = Request::decode(Frame { op: op::TCP, body: &get }).unwrap();
    assert_eq!(request, Request::Tcp { key: b"a key", op: TcpOp::Get });
    let keys = bytes(KEYS);
    let expected: Vec<&[u8]> = vec![b"p0", b"p1", b"", b"p3-long"];
    let request = Request::decode(Frame { op: op::MATCH, body: &keys }).unwrap();
    assert_eq!(request, Request::Match(expected.clone()));
    let request = Request::decode(Frame { op: op::DELETE, body: &keys }).unwrap();
    assert_eq!(request, Request::Delete(expected));
    let meta = bytes(META);
    assert_eq!(
        RemoteMeta::decode(&meta).unwrap(),
        RemoteMeta {
            op: b'W',
            keys: vec![b"r0", b"r1"],
            block_bytes: 4096,
            rkey: 0xfeed_beef,
            addresses: vec![0x7f00_0000_1000, 0x7f00_0000_2000],
        }
    );
}

/// Every truncation and every changed byte gives an error or another message, never a panic or an endless loop.
#[test]
fn damaged_messages_are_refused_or_read_as_others() {
    for (hex, op) in [(PUT, op::TCP), (GET, op::TCP), (KEYS, op::MATCH), (KEYS, op::DELETE)] {
        let whole = bytes(hex);
        for cut in 0..whole.len() {
            let _ = Request::decode(Frame { op, body: &whole[..cut] });
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[cut] = value;
                let _ = Request::decode(Frame { op, body: &changed });
            }
        }
        assert!(Request::decode(Frame { op, body: &whole[..whole.len() / 2] }).is_err());
    }
    let whole = bytes(META);
    for cut in 0..whole.len() {
        let _ = RemoteMeta::decode(&whole[..cut]);
    }
    assert!(RemoteMeta::decode(&whole[..whole.len() / 2]).is_err());
}

/// Messages that crashed the peer: without a key, empty, garbage, with a negative length.
#[test]
fn what_crashed_the_peer_is_refused_here() {
    let negative = Request::Tcp { key: b"k", op: TcpOp::Put(1) };
    let mut frame = Vec::new();
    negative.encode(&mut frame).unwrap();
    let body = &frame[kvdepot_wire::HEADER_BYTES..];
    let at = body.windows(4).rposition(|w| w == 1i32.to_le_bytes()).unwrap();
    let mut negative = body.to_vec();
    let lengths: Vec<usize> = (0..body.len() - 3).filter(|&i| body[i..i + 4] == 1i32.to_le_bytes()).collect();
    assert!(lengths.contains(&at));
    let mut refused = 0;
    for at in lengths {
        negative.copy_from_slice(body);
        negative[at..at + 4].copy_from_slice(&(-1i32).to_le_bytes());
        refused += usize::from(Request::decode(Frame { op: op::TCP, body: &negative }).is_err());
    }
    assert!(refused > 0);
    for body in [&b""[..], b"\0", &[0; 64], &[0xff; 64], b"GET / HTTP/1.1\r\n\r\n"] {
        for op in [op::TCP, op::MATCH, op::DELETE] {
            assert!(Request::decode(Frame { op, body }).is_err(), "{op} {body:?}");
        }
        assert!(RemoteMeta::decode(body).is_err());
    }
}
