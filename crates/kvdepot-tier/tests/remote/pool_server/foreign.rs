//! InfiniStore's protocol, as its own server speaks it, including its traps: a key shows before its value has arrived,
//! and a client that requests it then crashes the server; a miss is four bytes; one request at a time.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use kvdepot_wire::infini::{Reply, Request, TcpOp, code};
use kvdepot_wire::{Frame, FrameBuffer};

use super::{Fault, Served, State, next, payload};

/// A key that was announced but whose value has not arrived.
const NOT_YET: &[u8] = b"";

pub(super) fn serve(mut stream: &TcpStream, state: &State, answers_unknown: bool) -> Served {
    let mut buffer = FrameBuffer::requests();
    while let Some((op, body)) = next(stream, &mut buffer)? {
        let fault = state.fault();
        if fault == Fault::HungHello || (fault == Fault::Hung && op < 0x80) {
            state.hang(stream);
            return Ok(());
        }
        if op >= 0x80 {
            if answers_unknown {
                let mut out = Vec::new();
                Reply::Code(code::INVALID).encode(&mut out);
                stream.write_all(&out)?;
                continue;
            }
            return Ok(());
        }
        state.survives(buffer.is_empty() || op == b'L', "a request before the one before was answered")?;
        let mut out = Vec::new();
        match Request::decode(Frame { op, body: &body })? {
            Request::Exists(key) => {
                state.exists.fetch_add(1, Ordering::SeqCst);
                state.hold_still();
                let is_there =
                    state.fault() == Fault::AllThere || state.store.lock().values.contains_key(key);
                Reply::Number(i32::from(!is_there)).encode(&mut out);
            }
            Request::Match(_) | Request::Exchange(_) | Request::RdmaOnly(_) => {
                Reply::Code(code::INVALID).encode(&mut out);
            }
            Request::Delete(keys) => {
                let mut store = state.store.lock();
                let mut count = 0;
                for key in keys {
                    let value = store.values.remove(key);
                    state.survives(value.as_deref() != Some(NOT_YET), "a key without value was deleted")?;
                    count += i32::from(value.is_some());
                }
                Reply::Number(count).encode(&mut out);
            }
            Request::Tcp { key, op: TcpOp::Put(bytes) } => {
                state.survives(bytes > 0, "a value of no bytes")?;
                let key = key.to_vec();
                if key.ends_with(b"/whole") {
                    state.keep_back(Fault::LatePuts, String::from_utf8_lossy(&key).into_owned());
                }
                state.store.lock().values.insert(key.clone(), NOT_YET.to_vec());
                let value = payload(stream, &mut buffer, bytes as usize)?;
                state.store.lock().values.insert(key, value);
                Reply::Code(code::FINISH).encode(&mut out);
            }
            Request::Tcp { key, op: TcpOp::Get } => {
                state.gets.fetch_add(1, Ordering::SeqCst);
                state.hold_still();
                let value = state.store.lock().values.get(key).cloned();
                state.survives(value.as_deref() != Some(NOT_YET), "a key without value was asked for")?;
                if !get(stream, state, value, &mut out)? {
                    return Ok(());
                }
            }
        }
        stream.write_all(&out)?;
    }
    Ok(())
}

fn get(
    mut stream: &TcpStream,
    state: &State,
    value: Option<Vec<u8>>,
    out: &mut Vec<u8>,
) -> Result<bool, Box<dyn std::error::Error>> {
    let Some(mut value) = value else {
        Reply::Code(code::NOT_FOUND).encode(out);
        return Ok(true);
    };
    match state.fault() {
        Fault::FlippedBit => {
            let at = value.len() / 2;
            value[at] ^= 4;
        }
        Fault::WrongChecksum => value[57] ^= 1,
        Fault::WrongLength => value.push(0),
        _ => {}
    }
    match state.fault() {
        Fault::Garbage => {
            stream.write_all(&[0x5a; 64])?;
            return Ok(false);
        }
        Fault::CloseAmidValue | Fault::HangAmidValue => {
            Reply::Value(u32::try_from(value.len())?).encode(out);
            out.extend_from_slice(&value[..value.len() / 2]);
            stream.write_all(out)?;
            if state.fault() == Fault::HangAmidValue {
                state.hang(stream);
            }
            return Ok(false);
        }
        _ => {}
    }
    Reply::Value(u32::try_from(value.len())?).encode(out);
    out.extend_from_slice(&value);
    Ok(true)
}
