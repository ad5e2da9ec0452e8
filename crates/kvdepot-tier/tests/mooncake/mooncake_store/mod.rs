//! A helper of a Mooncake tier without Mooncake: a thread over a store in memory, which can be told to fail.
#![allow(unreachable_pub, reason = "shared by several tests")]
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use kvdepot_io::SharedMemory;
use kvdepot_tier::mooncake::{
    HelperProcess, HelperStarter, MooncakeAnswer, MooncakeConfig, MooncakeHelper, MooncakeOp, MooncakeRequest,
};

/// What happens to requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// They are not carried out before [`Store::free`], and then completely, late.
    Hang,
    /// The helper ends instead.
    Die,
    /// All fail with this code.
    Code(i64),
    /// The answer has one code less.
    Short,
    /// The answer is no JSON.
    Garbage,
    /// The answer is to another request.
    Stranger,
    /// The answer announces more bytes than a frame has.
    Endless,
    /// Values come with one bit inverted.
    Flip,
    /// Values come as those of another key.
    Other,
    /// Values come one byte short.
    Cut,
}

#[derive(Default)]
struct Inside {
    values: HashMap<String, Vec<u8>>,
    fault: Fault,
    /// The only operation with the fault; `None` = all.
    only: Option<MooncakeOp>,
    /// Number of removals that leases still refuse.
    leases: usize,
    requests: Vec<(MooncakeOp, usize)>,
}

/// The store, which outlives its helpers.
#[derive(Clone, Default)]
pub struct Store {
    inside: Arc<(Mutex<Inside>, Condvar)>,
    starts: Arc<AtomicUsize>,
    refuse_starts: Arc<AtomicUsize>,
}

struct Process {
    socket: UnixStream,
    store: Store,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Process")
    }
}

impl HelperProcess for Process {
    fn end(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.store.free();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.0.lock().unwrap()
    }

    /// Sets what happens to requests of one kind, or of all.
    pub fn set(&self, fault: Fault, only: Option<MooncakeOp>) {
        let mut inside = self.lock();
        (inside.fault, inside.only) = (fault, only);
        self.inside.1.notify_all();
    }

    /// Ends all faults; what hangs goes on.
    pub fn free(&self) {
        self.set(Fault::None, None);
    }

    pub fn lease(&self, refusals: usize) {
        self.lock().leases = refusals;
    }

    pub fn refuse_starts(&self, count: usize) {
        self.refuse_starts.store(count, Ordering::SeqCst);
    }

    pub fn starts(&self) -> usize {
        self.starts.load(Ordering::SeqCst)
    }

    /// Returns the requests so far, with the number of their keys.
    pub fn requests(&self) -> Vec<(MooncakeOp, usize)> {
        self.lock().requests.clone()
    }

    pub fn names(&self) -> Vec<String> {
        self.lock().values.keys().cloned().collect()
    }

    /// Loses the values that are meant.
    pub fn lose(&self, is_meant: impl Fn(&str) -> bool) {
        self.lock().values.retain(|name, _| !is_meant(name));
    }

    /// Changes the values that are meant.
    pub fn change(&self, is_meant: impl Fn(&str) -> bool, change: impl Fn(&mut Vec<u8>)) {
        self.lock().values.iter_mut().filter(|(name, _)| is_meant(name)).for_each(|(_, value)| change(value));
    }

    /// Settings under which nothing depends on how fast this machine is.
    pub fn config() -> MooncakeConfig {
        let hour = std::time::Duration::from_secs(3600);
        MooncakeConfig {
            timeout: std::time::Duration::from_secs(45),
            staging_bytes: 64 << 20,
            present_ttl: hour,
            absent_ttl: hour,
            ..MooncakeConfig::default()
        }
    }

