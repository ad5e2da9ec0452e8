//! Epochs of namespaces in Mooncake.
//!
//! Each namespace has one record: its epoch, and a random token that is part of its blocks' names (`names`). Records
//! are replaced as a whole, and read again after they were written, so of several depots that reset at once each goes
//! on until it has an epoch of its own, or a later one. Mooncake may lose a record like any value, with its holder or
//! its master. The next depot then stores a new record, and all blocks of the namespace are without a name: a miss, and
//! never a block from before a reset.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{EPOCH_CLAIMS_MAX, EPOCH_RETRY_MS};
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::random;

use super::link::Call;
use super::names::{self, RECORD_BYTES_MAX, Record};
use super::protocol::MooncakeOp;
use super::shared::{Shared, code, refused};
use crate::spaces::Wanted;

/// What is stored as a namespace's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Nothing,
    /// Other bytes than a record of this namespace.
    Damaged,
    Record(Record),
}

impl Stored {
    const fn epoch(self) -> Option<u32> {
        match self {
            Self::Record(record) => Some(record.epoch),
            Self::Nothing | Self::Damaged => None,
        }
    }
}

impl Shared {
    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open(
        self: &Arc<Self>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
    ) -> Result<u32> {
        let root = spec.root();
        if self.named.lock().spaces.wanted(root).is_some() {
            self.leave(spec, at_least, false);
            return self.settle(root, deadline);
        }
        let known = {
            let spaces = &self.named.lock().spaces;
            spaces.epoch(root).filter(|epoch| spaces.is_open(root) && *epoch >= at_least)
        };
        if known.is_none() {
            self.link.wait_until_up(deadline)?;
        }
        let stored = match (self.stored(root, deadline), known) {
            (Ok(stored), _) => stored,
            (Err(error), Some(epoch)) => {
                tracing::debug!(%error, namespace = %root, "cannot check whether a namespace has a new epoch");
                return Ok(epoch);
            }
            (Err(error), None) => return Err(error),
        };
        let wanted = at_least.max(known.unwrap_or(0));
        match stored {
            Stored::Record(record) if record.epoch >= wanted => {
                self.enter(spec, record)?;
                Ok(record.epoch)
            }
            Stored::Record(_) | Stored::Nothing | Stored::Damaged => {
                self.leave(spec, wanted, false);
                self.settle(root, deadline)
            }
        }
    }

    /// Serves a namespace as its record says.
    fn enter(&self, spec: &Arc<NamespaceSpec>, record: Record) -> Result<()> {
        let root = spec.root();
        let old = {
            let mut named = self.named.lock();
            let old = named.spaces.enter(spec, record.epoch)?;
            let before = named.tokens.insert(root, record.token);
            let is_other = before.is_some_and(|token| token != record.token);
            old.or_else(|| is_other.then(|| spec.id(record.epoch)))
        };
        if let Some(old) = old {
            self.beliefs.forget_namespace(old);
        }
        Ok(())
    }

    /// Makes a namespace unreachable until an epoch is stored.
    pub(super) fn leave(&self, spec: &Arc<NamespaceSpec>, at_least: u32, advance: bool) {
        let old = self.named.lock().spaces.want(spec, at_least, advance);
        if let Some(old) = old {
            self.beliefs.forget_namespace(old);
        }
    }

    /// Stores the requested epoch of a namespace, and serves it.
    pub(super) fn settle(self: &Arc<Self>, root: NamespaceId, deadline: Instant) -> Result<u32> {
        // One at a time: two threads would each store an epoch for the same request.
        let Some(_turn) =
            self.settling[usize::from(root.0[0]) % self.settling.len()].try_lock_until(deadline)
        else {
            return Err(Error::new(ErrorKind::Timeout, "an epoch in Mooncake is still being stored"));
        };
        let wanted = self.named.lock().spaces.wanted(root);
        let Some(wanted) = wanted else {
            // Another thread has stored it in the meantime.
            let epoch = self.named.lock().spaces.epoch(root);
            return epoch.ok_or_else(|| {
                Error::new(ErrorKind::Busy, "the namespace is not open yet").with("namespace", root)
            });
        };
        self.link.wait_until_up(deadline)?;
        let record = self.store(root, &wanted, deadline)?;
        let mut named = self.named.lock();
        if named.spaces.settled(&wanted, record.epoch) {
            named.tokens.insert(root, record.token);
            return Ok(record.epoch);
        }
        Err(Error::new(ErrorKind::Busy, "the namespace is being reset again").with("namespace", root))
    }

