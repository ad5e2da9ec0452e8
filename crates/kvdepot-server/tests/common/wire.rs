//! Simple blocking clients of the wire door, which write the bytes on the socket themselves.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceId, NamespaceSpec};
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_server::WireDoor;
use kvdepot_server::wire::WireConfig;
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::infini::{self, Reply, ReplyReader, TcpOp};
use kvdepot_wire::own::{ClientHandshake, Hashes, PutBlocks, Request, Response, Status, Token};

use crate::common::LONG;

/// A depot with an open wire door.
pub(crate) struct Wired {
    door: Option<WireDoor>,
    pub(crate) depot: Arc<Depot>,
    pub(crate) at: SocketAddr,
    pub(crate) manage: SocketAddr,
}

impl Wired {
    pub(crate) fn open(depot: DepotConfig, wire: serde_json::Value) -> Self {
        Self::over(Depot::start_private(depot).unwrap(), wire)
    }

    pub(crate) fn over(depot: Depot, wire: serde_json::Value) -> Self {
        let mut value =
            serde_json::json!({"service_port": 0, "manage_port": 0, "threads": 2, "value_bytes_min": 16384});
        for (key, entry) in wire.as_object().unwrap() {
            value[key] = entry.clone();
        }
        let depot = Arc::new(depot);
        let door = WireDoor::open(WireConfig::from_json(&value.to_string()).unwrap(), &depot).unwrap();
        let (at, manage) = (door.service_address(), door.manage_address().unwrap());
        Self { door: Some(door), depot, at, manage }
    }

    pub(crate) fn series(&self) -> Option<Arc<prometheus_client::registry::Registry>> {
        self.door.as_ref().map(WireDoor::series)
    }

    pub(crate) fn close(&mut self) {
        if let Some(door) = self.door.take() {
            door.close();
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        connect(self.at)
    }

    pub(crate) fn infini(&self) -> Infini {
        Infini(self.connect())
    }

    pub(crate) fn own(&self, token: Option<&str>) -> Result<Own, kvdepot_core::Error> {
        Own::greet(self.connect(), token)
    }

    pub(crate) fn stat(&self, name: &str) -> u64 {
        self.depot.direct().stats()[name].as_u64().unwrap()
    }

    /// Waits for a gauge of the depot: what the end of a connection releases shows a moment after the peer sees that
    /// end.
    pub(crate) fn wait_stat(&self, name: &str, wanted: u64) {
        let deadline = std::time::Instant::now() + LONG;
        while self.stat(name) != wanted {
            assert!(std::time::Instant::now() < deadline, "{name} is {}, not {wanted}", self.stat(name));
            std::thread::yield_now();
        }
    }

    /// Sends one HTTP request. Returns status and body.
    pub(crate) fn http(&self, request: &str, token: Option<&str>) -> (u16, String) {
        let mut tcp = connect(self.manage);
        let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        // In one call: a door with a short patience may not wait for the rest of a header.
        let head = format!("{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n");
        tcp.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        tcp.read_to_string(&mut text).unwrap();
        let status = text.split(' ').nth(1).unwrap().parse().unwrap();
        (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
    }
}

pub(crate) fn connect(at: SocketAddr) -> TcpStream {
    let tcp = TcpStream::connect(at).unwrap();
    tcp.set_nodelay(true).unwrap();
    tcp.set_read_timeout(Some(LONG)).unwrap();
    tcp.set_write_timeout(Some(LONG)).unwrap();
    tcp
}

/// Returns whether the server has closed the connection without sending anything more.
pub(crate) fn is_closed(tcp: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    // A reset counts, too: the server had not read everything.
    tcp.read_to_end(&mut rest)
        .map_or_else(|e| e.kind() == std::io::ErrorKind::ConnectionReset, |_| rest.is_empty())
}

/// Returns bytes that depend on length and seed.
pub(crate) fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed).collect()
}

/// An InfiniStore client.
pub(crate) struct Infini(pub(crate) TcpStream);