    pub fn starter(&self) -> HelperStarter {
        let store = self.clone();
        Arc::new(move |memory| {
            store.starts.fetch_add(1, Ordering::SeqCst);
            let take = |left: usize| left.checked_sub(1);
            if store.refuse_starts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
                return Err(kvdepot_core::Error::new(
                    kvdepot_core::ErrorKind::Unavailable,
                    "no helper today",
                ));
            }
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (serving, memory) = (store.clone(), Arc::clone(memory));
            let socket = theirs.try_clone().unwrap();
            let thread = std::thread::spawn(move || serving.serve(&theirs, &memory));
            let process = Process { socket, store: store.clone(), threads: vec![thread] };
            Ok(MooncakeHelper { socket: ours, process: Box::new(process) })
        })
    }

    fn serve(&self, stream: &UnixStream, memory: &Arc<SharedMemory>) {
        let hello = MooncakeAnswer { master: "memory:0".to_owned(), ..MooncakeAnswer::default() };
        if send(stream, &serde_json::to_vec(&hello).unwrap()).is_err() {
            return;
        }
        let mut threads = Vec::new();
        while let Some(text) = receive(stream) {
            let request: MooncakeRequest = serde_json::from_slice(&text).unwrap();
            let (store, stream, memory) = (self.clone(), stream.try_clone().unwrap(), Arc::clone(memory));
            threads.push(std::thread::spawn(move || {
                if let Some(text) = store.answer(&request, &memory, &stream) {
                    let _ = send(&stream, &text);
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    fn answer(
        &self,
        request: &MooncakeRequest,
        memory: &SharedMemory,
        stream: &UnixStream,
    ) -> Option<Vec<u8>> {
        let mut inside = self.lock();
        inside.requests.push((request.op, request.keys.len()));
        let is_meant = |inside: &Inside| inside.only.is_none_or(|only| only == request.op);
        while inside.fault == Fault::Hang && is_meant(&inside) {
            inside = self.inside.1.wait(inside).unwrap();
        }
        let fault = if is_meant(&inside) { inside.fault } else { Fault::None };
        if fault == Fault::Die {
            let _ = stream.shutdown(Shutdown::Both);
            return None;
        }
        let mut answer = MooncakeAnswer { id: request.id, ..MooncakeAnswer::default() };
        answer.codes = match fault {
            Fault::Code(code) => vec![code; request.keys.len()],
            _ => (0..request.keys.len()).map(|n| inside.one(request, n, memory, fault)).collect(),
        };
        drop(inside);
        match fault {
            Fault::Short => {
                answer.codes.pop();
            }
            Fault::Stranger => answer.id += 1000,
            Fault::Garbage => return Some(b"{\"id\": 1, \"codes\": [".to_vec()),
            Fault::Endless => {
                let _ = (&*stream).write_all(&u32::MAX.to_le_bytes());
                return None;
            }
            _ => {}
        }
        Some(serde_json::to_vec(&answer).unwrap())
    }
}

impl Inside {
    fn one(&mut self, request: &MooncakeRequest, n: usize, memory: &SharedMemory, fault: Fault) -> i64 {
        let name = &request.keys[n];
        let value = || {
            let mut value = vec![0; request.bytes[n]];
            memory.read(request.at[n], &mut value).unwrap();
            value
        };
        match request.op {
            MooncakeOp::Exists => self.values.contains_key(name).into(),
            MooncakeOp::Put | MooncakeOp::PutRecord if self.values.contains_key(name) => 1,
            MooncakeOp::Put | MooncakeOp::PutRecord | MooncakeOp::ReplaceRecord => {
                self.values.insert(name.clone(), value());
                0
            }
            MooncakeOp::Get => {
                let wanted = match fault {
                    Fault::Other => {
                        self.values.iter().find(|(other, value)| *other != name && value.len() > 1000)
                    }
                    _ => self.values.get_key_value(name),
                };
                let Some((_, value)) = wanted else { return -704 };
                if value.len() > request.bytes[n] {
                    return -600;
                }
                let mut value = value.clone();
                if fault == Fault::Flip {
                    let last = value.len() - 1;
                    value[last] ^= 4;
                }
                // As Mooncake does: of several buffers for one key only the last is filled, and all succeed.
                if !request.keys[n + 1..].contains(name) {
                    memory.write(request.at[n], &value).unwrap();
                }
                value.len() as i64 - i64::from(fault == Fault::Cut)
            }
            MooncakeOp::Remove if self.values.contains_key(name) && self.leases > 0 => {
                self.leases -= 1;
                -706
            }
            MooncakeOp::Remove => self.values.remove(name).map_or(-704, |_| 0),
        }
    }
}

fn send(mut stream: &UnixStream, text: &[u8]) -> std::io::Result<()> {
    let mut frame = (text.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(text);
    stream.write_all(&frame)
}

fn receive(mut stream: &UnixStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut text).ok()?;
    Some(text)
}
