//! Blocks with known bytes, and calls that wait for their results.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;
use kvdepot_io::mapped::LentMedium;

use crate::{Done, Fetched, LeaseItem, Presence, ReadItem, Tier, TierEvents, WriteItem, Written};

/// How long a check waits for an answer before it fails: a minute, or what KVDEPOT_TEST_PATIENCE_S says on a machine that is
/// very slow.
fn patience() -> Duration {
    static PATIENCE: OnceLock<Duration> = OnceLock::new();
    *PATIENCE.get_or_init(|| {
        let seconds = std::env::var("KVDEPOT_TEST_PATIENCE_S").ok().and_then(|text| text.parse().ok());
        Duration::from_secs(seconds.unwrap_or(60))
    })
}

/// Waits for what other threads and processes do, or fails: see [`Bench::soon`].
///
/// # Panics
/// It has not happened in time.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Bench::soon();
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Attaches a listener, for as long as the caller keeps it.
pub fn listen<T: TierEvents + 'static>(tier: &dyn Tier, listener: &Arc<T>) {
    let events: Arc<dyn TierEvents> = Arc::clone(listener) as _;
    tier.attach(Arc::downgrade(&events));
}

/// Returns a namespace for tests, identified by `model`.
pub fn spec(model: &str, layout: BlockLayout) -> NamespaceSpec {
    NamespaceSpec::new(&serde_json::json!({ "model": model }).to_string(), layout)
        .expect("a valid description")
}

/// Calls of a tier that wait for their results.
pub trait Waiting {
    /// Opens a namespace.
    fn open_and_wait(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32>;

    /// Moves a namespace to a new epoch.
    fn advance_and_wait(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32>;

    /// Forgets a block.
    fn remove_and_wait(&self, key: BlockKey) -> Result<()>;
}

impl<T: Tier + ?Sized> Waiting for T {
    fn open_and_wait(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let (done, receive) = answer();
        self.open_namespace(&Arc::new(spec.clone()), at_least, Bench::soon(), done);
        Bench::answer(&receive)
    }

    fn advance_and_wait(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let (done, receive) = answer();
        self.advance_epoch(&Arc::new(spec.clone()), at_least, Bench::soon(), done);
        Bench::answer(&receive)
    }

    fn remove_and_wait(&self, key: BlockKey) -> Result<()> {
        let (done, receive) = answer();
        self.remove(vec![key], done);
        Bench::answer(&receive)
    }
}

/// Returns a `Done` and the receiver of its result.
pub(super) fn answer<T: Send + 'static>() -> (Done<T>, Receiver<Result<T>>) {
    let (send, receive) = channel();
    (Box::new(move |outcome| drop(send.send(outcome))), receive)
}

/// Returns a read's result with a miss as an error, for tests that expect a block; a tier must not return that error
/// itself.
pub(super) fn whole(outcome: Result<Fetched>) -> Result<()> {
    match outcome {
        Ok(Fetched::Whole) => Ok(()),
        Ok(Fetched::Miss) => Err(Error::new(ErrorKind::NotFound, "the read was a miss")),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::new(ErrorKind::Protocol, "a tier gave a miss as an error").with_source(error))
        }
        Err(error) => Err(error),
    }
}

/// A tier with one open namespace, and blocks whose bytes are derived from their numbers.
#[derive(Debug)]
pub struct Bench {
    /// The tier under test.
    pub tier: Arc<dyn Tier>,
    /// Its namespace.
    pub spec: NamespaceSpec,
    /// The namespace's epoch when it was opened.
    pub epoch: u32,
}

impl Bench {
    /// Opens a namespace with two unequal shards of 10,000 bytes in total.
    pub fn new(tier: Arc<dyn Tier>) -> Self {
        let layout = BlockLayout::new(vec![vec![4096, 904], vec![5000]]).expect("a valid layout");
        Self::with(tier, spec("bench", layout))
    }

    /// Opens this namespace.
    pub fn with(tier: Arc<dyn Tier>, spec: NamespaceSpec) -> Self {
        let end = Self::soon();
        let epoch = loop {
            match tier.open_and_wait(&spec, 0) {
                // The disk is busy: opening syncs, and fails after a few seconds.
                Err(error) if error.kind() == ErrorKind::Timeout && Instant::now() < end => {}
                opened => break opened.expect("a namespace opens"),
            }
        };
        Self { tier, spec, epoch }
    }