    /// Brings the stored record to the requested epoch.
    fn store(&self, root: NamespaceId, wanted: &Wanted, deadline: Instant) -> Result<Record> {
        for _ in 0..EPOCH_CLAIMS_MAX {
            let stored = self.stored(root, deadline)?;
            let target = wanted.target(stored.epoch().unwrap_or(0))?;
            if let Stored::Record(record) = stored
                && record.epoch == target
            {
                return Ok(record);
            }
            // A token that no other record has.
            let mine = Record { epoch: target, token: u64::from_le_bytes(random::bytes()?) };
            self.write_record(root, mine, stored == Stored::Nothing, deadline)?;
            // Another depot may have been first, or has replaced it since.
            if self.stored(root, deadline)? == Stored::Record(mine) {
                return Ok(mine);
            }
        }
        let what = "other depots change a namespace's epoch in Mooncake all the time";
        Err(Error::new(ErrorKind::Busy, what).with("namespace", root))
    }

    /// Returns what the store has of a namespace. A record that another depot replaces at this moment is looked at again.
    fn stored(&self, root: NamespaceId, deadline: Instant) -> Result<Stored> {
        for _ in 1..RECORD_LOOKS_MAX {
            match self.look(root, deadline)? {
                None | Some(Stored::Damaged) => {}
                Some(stored) => return Ok(stored),
            }
            if self.link.stops_within(RECORD_PAUSE) {
                break;
            }
        }
        self.look(root, deadline)?.ok_or_else(|| {
            Error::new(ErrorKind::Busy, "a namespace's epoch in Mooncake is being replaced")
                .with("namespace", root)
        })
    }

    /// Reads a record. `None` if it is being replaced.
    fn look(&self, root: NamespaceId, deadline: Instant) -> Result<Option<Stored>> {
        let deadline = self.patience(deadline);
        let extent = self.staging.take(RECORD_BYTES_MAX, deadline)?;
        let call = Call {
            op: MooncakeOp::Get,
            keys: vec![names::record(&self.config.prefix, root)],
            at: vec![extent.at()],
            bytes: vec![RECORD_BYTES_MAX],
        };
        let (codes, extent) = self.fetch(call, extent, deadline)?;
        let code = codes.first().copied().unwrap_or(code::NOT_FOUND);
        if code == code::NOT_READY {
            return Ok(None);
        }
        if code == code::NOT_FOUND {
            return Ok(Some(Stored::Nothing));
        }
        // Longer than any record: something else.
        if code == TOO_LONG {
            return Ok(Some(Stored::Damaged));
        }
        let Ok(len) = usize::try_from(code) else {
            return Err(refused(code, &names::record(&self.config.prefix, root)));
        };
        let mut text = vec![0; len.min(RECORD_BYTES_MAX)];
        extent.memory().read(extent.at(), &mut text)?;
        Ok(Some(Record::parse(&text, root).map_or(Stored::Damaged, Stored::Record)))
    }

    fn write_record(
        &self,
        root: NamespaceId,
        record: Record,
        is_first: bool,
        deadline: Instant,
    ) -> Result<()> {
        let deadline = self.patience(deadline);
        let text = record.text(root);
        let extent = self.staging.take(text.len(), deadline)?;
        extent.memory().write(extent.at(), text.as_bytes())?;
        let call = Call {
            op: if is_first { MooncakeOp::PutRecord } else { MooncakeOp::ReplaceRecord },
            keys: vec![names::record(&self.config.prefix, root)],
            at: vec![extent.at()],
            bytes: vec![text.len()],
        };
        let answered = self.link.call(call, Some(extent), deadline, None).map_err(|failed| failed.error)?;
        match answered.codes.first().copied().unwrap_or(code::NOT_FOUND) {
            0.. | code::IS_THERE => Ok(()),
            other => Err(refused(other, &names::record(&self.config.prefix, root))),
        }
    }

    /// Stores the epochs that are not stored yet; called once in [`EPOCH_RETRY_MS`].
    pub(super) fn retry_wanted(self: &Arc<Self>) {
        if !self.link.is_up() {
            return;
        }
        let wanted = self.named.lock().spaces.all_wanted();
        for root in wanted {
            if self.link.is_stopping() {
                return;
            }
            match self.settle(root, Instant::now() + self.config.timeout) {
                Ok(epoch) => tracing::warn!(namespace = %root, epoch, "a reset is stored now"),
                Err(error) => tracing::debug!(%error, namespace = %root, "a reset is still not stored"),
            }
        }
    }

    /// Does in the background, until the tier ends, what could not be done at once.
    pub(super) fn catch_up(self: &Arc<Self>) {
        while !self.link.stops_within(Duration::from_millis(EPOCH_RETRY_MS)) {
            self.retry_wanted();
            self.remove_corrupt();
        }
    }
}

/// Mooncake's answer for a buffer that is shorter than the value.
const TOO_LONG: i64 = -600;

/// How often a record is read that is being replaced, or looks damaged.
const RECORD_LOOKS_MAX: usize = 6;
const RECORD_PAUSE: Duration = Duration::from_millis(20);
