//! Handing over a pool of a running depot: the snapshot that the old depot writes, and how the new one takes it in.
//!
//! The snapshot is a memfd: a head, pieces of slots, an empty piece. Each part is its length (4 bytes, little-endian)
//! and postcard. It is written once nothing changes any more, and passed to one process over the local door. Namespaces
//! are passed as the text of their fingerprint, so a depot that would name them differently takes nothing over.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_core::machine::{Adopt, Event, Handed, HandedState, HeldBy, HeldFrom, Machine};
use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use crate::config::DepotConfig;
use crate::depot::Depot;
use crate::runner::Runner;
use crate::session::Session;
use crate::taking_in::TakingIn;

/// Version of the snapshot. Depots only hand over to those of the same version.
pub const HAND_OVER_VERSION: u32 = 2;
/// First field of a snapshot.
const MAGIC: u64 = 0x5245_564f_4456_4b00;
/// Number of slots in one piece, read under one hold of the lock.
const PIECE_SLOTS: usize = 128;
/// Number of leases read under one hold of the lock.
const PIECE_LEASES: usize = 1024;
/// Size limit of a part of a snapshot: namespaces are the longest.
const PART_BYTES_MAX: usize = 64 << 20;
/// How often to check whether the depot has settled.
const SETTLE_TICK: Duration = Duration::from_millis(5);

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    magic: u64,
    version: u32,
    /// Bytes that the pool uses, of those that are mapped.
    pool_bytes: u64,
    mapped_bytes: u64,
    /// The tiers with their configuration: which tier holds a block only counts for the same tiers.
    tiers: String,
    /// The fingerprinted text, and the epoch.
    namespaces: Vec<(String, u32)>,
    holders: u32,
}

/// The result of a take-over.
#[derive(Debug)]
pub struct TakenOver {
    /// Number of blocks that are visible now.
    pub blocks: usize,
    /// Number of handed-over blocks that were not taken in: their namespace was reset or could not be opened.
    pub left_out: usize,
    /// A session for each holder with the slots that it still has. Drop it when that holder's copies have ended.
    pub held: Vec<Session>,
}

/// A snapshot whose head was read and fits.
#[derive(Debug)]
pub struct Snapshot {
    head: Head,
    rest: BufReader<File>,
}

fn tiers_of(config: &DepotConfig) -> String {
    let tiers = config.pipeline.split_once('|').map_or("", |(_, tiers)| tiers);
    let mut text = tiers.to_owned();
    config.tiers.iter().for_each(|(name, settings)| text.extend([" ", *name, "=", &settings.to_string()]));
    text
}

fn unreadable(e: std::io::Error) -> Error {
    Error::io("the other depot's list of blocks cannot be read", e)
}

impl Snapshot {
    /// Reads the head. Refuses the snapshot of a depot of another version or with a pool of another size.
    pub fn open(fd: OwnedFd, config: &DepotConfig) -> Result<Self> {
        let mut file = File::from(fd);
        file.rewind().map_err(unreadable)?;
        let mut rest = BufReader::with_capacity(1 << 20, file);
        let head: Head = read(&mut rest)?;
        if head.magic != MAGIC || head.version != HAND_OVER_VERSION {
            return Err(Error::new(
                ErrorKind::Version,
                "the other depot's list of blocks has another version",
            )
            .with("version", head.version)
            .with("known", HAND_OVER_VERSION));
        }
        if head.mapped_bytes != config.mapped_bytes() {
            return Err(other_size(head.mapped_bytes, config.mapped_bytes()));
        }
        Ok(Self { head, rest })
    }

    /// Returns the number of connections whose clients may still copy.
    pub const fn holders(&self) -> usize {
        self.head.holders as usize
    }
}

/// Returns the error of a pool that does not fit.
pub fn other_size(running: u64, configured: u64) -> Error {
    Error::new(
        ErrorKind::Config,
        "the running depot's pool has another size than the configuration says: it cannot be taken over; set the same \
         size, or end the running depot and start this one with an empty pool",
    )
    .with("running_bytes", running)
    .with("configured_bytes", configured)
}

