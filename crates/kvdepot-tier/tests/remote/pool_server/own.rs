//! kvdepot's own protocol.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use kvdepot_core::{BlockKey, ErrorKind, NamespaceId, NamespaceSpec};
use kvdepot_io::checksum::crc64;
use kvdepot_wire::own::{Hashes, Offer, PutBlocks, Request, Response, ServerHandshake, Status};
use kvdepot_wire::{Frame, FrameBuffer};

use super::{Fault, Late, Served, State, next, payload};

pub(super) fn serve(mut stream: &TcpStream, state: &State) -> Served {
    let mut buffer = FrameBuffer::requests();
    let mut handshake = ServerHandshake::new(state.token.clone());
    let requests_in_flight_max = state.in_flight_max.load(Ordering::SeqCst);
    let nonce = [state.depot as u8; 32];
    let offer = Offer { features: 0, requests_in_flight_max, depot: state.depot, nonce };
    let mut slow_opens = 0;
    while let Some((op, body)) = next(stream, &mut buffer)? {
        let fault = state.fault();
        if fault == Fault::Deaf && handshake.is_over() {
            state.hold_still();
            return Ok(());
        }
        if fault == Fault::HungHello || (fault == Fault::Hung && handshake.is_over()) {
            state.hang(stream);
            return Ok(());
        }
        let (id, request) = Request::decode(Frame { op, body: &body })?;
        let mut out = Vec::new();
        if !handshake.is_over() {
            if let Err(error) = handshake.step(id, &request, offer, &mut out) {
                Response::Failed { kind: error.kind(), message: error.message() }.encode(id, &mut out)?;
                stream.write_all(&out)?;
                return Ok(());
            }
            stream.write_all(&out)?;
            continue;
        }
        match request {
            Request::Get { namespace, hashes, .. } => {
                state.gets.fetch_add(1, Ordering::SeqCst);
                get(stream, state, id, namespace, hashes)?;
                continue;
            }
            Request::Put { namespace, block_bytes, blocks } => {
                state.puts.fetch_add(1, Ordering::SeqCst);
                let bytes = payload(stream, &mut buffer, block_bytes as usize * blocks.len())?;
                let names: Vec<String> = blocks.iter().map(|(hash, _)| hash.to_string()).collect();
                state.keep_back(Fault::LatePuts, names.join(" "));
                put(state, namespace, block_bytes as usize, blocks, &bytes).encode(id, &mut out)?;
            }
            Request::Open { canonical } if is_slow(state, canonical)? => {
                slow_opens += 1;
                if slow_opens > 1 {
                    state.hang(stream);
                    return Ok(());
                }
                let late = state.store.lock().late;
                match late {
                    Late::Refuses => {
                        let (kind, message) = (ErrorKind::Timeout, "a tier did not answer");
                        Response::Failed { kind, message }.encode(id, &mut out)?;
                    }
                    Late::Opens(after) => {
                        std::thread::sleep(after);
                        answer(state, &request, id, &mut out)?;
                    }
                }
            }
            other => answer(state, &other, id, &mut out)?,
        }
        stream.write_all(&out)?;
    }
    Ok(())
}

fn is_slow(state: &State, canonical: &str) -> Served<bool> {
    let root = NamespaceSpec::from_canonical(canonical)?.root();
    Ok(state.store.lock().slow.contains(&root))
}

fn key(namespace: NamespaceId, hash: kvdepot_core::BlockHash) -> BlockKey {
    BlockKey { namespace, hash }
}

