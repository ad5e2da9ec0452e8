//! All messages of both protocols are read back as they were written, however the bytes arrive.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::{BlockHash, ErrorKind, NamespaceId};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::infini::{self, ConnInfo, RemoteMeta, Reply, ReplyReader, TcpOp};
use kvdepot_wire::own::{Hashes, PutBlocks, Request, Response, Status};
use proptest::collection::vec;
use proptest::prelude::*;

fn buffered(mut buffer: FrameBuffer, bytes: &[u8], step: usize) -> FrameBuffer {
    for piece in bytes.chunks(step) {
        assert!(buffer.len() + piece.len() <= bytes.len());
        buffer.extend(piece);
    }
    buffer
}

fn own_round_trip(request: Request<'_>, id: u64, step: usize) {
    let mut bytes = Vec::new();
    request.encode(id, &mut bytes).unwrap();
    let mut buffer = buffered(FrameBuffer::requests(), &bytes, step);
    let frame = buffer.next_frame().unwrap().unwrap();
    assert_eq!(Request::decode(frame).unwrap(), (id, request));
    assert_eq!(Request::id_of(frame), id);
    assert!(buffer.is_empty());
}

fn response_round_trip(response: &Response<'_>, id: u64, step: usize) {
    let mut bytes = Vec::new();
    response.encode(id, &mut bytes).unwrap();
    let mut buffer = buffered(FrameBuffer::responses(), &bytes, step);
    let frame = buffer.next_frame().unwrap().unwrap();
    assert_eq!(Response::decode(frame).unwrap(), (id, response.clone()));
    assert!(buffer.is_empty());
}

fn infini_round_trip(request: &infini::Request<'_>, step: usize) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes).unwrap();
    let mut buffer = buffered(FrameBuffer::requests(), &bytes, step);
    assert_eq!(&infini::Request::decode(buffer.next_frame().unwrap().unwrap()).unwrap(), request);
    assert!(buffer.is_empty());
}

fn read_reply(request: &infini::Request<'_>, bytes: &[u8], step: usize) -> Reply {
    let mut reader = ReplyReader::new(request);
    let mut at = 0;
    loop {
        let room = reader.room();
        let count = room.len().min(step).min(bytes.len() - at);
        assert!(count > 0, "the reader waits for bytes that do not come");
        room[..count].copy_from_slice(&bytes[at..at + count]);
        at += count;
        if let Some(reply) = reader.advance(count).unwrap() {
            assert_eq!(at, bytes.len(), "the reader left bytes");
            return reply;
        }
    }
}

fn kinds() -> impl Strategy<Value = ErrorKind> {
    prop::sample::select(vec![
        ErrorKind::Config,
        ErrorKind::Io,
        ErrorKind::NoSpace,
        ErrorKind::Corrupt,
        ErrorKind::NotFound,
        ErrorKind::Timeout,
        ErrorKind::Busy,
        ErrorKind::Protocol,
        ErrorKind::Version,
        ErrorKind::Permission,
        ErrorKind::Unavailable,
        ErrorKind::Unsupported,
        ErrorKind::Closed,
    ])
}

fn statuses() -> impl Strategy<Value = Status> {
    prop_oneof![Just(Status::Ok), Just(Status::Had), kinds().prop_map(Status::Failed)]
}