impl Infini {
    pub(crate) fn send(&mut self, request: &infini::Request<'_>) {
        let mut out = Vec::new();
        request.encode(&mut out).unwrap();
        self.0.write_all(&out).unwrap();
    }

    pub(crate) fn reply(&mut self, request: &infini::Request<'_>) -> Reply {
        let mut reader = ReplyReader::new(request);
        loop {
            let count = self.0.read(reader.room()).unwrap();
            assert!(count > 0, "the server closed instead of an answer");
            if let Some(reply) = reader.advance(count).unwrap() {
                return reply;
            }
        }
    }

    pub(crate) fn ask(&mut self, request: &infini::Request<'_>) -> Reply {
        self.send(request);
        self.reply(request)
    }

    pub(crate) fn put(&mut self, key: &str, value: &[u8]) -> Reply {
        let request = infini::Request::Tcp { key: key.as_bytes(), op: TcpOp::Put(value.len() as u32) };
        self.send(&request);
        self.0.write_all(value).unwrap();
        self.reply(&request)
    }

    pub(crate) fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        match self.ask(&infini::Request::Tcp { key: key.as_bytes(), op: TcpOp::Get }) {
            Reply::Value(len) => {
                let mut value = vec![0; len as usize];
                self.0.read_exact(&mut value).unwrap();
                Some(value)
            }
            Reply::Code(404) => None,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn exists(&mut self, key: &str) -> bool {
        match self.ask(&infini::Request::Exists(key.as_bytes())) {
            Reply::Number(number) => number == 0,
            other => panic!("{other:?}"),
        }
    }
}

/// A client of our own protocol.
pub(crate) struct Own {
    pub(crate) tcp: TcpStream,
    buffer: FrameBuffer,
}

/// An answer without its borrows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Namespace(NamespaceId, u32, u32),
    Present(Vec<u8>),
    Leading(u32),
    Block(u32, Status, Vec<u8>),
    Stored(Vec<Status>),
    Done,
    Stats(String),
    Failed(ErrorKind),
    Other,
}

impl Own {
    pub(crate) fn greet(tcp: TcpStream, token: Option<&str>) -> Result<Self, kvdepot_core::Error> {
        let mut own = Self { tcp, buffer: FrameBuffer::responses() };
        let token = token.map(|token| Token::new(token.as_bytes()).unwrap());
        let mut out = Vec::new();
        let mut handshake = ClientHandshake::begin(token, 0, [7; 32], &mut out)?;
        loop {
            own.tcp.write_all(&out).unwrap();
            out.clear();
            let welcomed = own.next_frame(|_, response| handshake.step(&response, &mut out))?;
            if welcomed.is_some() {
                return Ok(own);
            }
        }
    }

