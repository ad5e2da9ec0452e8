//! Runs fuzz targets: valid messages, mutated at random, for as long as asked.
//!
//! `cargo run --release -p kvdepot-wire --example fuzz -- --seconds 600 --target requests --seed 1`
//!
//! It does not see coverage, but begins with messages of every kind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime};

use kvdepot_core::{BlockHash, ErrorKind, NamespaceId};
use kvdepot_wire::fuzz::TARGETS;
use kvdepot_wire::infini::{self, ConnInfo, RemoteMeta, Reply, TcpOp};
use kvdepot_wire::own::{
    ClientHandshake, Hashes, Offer, PutBlocks, Request, Response, ServerHandshake, Status,
};

/// SplitMix64: small, and the same from the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn corpus() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let hashes: Vec<u8> = (0..64).collect();
    let mut blocks = Vec::new();
    PutBlocks::push(&mut blocks, BlockHash([1; 16]), 2);
    PutBlocks::push(&mut blocks, BlockHash([3; 16]), 4);
    let hashes = Hashes::new(&hashes).expect("whole hashes");
    let namespace = NamespaceId([5; 16]);
    let requests = [
        Request::Hello { version: 1, features: 3, nonce: [1; 32] },
        Request::Auth { proof: [2; 32] },
        Request::Open { canonical: "{\"facts\":{},\"layout\":[[1,[4096]]]}" },
        Request::Close { canonical: "{\"facts\":{},\"layout\":[[1,[4096]]]}" },
        Request::Exists { namespace, hashes },
        Request::Prefix { namespace, hashes },
        Request::Get { namespace, wait_ms: 100, hashes },
        Request::Put { namespace, block_bytes: 16, blocks: PutBlocks::new(&blocks).expect("whole blocks") },
        Request::SetEpoch { namespace, epoch: 3 },
        Request::Remove { namespace, hashes },
        Request::Stat,
    ];
    for request in requests {
        let mut out = vec![255];
        request.encode(77, &mut out).expect("short");
        all.push(out);
    }
    let responses = [
        Response::Welcome {
            version: 1,
            features: 3,
            auth_wanted: true,
            requests_in_flight_max: 8,
            depot: 9,
            nonce: [1; 32],
        },
        Response::Authentic { proof: [7; 32] },
        Response::Namespace { namespace, epoch: 1, block_bytes: 4096 },
        Response::Present(&[0, 1, 1]),
        Response::Leading(4),
        Response::Block { index: 1, status: Status::Ok, block_bytes: 10, crc64: 11 },
        Response::Stored(vec![Status::Ok, Status::Had, Status::Failed(ErrorKind::NoSpace)]),
        Response::Done,
        Response::Stats("{}"),
        Response::Failed { kind: ErrorKind::Busy, message: "later" },
    ];
    for response in responses {
        let mut out = vec![255];
        response.encode(77, &mut out).expect("short");
        all.push(out);
    }
    let info = ConnInfo { qpn: 1, psn: 2, gid: [3; 16], lid: 4, mtu: 5 };
    let keys: Vec<&[u8]> = vec![b"one", b"another key", b""];
    let infini = [
        infini::Request::Exchange(info),
        infini::Request::Exists(b"key"),
        infini::Request::Match(keys.clone()),
        infini::Request::Delete(keys.clone()),
        infini::Request::Tcp { key: b"key", op: TcpOp::Put(3) },
        infini::Request::Tcp { key: b"key", op: TcpOp::Get },
    ];
    for request in infini {
        let mut out = vec![255];
        request.encode(&mut out).expect("short");
        all.push(out);
    }
    let addresses = vec![4096, 8192];
    let meta = RemoteMeta { op: b'W', keys: vec![b"a", b"bc"], block_bytes: 9, rkey: 8, addresses };
    all.push(meta.encode());
    for reply in [Reply::Code(404), Reply::Number(3), Reply::Value(9), Reply::Exchange(info)] {
        let mut out = vec![200];
        reply.encode(&mut out);
        all.push(out);
    }
    all.push(handshake());
    all
}