fn not_now(why: &'static str) -> Error {
    Error::new(ErrorKind::Busy, "the pool cannot be handed over now").with("because", why)
}

fn write(out: &mut impl Write, part: &impl Serialize) -> Result<()> {
    let failed = |e| Error::io("the list of blocks cannot be written for the next depot", e);
    let bytes = postcard::to_extend(part, Vec::new()).map_err(|e| {
        Error::new(ErrorKind::Protocol, "the list of blocks cannot be encoded").with_source(e)
    })?;
    let length = u32::try_from(bytes.len()).ok().filter(|&length| length as usize <= PART_BYTES_MAX);
    let length = length.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the list of namespaces is too long").with("bytes", bytes.len())
    })?;
    out.write_all(&length.to_le_bytes()).map_err(failed)?;
    out.write_all(&bytes).map_err(failed)
}

fn read<T: for<'a> Deserialize<'a>>(from: &mut impl Read) -> Result<T> {
    let bad = || Error::new(ErrorKind::Corrupt, "the other depot's list of blocks is damaged");
    let mut length = [0; 4];
    from.read_exact(&mut length).map_err(unreadable)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > PART_BYTES_MAX {
        return Err(bad().with("bytes", length));
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).map_err(unreadable)?;
    postcard::from_bytes(&bytes).map_err(|e| bad().with_source(e))
}

impl Depot {
    /// Begins to hand over the pool: from now on nothing is reserved, leased, fetched, written or evicted, and waiting
    /// requests are answered with what is known. Copies in flight can still be committed.
    pub fn freeze(&self) {
        let runner = &self.runner;
        runner.tell_and_leave(Event::Freeze);
        for token in runner.life.waiters.tokens() {
            runner.tell_and_leave(Event::Expire { token });
        }
    }

    /// Resumes after a failed hand-over.
    pub fn thaw(&self) {
        self.runner.ending.store(false, Ordering::Release);
        self.runner.tell(Event::Thaw);
    }

    /// Returns whether any client may be copying.
    pub fn is_copied(&self) -> bool {
        self.runner.look(Machine::is_leased)
    }

    /// Waits until a frozen depot can be handed over: tiers have completed all their work, including removals in the
    /// background, and only the `holders` have slots. Fails with `Busy` if that takes longer than `patience`.
    pub fn settle(&self, holders: &[&Session], patience: Duration) -> Result<()> {
        let owners: Vec<u64> = holders.iter().map(|session| session.owner()).collect();
        let end = Instant::now() + patience;
        // This does not change while the depot is frozen.
        if let Some(why) = self.runner.look(Machine::closed_somewhere) {
            return Err(not_now(why));
        }
        loop {
            self.runner.work_off();
            let why = match self.runner.look(|machine| machine.unsettled(&owners)) {
                Some(why) => why,
                // Completing their writes may give tiers more to remove.
                None if self.runner.locator.tiers.iter().all(|tier| tier.drain(end))
                    && self.runner.look(|machine| machine.unsettled(&owners)).is_none() =>
                {
                    return Ok(());
                }
                None => "a tier has not ended its writes and removals",
            };
            if Instant::now() >= end {
                return Err(not_now(why));
            }
            std::thread::sleep(SETTLE_TICK);
        }
    }

