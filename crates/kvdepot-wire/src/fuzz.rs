//! Bodies of the fuzz targets: each takes any bytes, must not panic, and checks the invariants of everything that it
//! could decode. `examples/fuzz.rs` runs them.

use crate::infini::{self, RemoteMeta, ReplyReader};
use crate::own::{self, ClientHandshake, Offer, ServerHandshake, Token};
use crate::{Frame, FrameBuffer};

/// The body of a target.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: [(&str, Target); 6] = [
    ("requests", fuzz_requests),
    ("responses", fuzz_responses),
    ("remote_meta", fuzz_remote_meta),
    ("replies", fuzz_replies),
    ("server_handshake", fuzz_server_handshake),
    ("client_handshake", fuzz_client_handshake),
];

/// The first byte determines the steps in which the rest arrives.
fn feed(buffer: &mut FrameBuffer, data: &[u8], mut each: impl FnMut(Frame<'_>)) {
    let Some((&step, stream)) = data.split_first() else { return };
    for piece in stream.chunks(usize::from(step) + 1) {
        buffer.extend(piece);
        loop {
            match buffer.next_frame() {
                Ok(Some(frame)) => each(frame),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// A stream received by a server.
pub fn fuzz_requests(data: &[u8]) {
    feed(&mut FrameBuffer::requests(), data, |frame| {
        if frame.op >= own::op::HELLO {
            if let Ok((id, request)) = own::Request::decode(frame) {
                let mut again = Vec::new();
                request.encode(id, &mut again).expect("what was read can be written");
                let mut buffer = FrameBuffer::requests();
                buffer.extend(&again);
                let frame = buffer.next_frame().expect("a frame").expect("all of it");
                assert_eq!(own::Request::decode(frame).expect("what was written can be read"), (id, request));
            }
        } else if let Ok(request) = infini::Request::decode(frame) {
            let mut again = Vec::new();
            // Encoded again, a message may exceed the limit.
            if request.encode(&mut again).is_ok() {
                let mut buffer = FrameBuffer::requests();
                buffer.extend(&again);
                let frame = buffer.next_frame().expect("a frame").expect("all of it");
                assert_eq!(infini::Request::decode(frame).expect("what was written can be read"), request);
            }
        }
    });
}

/// A stream received by a client.
pub fn fuzz_responses(data: &[u8]) {
    feed(&mut FrameBuffer::responses(), data, |frame| {
        if let Ok((id, response)) = own::Response::decode(frame) {
            let mut again = Vec::new();
            response.encode(id, &mut again).expect("what was read can be written");
            let mut buffer = FrameBuffer::responses();
            buffer.extend(&again);
            let frame = buffer.next_frame().expect("a frame").expect("all of it");
            assert_eq!(own::Response::decode(frame).expect("what was written can be read"), (id, response));
        }
    });
}

/// The body of an RDMA SEND.
pub fn fuzz_remote_meta(data: &[u8]) {
    if let Ok(meta) = RemoteMeta::decode(data) {
        let again = meta.encode();
        match RemoteMeta::decode(&again) {
            Ok(read) => assert_eq!(read, meta),
            Err(_) => assert!(again.len() > crate::limits::INFINI_BODY_BYTES_MAX),
        }
    }
}

/// The answers of an InfiniStore server.
pub fn fuzz_replies(data: &[u8]) {
    let Some((&kind, mut stream)) = data.split_first() else { return };
    let request = match kind % 5 {
        0 => infini::Request::Exists(b"k"),
        1 => infini::Request::Tcp { key: b"k", op: infini::TcpOp::Get },
        2 => infini::Request::Tcp { key: b"k", op: infini::TcpOp::Put(1) },
        3 => infini::Request::Delete(vec![b"k"]),
        _ => infini::Request::RdmaOnly(infini::op::EXCHANGE),
    };
    let mut reader = ReplyReader::new(&request);
    loop {
        let room = reader.room();
        assert!(!room.is_empty(), "an answer that is not there needs more bytes");
        let count = room.len().min(stream.len()).min(usize::from(kind) / 5 + 1);
        room[..count].copy_from_slice(&stream[..count]);
        stream = &stream[count..];
        match reader.advance(count) {
            Ok(None) if count > 0 => {}
            Ok(Some(reply)) => {
                let mut bytes = Vec::new();
                reply.encode(&mut bytes);
                assert!(bytes.len() <= 34);
                return;
            }
            _ => return,
        }
    }
}

/// Messages of a visitor to a server that wants a token: nothing but the proof lets it in.
pub fn fuzz_server_handshake(data: &[u8]) {
    let token = Token::new(b"a token of tests").expect("long enough");
    let mut handshake = ServerHandshake::new(Some(token));
    let offer = Offer { features: 7, requests_in_flight_max: 1, depot: 1, nonce: [9; 32] };
    feed(&mut FrameBuffer::requests(), data, |frame| {
        if frame.op >= own::op::HELLO
            && let Ok((id, request)) = own::Request::decode(frame)
        {
            let _ = handshake.step(id, &request, offer, &mut Vec::new());
        }
    });
    assert!(!handshake.is_over(), "nobody guesses a proof");
}

/// Messages of a false server to a client that knows a token.
pub fn fuzz_client_handshake(data: &[u8]) {
    let token = Token::new(b"a token of tests").expect("long enough");
    let mut handshake =
        ClientHandshake::begin(Some(token), 7, [3; 32], &mut Vec::new()).expect("a hello is short");
    feed(&mut FrameBuffer::responses(), data, |frame| {
        if let Ok((_, response)) = own::Response::decode(frame) {
            let outcome = handshake.step(&response, &mut Vec::new());
            assert!(!matches!(outcome, Ok(Some(_))), "nobody guesses a proof");
        }
    });
}