/// A whole handshake's requests, with a token that is not the targets'.
fn handshake() -> Vec<u8> {
    let token = kvdepot_wire::own::Token::new(b"another token of tests").expect("long enough");
    let mut sent = vec![255];
    let mut client = ClientHandshake::begin(Some(token.clone()), 1, [1; 32], &mut sent).expect("short");
    let mut server = ServerHandshake::new(Some(token));
    let offer = Offer { features: 1, requests_in_flight_max: 1, depot: 1, nonce: [2; 32] };
    let mut answer = Vec::new();
    let hello = Request::Hello { version: 1, features: 1, nonce: [1; 32] };
    server.step(0, &hello, offer, &mut answer).expect("a good hello");
    let mut buffer = kvdepot_wire::FrameBuffer::responses();
    buffer.extend(&answer);
    let frame = buffer.next_frame().expect("a frame").expect("all of it");
    let (_, welcome) = Response::decode(frame).expect("a welcome");
    client.step(&welcome, &mut sent).expect("a good welcome");
    sent
}

fn mutate(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut data = corpus[random.below(corpus.len())].clone();
    for _ in 0..random.below(3) {
        // Streams of several frames.
        let other = &corpus[random.below(corpus.len())];
        data.extend_from_slice(&other[usize::from(other.len() > 1)..]);
    }
    for _ in 0..random.below(6) {
        let at = random.below(data.len());
        match random.below(7) {
            0 => data[at] ^= 1 << random.below(8),
            1 => data[at] = random.next() as u8,
            2 => data.truncate(at.max(1)),
            3 => {
                let end = (at + random.below(32)).min(data.len());
                let piece = data[at..end].to_vec();
                data.splice(at..at, piece);
            }
            4 => drop(data.drain(at..(at + random.below(16)).min(data.len()))),
            5 => {
                // Lengths and offsets are 32-bit numbers: near 0, near their borders, or huge.
                let values = [0, 1, 4, 8, 0x7fff_ffff, 0x8000_0000, 0xffff_fffc, u32::MAX, data.len() as u32];
                let value = values[random.below(values.len())].wrapping_add(random.below(3) as u32);
                for (byte, new) in data[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
            _ => data.insert(at, random.next() as u8),
        }
        if data.is_empty() {
            data.push(0);
        }
    }
    data
}

fn main() {
    let (mut seconds, mut only, mut seed) = (60, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().unwrap_or_else(|| usage(&name));
        match name.as_str() {
            "--seconds" => seconds = value.parse().unwrap_or_else(|_| usage(&value)),
            "--seed" => seed = Some(value.parse().unwrap_or_else(|_| usage(&value))),
            "--target" => only = Some(value),
            _ => usage(&name),
        }
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed: u64 = seed.unwrap_or(now.as_nanos() as u64);
    let targets: Vec<_> =
        TARGETS.iter().filter(|(name, _)| only.as_deref().is_none_or(|o| o == *name)).collect();
    if targets.is_empty() {
        usage(only.as_deref().unwrap_or_default());
    }
    let corpus = corpus();
    let mut random = Random(seed);
    let (end, mut runs) = (Instant::now() + Duration::from_secs(seconds), 0u64);
    println!("seed {seed}");
    while Instant::now() < end {
        for _ in 0..1000 {
            let data = mutate(&mut random, &corpus);
            for (name, target) in &targets {
                runs += 1;
                if catch_unwind(AssertUnwindSafe(|| target(&data))).is_err() {
                    println!("target {name} failed after {runs} runs, seed {seed}, with {data:?}");
                    std::process::exit(1);
                }
            }
        }
    }
    println!("{runs} runs, no failure, seed {seed}");
}

fn usage(wrong: &str) -> ! {
    eprintln!("cannot use {wrong:?}: --seconds N, --seed N, --target NAME of");
    TARGETS.iter().for_each(|(name, _)| eprintln!("  {name}"));
    std::process::exit(2);
}