    /// Writes the snapshot of a settled depot's pool.
    pub fn hand_over(&self, holders: &[&Session]) -> Result<OwnedFd> {
        let runner = &self.runner;
        let owners: Vec<u64> = holders.iter().map(|session| session.owner()).collect();
        let fd = rustix::fs::memfd_create("kvdepot-handover", MemfdFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot make memory for the list of blocks", e.into()))?;
        let mut out = BufWriter::with_capacity(1 << 20, File::from(fd));
        let (pool_bytes, namespaces) =
            runner.look(|machine| (machine.gauges().pool_bytes, machine.namespaces()));
        let (mut held_by, mut from) = (HeldBy::default(), Some(HeldFrom::default()));
        while let Some(start) = from {
            let (held, next) = runner.look(|machine| machine.held(&owners, start, PIECE_LEASES));
            held_by.add(&held);
            from = next;
        }
        let head = Head {
            magic: MAGIC,
            version: HAND_OVER_VERSION,
            pool_bytes,
            mapped_bytes: runner.config.mapped_bytes(),
            tiers: tiers_of(&runner.config),
            namespaces: namespaces
                .iter()
                .map(|(spec, epoch, _)| (spec.canonical().to_owned(), *epoch))
                .collect(),
            holders: u32::try_from(owners.len()).unwrap_or(u32::MAX),
        };
        write(&mut out, &head)?;
        let mut from = Some(0);
        while let Some(start) = from {
            let (handed, next) = runner.look(|machine| machine.handed(&held_by, start, PIECE_SLOTS));
            // An empty piece marks the end.
            if !handed.is_empty() {
                write(&mut out, &handed)?;
            }
            from = next;
        }
        write(&mut out, &Vec::<Handed>::new())?;
        if let Some(why) = runner.look(|machine| machine.unsettled(&owners)) {
            return Err(not_now(why));
        }
        let file = out.into_inner().map_err(|e| {
            Error::io("the list of blocks cannot be written for the next depot", e.into_error())
        })?;
        Ok(file.into())
    }

    /// Marks the pool as handed over: nothing is written any more when this depot terminates.
    pub fn leave(&self) {
        self.runner.finished.store(true, Ordering::Release);
        self.runner.stopping.store(true, Ordering::Release);
    }

    /// Takes in the blocks that another depot left in this one's pool, before there is any request for its space. The
    /// other depot's process has exited.
    pub fn take_over(&self, mut snapshot: Snapshot) -> Result<TakenOver> {
        let taking = TakingIn::begin(self, snapshot.head.pool_bytes, &snapshot.head.namespaces);
        let same_tiers = snapshot.head.tiers == tiers_of(&self.runner.config);
        let held: Vec<Session> = (0..snapshot.holders()).map(|_| self.session()).collect();
        let mut handed_blocks = 0;
        loop {
            let piece: Vec<Handed> = read(&mut snapshot.rest)?;
            if piece.is_empty() {
                break;
            }
            let mut slots = Vec::with_capacity(piece.len());
            for mut handed in piece {
                if let HandedState::Block { saved, to_write, .. } = &mut handed.state {
                    handed_blocks += 1;
                    if !same_tiers {
                        (*saved, *to_write) = (0, u8::MAX);
                    }
                }
                let owner_of = |&holder: &u32| held.get(holder as usize).map(Session::owner).ok_or(holder);
                let owners =
                    handed.holders.iter().map(owner_of).collect::<std::result::Result<_, u32>>().map_err(
                        |holder| {
                            Error::new(ErrorKind::Corrupt, "the other depot's list of blocks is damaged")
                                .with("holder", holder)
                        },
                    )?;
                slots.push(Adopt { handed, owners });
            }
            taking.take(slots);
        }
        let blocks = taking.blocks();
        Ok(TakenOver { blocks, left_out: handed_blocks - blocks.min(handed_blocks), held })
    }
}

impl Runner {
    /// Fails unless other processes can map the pool, as a take-over requires.
    pub(crate) fn ensure_shared(&self) -> Result<()> {
        self.pool.fd().map(drop).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "the pool is this process's own memory: it cannot be taken over",
            )
        })
    }
}

impl Depot {
    /// Refuses an impossible hand-over, before anything is stopped for it.
    pub fn may_hand_over(&self, version: u32, pool_bytes: u64) -> Result<()> {
        self.runner.ensure_shared()?;
        if version != HAND_OVER_VERSION {
            return Err(Error::new(
                ErrorKind::Version,
                "the running depot hands its pool over to depots of its own version only",
            )
            .with("running_version", HAND_OVER_VERSION)
            .with("asked_version", version));
        }
        let running = self.runner.config.mapped_bytes();
        if pool_bytes != running {
            return Err(other_size(running, pool_bytes));
        }
        Ok(())
    }
}