fn keys() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(vec(any::<u8>(), 0..200), 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn own_requests(
        id: u64, step in 1usize..300, space: [u8; 16], numbers: (u32, u64, u32),
        hashes in vec(any::<[u8; 16]>(), 0..64), sums in vec(any::<u64>(), 64), nonce: [u8; 32], text in ".{0,200}",
    ) {
        let namespace = NamespaceId(space);
        let flat = hashes.concat();
        let list = Hashes::new(&flat).unwrap();
        prop_assert_eq!(list.iter().map(|h| h.0).collect::<Vec<_>>(), hashes.clone());
        let mut blocks = Vec::new();
        for (hash, crc64) in hashes.iter().zip(&sums) {
            PutBlocks::push(&mut blocks, BlockHash(*hash), *crc64);
        }
        let blocks = PutBlocks::new(&blocks).unwrap();
        prop_assert!(blocks.iter().zip(hashes.iter().zip(&sums)).all(|(b, (h, s))| b == (BlockHash(*h), *s)));
        let block_bytes = numbers.2 % (1 << 20) + 1;
        for request in [
            Request::Hello { version: numbers.0, features: numbers.1, nonce },
            Request::Auth { proof: nonce },
            Request::Open { canonical: &text },
            Request::Close { canonical: &text },
            Request::Exists { namespace, hashes: list },
            Request::Prefix { namespace, hashes: list },
            Request::Get { namespace, wait_ms: numbers.0, hashes: list },
            Request::Put { namespace, block_bytes, blocks },
            Request::SetEpoch { namespace, epoch: numbers.2 },
            Request::Remove { namespace, hashes: list },
            Request::Stat,
        ] {
            own_round_trip(request, id, step);
            let payload = if matches!(request, Request::Put { .. }) { u64::from(block_bytes) * hashes.len() as u64 } else { 0 };
            prop_assert_eq!(request.payload_bytes(), payload);
        }
    }

    #[test]
    fn own_responses(
        id: u64, step in 1usize..300, numbers: (u32, u64, u32), nonce: [u8; 32], flag: bool, text in ".{0,200}",
        present in vec(0u8..2, 0..100), stored in vec(statuses(), 0..100), status in statuses(), kind in kinds(),
    ) {
        let block_bytes = if status == Status::Ok { numbers.2 % (1 << 30) } else { 0 };
        for response in [
            Response::Welcome {
                version: numbers.0, features: numbers.1, auth_wanted: flag, requests_in_flight_max: numbers.2,
                depot: numbers.1, nonce,
            },
            Response::Authentic { proof: nonce },
            Response::Namespace { namespace: NamespaceId([7; 16]), epoch: numbers.0, block_bytes: numbers.2 },
            Response::Present(&present),
            Response::Leading(numbers.0),
            Response::Block { index: numbers.0, status, block_bytes, crc64: numbers.1 },
            Response::Stored(stored),
            Response::Done,
            Response::Stats(&text),
            Response::Failed { kind, message: &text },
        ] {
            response_round_trip(&response, id, step);
        }
    }

    #[test]
    fn infini_requests(step in 1usize..300, keys in keys(), bytes: u32, numbers: (u32, u32, u16, u32), gid: [u8; 16]) {
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let info = ConnInfo { qpn: numbers.0, psn: numbers.1, gid, lid: numbers.2, mtu: numbers.3 };
        infini_round_trip(&infini::Request::Exchange(info), step);
        infini_round_trip(&infini::Request::Match(keys.clone()), step);
        infini_round_trip(&infini::Request::Delete(keys.clone()), step);
        let value_bytes = bytes >> 1;
        for key in keys {
            infini_round_trip(&infini::Request::Exists(key), step);
            if !key.is_empty() {
                infini_round_trip(&infini::Request::Tcp { key, op: TcpOp::Get }, step);
                infini_round_trip(&infini::Request::Tcp { key, op: TcpOp::Put(value_bytes) }, step);
            }
        }
    }

    #[test]
    fn infini_replies(step in 1usize..40, number: i32, size in 0u32..0x8000_0000, gid: [u8; 16]) {
        let info = ConnInfo { qpn: 1, psn: 2, gid, lid: 3, mtu: 4 };
        let get = infini::Request::Tcp { key: b"k", op: TcpOp::Get };
        let put = infini::Request::Tcp { key: b"k", op: TcpOp::Put(9) };
        let cases = [
            (infini::Request::Exists(b"k"), Reply::Number(number)),
            (infini::Request::Delete(vec![]), Reply::Number(number)),
            (infini::Request::Match(vec![]), Reply::Number(number)),
            (infini::Request::Exchange(info), Reply::Exchange(info)),
            (get.clone(), Reply::Value(size)),
            (get, Reply::Code(404)),
            (put, Reply::Code(200)),
            (infini::Request::Exchange(info), Reply::Code(503)),
            (infini::Request::Exists(b"k"), Reply::Code(400)),
        ];
        for (request, reply) in cases {
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            prop_assert_eq!(read_reply(&request, &bytes, step), reply);
        }
    }

    #[test]
    fn remote_metas(
        keys in vec((vec(any::<u8>(), 1..100), any::<u64>()), 1..40), block_bytes in 1u32..0x8000_0000, rkey: u32, write: bool,
    ) {
        let op = if write { infini::op::RDMA_WRITE } else { infini::op::RDMA_READ };
        let (names, addresses): (Vec<&[u8]>, Vec<u64>) = keys.iter().map(|(k, a)| (k.as_slice(), *a)).unzip();
        let meta = RemoteMeta { op, keys: names, block_bytes, rkey, addresses };
        let bytes = meta.encode();
        prop_assert_eq!(RemoteMeta::decode(&bytes).unwrap(), meta);
    }
}

#[test]
fn what_exceeds_a_limit_is_not_written() {
    let mut out = Vec::new();
    let long = vec![b'k'; kvdepot_wire::limits::KEY_BYTES_MAX + 1];
    assert!(infini::Request::Exists(&long).encode(&mut out).is_err());
    assert!(infini::Request::Delete(vec![&long]).encode(&mut out).is_err());
    assert!(infini::Request::RdmaOnly(b'W').encode(&mut out).is_err());
    assert!(infini::Request::Tcp { key: b"k", op: TcpOp::Put(1 << 31) }.encode(&mut out).is_err());
    let hashes = vec![0; 16 * (kvdepot_wire::limits::BATCH_BLOCKS_MAX + 1)];
    assert!(Hashes::new(&hashes).is_err() && Hashes::new(&hashes[..17]).is_err());
    let blocks = vec![0; 24 * 3];
    let blocks = PutBlocks::new(&blocks).unwrap();
    let put = Request::Put { namespace: NamespaceId([0; 16]), block_bytes: 1 << 29, blocks };
    assert_eq!(put.encode(0, &mut out).unwrap_err().kind(), ErrorKind::Protocol);
}