fn answer(state: &State, request: &Request<'_>, id: u64, out: &mut Vec<u8>) -> Served {
    let mut store = state.store.lock();
    let response = match request {
        Request::Open { canonical } => {
            let spec = NamespaceSpec::from_canonical(canonical)?;
            let root = spec.root();
            if store.refused == Some(root) {
                let failed = Response::Failed { kind: ErrorKind::NoSpace, message: "no place for it" };
                return Ok(failed.encode(id, out)?);
            }
            let current = store.roots.get(&root).copied();
            let namespace = current.unwrap_or_else(|| spec.id(0));
            let block_bytes = u32::try_from(spec.layout().block_bytes())?;
            if current.is_none() {
                store.roots.insert(root, namespace);
                store.namespaces.insert(namespace, (spec, 0));
            }
            let epoch = store.namespaces[&namespace].1;
            Response::Namespace { namespace, epoch, block_bytes }
        }
        Request::SetEpoch { .. } if state.fault() == Fault::NeverMoves => {
            Response::Failed { kind: ErrorKind::Io, message: "not moved" }
        }
        Request::SetEpoch { namespace, epoch } => match store.namespaces.remove(namespace) {
            Some((spec, before)) => {
                let epoch = before.max(*epoch);
                let now = spec.id(epoch);
                store.blocks.retain(|key, _| key.namespace != *namespace || now == *namespace);
                store.roots.insert(spec.root(), now);
                let block_bytes = u32::try_from(spec.layout().block_bytes())?;
                store.namespaces.insert(now, (spec, epoch));
                match state.fault() {
                    Fault::MovedByAnother => {
                        *state.fault.lock() = Fault::None;
                        Response::Failed { kind: ErrorKind::NotFound, message: "no such namespace any more" }
                    }
                    Fault::MovesAndFails => {
                        Response::Failed { kind: ErrorKind::Io, message: "moved, and not told its disk" }
                    }
                    _ => Response::Namespace { namespace: now, epoch, block_bytes },
                }
            }
            None => Response::Failed { kind: ErrorKind::NotFound, message: "no such namespace" },
        },
        Request::Exists { namespace, hashes } => {
            let there: Vec<u8> = hashes
                .iter()
                .map(|hash| u8::from(store.blocks.contains_key(&key(*namespace, hash))))
                .collect();
            return Ok(Response::Present(&there).encode(id, out)?);
        }
        Request::Remove { namespace, hashes } => {
            state.removes.fetch_add(1, Ordering::SeqCst);
            hashes.iter().for_each(|hash| drop(store.blocks.remove(&key(*namespace, hash))));
            Response::Done
        }
        // Its welcome has no features.
        Request::Close { .. } => return state.survives(false, "a request that it does not know"),
        Request::Stat => Response::Stats("{}"),
        _ => Response::Failed { kind: ErrorKind::Protocol, message: "out of turn" },
    };
    Ok(response.encode(id, out)?)
}

fn put<'a>(
    state: &State,
    namespace: NamespaceId,
    block_bytes: usize,
    blocks: PutBlocks<'_>,
    bytes: &[u8],
) -> Response<'a> {
    let mut store = state.store.lock();
    if !store.namespaces.contains_key(&namespace) {
        return Response::Failed { kind: ErrorKind::NotFound, message: "no such namespace" };
    }
    let statuses = blocks.iter().zip(bytes.chunks(block_bytes)).map(|((hash, sum), block)| {
        if crc64(block) != sum {
            return Status::Failed(ErrorKind::Corrupt);
        }
        let key = key(namespace, hash);
        if store.blocks.contains_key(&key) {
            return Status::Had;
        }
        store.blocks.insert(key, (block.to_vec(), sum));
        Status::Ok
    });
    Response::Stored(statuses.collect())
}

fn get(mut stream: &TcpStream, state: &State, id: u64, namespace: NamespaceId, hashes: Hashes<'_>) -> Served {
    let fault = state.fault();
    if fault == Fault::Garbage {
        stream.write_all(&[0x5a; 4096])?;
        return Ok(());
    }
    let mut order: Vec<_> = (0..).zip(hashes.iter()).collect();
    if fault == Fault::Backwards {
        order.reverse();
    }
    let id = if fault == Fault::WrongId { id + 1_000_000 } else { id };
    for (index, hash) in order {
        let mut out = Vec::new();
        let found = state.store.lock().blocks.get(&key(namespace, hash)).cloned();
        state.keep_back(Fault::LateGets, hash.to_string());
        let Some((mut bytes, mut sum)) = found else {
            let status = Status::Failed(ErrorKind::NotFound);
            Response::Block { index, status, block_bytes: 0, crc64: 0 }.encode(id, &mut out)?;
            stream.write_all(&out)?;
            continue;
        };
        match fault {
            Fault::WrongChecksum => sum ^= 1 << 63,
            Fault::FlippedBit => {
                let at = bytes.len() / 2;
                bytes[at] ^= 4;
            }
            Fault::WrongLength => bytes.push(0),
            _ => {}
        }
        let block_bytes = u32::try_from(bytes.len())?;
        Response::Block { index, status: Status::Ok, block_bytes, crc64: sum }.encode(id, &mut out)?;
        if matches!(fault, Fault::CloseAmidValue | Fault::HangAmidValue) {
            out.extend_from_slice(&bytes[..bytes.len() / 2]);
            stream.write_all(&out)?;
            if fault == Fault::HangAmidValue {
                state.hang(stream);
            }
            return Err("closed amid a value".into());
        }
        out.extend_from_slice(&bytes);
        stream.write_all(&out)?;
    }
    Ok(())
}