    /// Returns the key of block `n`.
    pub fn key(&self, n: u64) -> BlockKey {
        let digest = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&digest);
        hash[8..].copy_from_slice(&n.to_be_bytes());
        BlockKey { namespace: self.spec.id(self.epoch), hash: BlockHash(hash) }
    }

    /// Returns the keys of blocks `0..count`.
    pub fn keys(&self, count: u64) -> Vec<BlockKey> {
        (0..count).map(|n| self.key(n)).collect()
    }

    /// Returns the bytes of block `n`: random ones, of which compression saves a quarter except in every third block.
    pub fn bytes(&self, n: u64) -> Vec<u8> {
        let mut state = n ^ 0xd1b5_4a32_d192_ed03;
        let shift = if n % 3 == 2 { 56 } else { 58 };
        let len = usize::try_from(self.spec.layout().block_bytes()).expect("a small block");
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> shift) as u8
            })
            .collect()
    }

    /// Returns a slot with old bytes in it, as the pool provides them.
    pub fn slot(&self) -> SlotBuf {
        let slot =
            SlotBuf::anonymous(usize::try_from(self.spec.layout().slot_bytes()).expect("a small block"));
        slot.write_at(0, &vec![0xa5; slot.len()]);
        slot
    }

    /// Returns a slot with block `n`.
    pub fn filled(&self, n: u64) -> SlotBuf {
        let slot = self.slot();
        slot.write_at(0, &self.bytes(n));
        slot
    }

    /// Returns a deadline that only a hang reaches.
    pub fn soon() -> Instant {
        Instant::now() + patience()
    }

    /// Returns a deadline that only a hang reaches, for so many operations at once: a busy disk syncs them one by one.
    pub fn soon_for(count: u64) -> Instant {
        Self::soon() + Duration::from_secs(count)
    }

    /// Begins to write `src` as block `n`.
    pub fn begin_write(&self, n: u64, src: SlotBuf, deadline: Instant) -> Receiver<Result<Written>> {
        let (done, receive) = answer();
        self.tier.write(vec![WriteItem { key: self.key(n), src, done }], deadline);
        receive
    }

    /// Begins to read block `n`; a miss is `NotFound` here.
    pub fn begin_read(&self, n: u64, dst: SlotBuf, deadline: Instant) -> Receiver<Result<()>> {
        let (send, receive) = channel();
        let done = Box::new(move |outcome| drop(send.send(whole(outcome))));
        self.tier.read(vec![ReadItem::new(self.key(n), dst, done)], deadline);
        receive
    }

    /// Reads block `n` as for a demotion, which is no use of it, and compares it. Returns `false` if it is a miss.
    pub fn read_unused(&self, n: u64) -> bool {
        let (slot, (send, receive)) = (self.slot(), channel());
        let done = Box::new(move |outcome| drop(send.send(whole(outcome))));
        let read = ReadItem { is_use: false, ..ReadItem::new(self.key(n), slot.clone(), done) };
        self.tier.read(vec![read], Self::soon());
        let is_there = Self::answer(&receive).is_ok();
        assert!(
            !is_there || self.block_of(&slot) == self.bytes(n),
            "block {n} came back with other bytes (P1)"
        );
        is_there
    }

    /// Leases block `n`. Returns where it lies in the tier's memory, if the tier has it.
    pub fn lease(&self, n: u64) -> Result<Option<u64>> {
        let (done, receive) = answer();
        self.tier.lease(vec![LeaseItem { key: self.key(n), done }], Self::soon());
        Self::answer(&receive)
    }

    /// Maps the tier's memory, as a client does.
    ///
    /// # Panics
    /// The tier has no memory to lease.
    pub fn lent(&self) -> LentMedium {
        let memory = self.tier.memory().expect("a tier knows its memory").expect("its blocks can be leased");
        LentMedium::map(&memory.file, memory.bytes, memory.head).expect("the memory can be mapped")
    }

    /// Checks that block `n` lies at a place in the tier's memory.
    pub fn check_place(&self, lent: &LentMedium, n: u64, place: u64) {
        let wanted = self.bytes(n);
        let mut found = vec![0; wanted.len()];
        lent.read(place, &mut found).expect("leased memory can be read");
        assert_eq!(found, wanted, "block {n} has other bytes where it was leased (P1)");
    }

    /// Removes block `n`.
    pub fn remove(&self, n: u64) -> Result<()> {
        self.tier.remove_and_wait(self.key(n))
    }

    /// Waits for an answer.
    pub fn answer<T>(receiver: &Receiver<T>) -> T {
        receiver.recv_timeout(patience()).expect("every operation ends")
    }

    /// Writes block `n`.
    pub fn write(&self, n: u64) -> Result<Written> {
        Self::answer(&self.begin_write(n, self.filled(n), Self::soon()))
    }

    /// Writes blocks `0..count`, one after another.
    pub fn write_all(&self, count: u64) {
        for n in 0..count {
            let written = self.write(n);
            assert!(matches!(written, Ok(Written::New)), "block {n}: {written:?}");
        }
    }

    /// Reads block `n`.
    pub fn read(&self, n: u64) -> Result<Vec<u8>> {
        let slot = self.slot();
        Self::answer(&self.begin_read(n, slot.clone(), Self::soon()))?;
        Ok(self.block_of(&slot))
    }

    /// Reads block `n` and compares it. Returns `false` if it is a miss.
    pub fn read_is_right(&self, n: u64) -> bool {
        match self.read(n) {
            Ok(bytes) => {
                assert_eq!(bytes, self.bytes(n), "block {n} came back with other bytes (P1)");
                true
            }
            Err(_) => false,
        }
    }

    /// Returns the block's bytes from a slot.
    pub fn block_of(&self, slot: &SlotBuf) -> Vec<u8> {
        let mut out = vec![0; usize::try_from(self.spec.layout().block_bytes()).expect("a small block")];
        slot.read_at(0, &mut out);
        out
    }

    /// Returns how many leading keys of these the tier has.
    pub fn probe(&self, keys: Vec<BlockKey>) -> Result<usize> {
        let (done, receive) = answer();
        self.tier.probe(keys, Self::soon(), done);
        Self::answer(&receive)
    }

    /// Returns what is known about block `n`.
    pub fn peek(&self, n: u64) -> Presence {
        let mut out = vec![Presence::Present; 3];
        self.tier.peek(&[self.key(n)], &mut out);
        assert_eq!(out.len(), 1, "one answer a key, after what was in the vector before");
        out[0]
    }

    /// Waits until nothing is in flight.
    pub fn drain(&self) {
        assert!(self.tier.drain(Self::soon()), "a tier must come to rest");
    }
}