    pub(crate) fn next_frame<T>(&mut self, each: impl FnOnce(u64, Response<'_>) -> T) -> T {
        loop {
            if let Some(frame) = self.buffer.next_frame().unwrap() {
                let (id, response) = Response::decode(frame).unwrap();
                return each(id, response);
            }
            let tcp = &mut self.tcp;
            let count = self.buffer.read_with(|room| tcp.read(room)).unwrap();
            assert!(count > 0, "the server closed instead of an answer");
        }
    }

    pub(crate) fn answer(&mut self) -> (u64, Answer) {
        loop {
            let cut = match self.buffer.next_frame().unwrap() {
                None => None,
                Some(frame) => {
                    let (id, response) = Response::decode(frame).unwrap();
                    let payload = response.payload_bytes() as usize;
                    let (crc, answer) = match response {
                        Response::Namespace { namespace, epoch, block_bytes } => {
                            (0, Answer::Namespace(namespace, epoch, block_bytes))
                        }
                        Response::Present(bytes) => (0, Answer::Present(bytes.to_vec())),
                        Response::Leading(count) => (0, Answer::Leading(count)),
                        Response::Block { index, status, crc64, .. } => {
                            (crc64, Answer::Block(index, status, Vec::new()))
                        }
                        Response::Stored(statuses) => (0, Answer::Stored(statuses)),
                        Response::Done => (0, Answer::Done),
                        Response::Stats(text) => (0, Answer::Stats(text.to_owned())),
                        Response::Failed { kind, .. } => (0, Answer::Failed(kind)),
                        _ => (0, Answer::Other),
                    };
                    Some((id, payload, crc, answer))
                }
            };
            let Some((id, payload, crc, mut answer)) = cut else {
                let tcp = &mut self.tcp;
                let count = self.buffer.read_with(|room| tcp.read(room)).unwrap();
                assert!(count > 0, "the server closed instead of an answer");
                continue;
            };
            if let Answer::Block(_, status, bytes) = &mut answer {
                bytes.resize(payload, 0);
                let had = self.buffer.take_payload(bytes);
                self.tcp.read_exact(&mut bytes[had..]).unwrap();
                assert!(*status != Status::Ok || crc == kvdepot_io::checksum::crc64(bytes), "checksum");
            }
            return (id, answer);
        }
    }

    pub(crate) fn send(&mut self, id: u64, request: &Request<'_>, payload: &[u8]) {
        let mut out = Vec::new();
        request.encode(id, &mut out).unwrap();
        self.tcp.write_all(&out).unwrap();
        self.tcp.write_all(payload).unwrap();
    }

    pub(crate) fn ask(&mut self, request: &Request<'_>) -> Answer {
        self.send(5, request, &[]);
        let (id, answer) = self.answer();
        assert_eq!(id, 5);
        answer
    }

    pub(crate) fn open(&mut self, name: &str, block_bytes: u64) -> NamespaceId {
        let layout = BlockLayout::new(vec![vec![block_bytes]]).unwrap();
        let spec = NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap();
        match self.ask(&Request::Open { canonical: spec.canonical() }) {
            Answer::Namespace(namespace, 0, bytes) if u64::from(bytes) == block_bytes => namespace,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a put of blocks, with deliberately wrong checksums if `spoil` is not 0.
    pub(crate) fn send_put(
        &mut self,
        id: u64,
        namespace: NamespaceId,
        blocks: &[(BlockHash, &[u8])],
        spoil: u64,
    ) {
        let (mut list, mut payload) = (Vec::new(), Vec::new());
        for (hash, bytes) in blocks {
            PutBlocks::push(&mut list, *hash, kvdepot_io::checksum::crc64(bytes) ^ spoil);
            payload.extend_from_slice(bytes);
        }
        let block_bytes = blocks[0].1.len() as u32;
        let request = Request::Put { namespace, block_bytes, blocks: PutBlocks::new(&list).unwrap() };
        self.send(id, &request, &payload);
    }

    pub(crate) fn put(&mut self, namespace: NamespaceId, blocks: &[(BlockHash, &[u8])]) -> Answer {
        self.send_put(5, namespace, blocks, 0);
        self.answer().1
    }

    pub(crate) fn get(
        &mut self,
        namespace: NamespaceId,
        hashes: &[BlockHash],
    ) -> Vec<Result<Vec<u8>, ErrorKind>> {
        let flat: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
        self.send(6, &Request::Get { namespace, wait_ms: 10_000, hashes: Hashes::new(&flat).unwrap() }, &[]);
        let mut out: Vec<Option<Result<Vec<u8>, ErrorKind>>> = vec![None; hashes.len()];
        for _ in hashes {
            let (id, Answer::Block(index, status, bytes)) = self.answer() else { panic!("no block") };
            assert_eq!(id, 6);
            let outcome = match status {
                Status::Ok => Ok(bytes),
                Status::Failed(kind) => Err(kind),
                Status::Had => panic!("a get is not a put"),
            };
            assert!(out[index as usize].replace(outcome).is_none(), "block {index} was answered twice");
        }
        out.into_iter().map(Option::unwrap).collect()
    }
}
