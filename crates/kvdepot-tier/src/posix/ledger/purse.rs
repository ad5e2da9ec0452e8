//! What one depot may still write without asking the ledger: pure, without clock or I/O.

use super::book::{Report, Row};

/// Why nothing was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::posix) enum Refused {
    /// The ledger may have more: worth waiting for its next turn.
    Ask,
    /// All is granted: something has to be unlinked first.
    Empty,
    /// The membership is not known to hold: nothing may be written.
    Fenced,
    /// As many writes are under way as the ledger knows of: one of them has to end first.
    Crowded,
}

/// A file that is about to be unlinked.
#[derive(Clone, Copy, Debug)]
#[must_use = "the file counts as being unlinked until this is given back"]
pub(in crate::posix) struct Unlinking {
    bytes: u64,
    membership: u64,
}

/// A depot's account in the ledger.
#[derive(Debug)]
pub(in crate::posix) struct Purse {
    /// Its row in the ledger.
    pub(super) id: Option<u64>,
    /// Until when the membership holds, by the depot's own clock; before it has joined: how long writes wait for that.
    pub(super) valid_until_ms: u64,
    /// As the ledger has it.
    pub(super) granted: i64,
    /// To be given back: not to be spent any more.
    pub(super) giving: u64,
    /// How often this depot has joined: what it has done before counts no more.
    membership: u64,
    /// Bytes unlinked, of writes begun, and of writes ended, since it joined.
    freed: u64,
    spent: u64,
    done: u64,
    /// Bytes of files that are being unlinked. A survey may find them gone before they are in `freed`.
    unlinking: u64,
    /// Bytes of files that are being renamed. A survey may find them under neither name.
    moving: u64,
    /// Bytes of writes that have not ended.
    under_way: u64,
    /// What the ledger could still grant when last seen.
    pub(super) pot: u64,
    /// Whether a survey is about to show what else can be granted.
    pub(super) is_settling: bool,
    /// Bytes above the cap that this depot has to unlink.
    pub(super) owed: u64,
    /// The smallest cap of any member.
    pub(super) cap: u64,
    /// Bytes of a block for which there is no place and no file to unlink.
    pub(super) hungry: u64,
    /// The same as the ledger has it.
    told_hungry: u64,
    /// Whether more is granted than this depot can account for.
    pub(super) is_in_doubt: bool,
    /// The largest block that may be written, and how many at a time.
    pub(super) block_max: u64,
    pub(super) writes_max: u64,
    /// The largest block that somebody wants to write; 0 if nobody waits for the ledger.
    pub(super) wanted: u64,
    /// The number of members.
    pub(super) members: u64,
    /// Bytes of all files and unspent grants, at most.
    pub(super) bound: u64,
}

impl Purse {
    pub(in crate::posix) fn new(cap: u64, writes_max: u64, patience_ms: u64) -> Self {
        Self {
            id: None,
            valid_until_ms: patience_ms,
            granted: 0,
            giving: 0,
            membership: 0,
            freed: 0,
            spent: 0,
            done: 0,
            unlinking: 0,
            moving: 0,
            under_way: 0,
            pot: 0,
            is_settling: false,
            owed: 0,
            cap,
            hungry: 0,
            told_hungry: 0,
            is_in_doubt: false,
            block_max: 0,
            writes_max,
            wanted: 0,
            members: 0,
            bound: 0,
        }
    }

    /// Bytes granted and not spent; negative if writes were under way when it joined.
    fn balance(&self) -> i128 {
        i128::from(self.granted) + i128::from(self.freed) - i128::from(self.spent) - i128::from(self.giving)
    }

    /// Bytes that may be written now.
    pub(in crate::posix) fn unspent(&self) -> u64 {
        u64::try_from(self.balance()).unwrap_or(0)
    }

    /// What `stat` tells of it.
    pub(in crate::posix) fn figures(&self, now_ms: u64) -> Vec<(&'static str, u64)> {
        let depots = if self.id.is_some() && !self.is_fenced(now_ms) { self.members } else { 0 };
        vec![
            ("shared_bytes", self.bound),
            ("shared_granted_bytes", self.unspent()),
            ("shared_depots", depots),
        ]
    }

    /// The cap in force.
    pub(in crate::posix) const fn cap(&self) -> u64 {
        self.cap
    }

    /// Returns whether this depot has to unlink files so that the directories come below the cap.
    pub(in crate::posix) fn is_in_debt(&self) -> bool {
        self.unspent() < self.owed
    }

    /// Returns whether the ledger should be asked soon, although nobody waits yet.
    pub(in crate::posix) fn is_low(&self) -> bool {
        let piece = piece(self.cap, self.block_max, self.members);
        self.pot > 0 && self.spent > 0 && self.unspent() < piece / 2
    }

    /// Returns whether the membership is not known to hold.
    pub(in crate::posix) const fn is_fenced(&self, now_ms: u64) -> bool {
        now_ms >= self.valid_until_ms
    }

    /// Spends the bytes of a write that is about to begin.
    pub(in crate::posix) fn spend(&mut self, bytes: u64, now_ms: u64) -> Result<(), Refused> {
        if self.is_fenced(now_ms) {
            return Err(Refused::Fenced);
        }
        let may = self.unspent().saturating_sub(self.owed);
        let is_known = self.id.is_some() && bytes <= self.block_max;
        if is_known && bytes <= may {
            if self.is_crowded(bytes) {
                return Err(Refused::Crowded);
            }
            self.spent += bytes;
            self.under_way += bytes;
            self.hungry = 0;
            return Ok(());
        }
        if is_known && (self.owed > 0 || bytes > may.saturating_add(self.pot)) {
            return Err(Refused::Empty);
        }
        self.wanted = self.wanted.max(bytes);
        Err(Refused::Ask)
    }

    /// Asks the others for the place of a block. Returns whether there are others.
    pub(in crate::posix) fn starve(&mut self, bytes: u64) -> bool {
        self.hungry = self.hungry.max(bytes);
        self.members > 1
    }

    /// Notes whether what was missing is there.
    pub(super) fn feed(&mut self) {
        if self.unspent() >= self.hungry {
            self.hungry = 0;
        }
    }

    /// Returns whether others still give up files for a place that this depot has found meanwhile.
    pub(in crate::posix) const fn is_fed(&self) -> bool {
        self.told_hungry > 0 && self.hungry == 0
    }

    /// Returns whether this depot has set aside what it owes.
    pub(super) fn can_pay(&self) -> bool {
        self.owed > 0 && self.unspent() >= self.owed
    }

    /// Asks for a survey, because all is granted and no file is known.
    pub(in crate::posix) const fn doubt(&mut self) {
        self.is_in_doubt = true;
    }

    /// Returns whether more can be granted soon, although nothing is unlinked.
    pub(in crate::posix) const fn is_settling(&self) -> bool {
        self.is_settling
    }

    /// Returns whether a write of `bytes` has to take the place of another file.
    pub(in crate::posix) fn is_empty_for(&self, bytes: u64) -> bool {
        self.id.is_some() && bytes > self.unspent().saturating_add(self.pot)
    }

    /// Returns whether `bytes` more under way would be more than others expect of a depot that died.
    fn is_crowded(&self, bytes: u64) -> bool {
        self.under_way + self.moving + bytes > self.block_max.saturating_mul(self.writes_max)
    }

    /// Returns whether a file of `bytes` may be renamed: only a member can tell those who survey.
    fn may_move(&self, bytes: u64, now_ms: u64) -> bool {
        let is_member = self.id.is_some() && !self.is_fenced(now_ms);
        is_member && bytes <= self.block_max && !self.is_crowded(bytes)
    }

    /// Returns whether a write may take over a file of `bytes`.
    pub(in crate::posix) fn may_take_over(&self, bytes: u64, now_ms: u64) -> bool {
        self.may_move(bytes, now_ms) && self.owed == 0
    }

    /// Notes that a file is about to be renamed; `false` if it must not be. For the ledger that is a removal and a write
    /// at once: the caller ends it with `end_move`, or with `take_over` if a write goes on in that file.
    #[must_use]
    pub(in crate::posix) fn begin_move(&mut self, bytes: u64, now_ms: u64) -> bool {
        let may = self.may_move(bytes, now_ms);
        if may {
            self.freed += bytes;
            self.spent += bytes;
            self.moving += bytes;
        }
        may
    }

    /// Notes that a file was renamed, or was not.
    pub(in crate::posix) fn end_move(&mut self, bytes: u64) {
        self.moving = self.moving.saturating_sub(bytes);
        self.done += bytes;
    }

    /// Notes that a write goes on in the file that was renamed for it.
    pub(in crate::posix) fn take_over(&mut self, bytes: u64) {
        self.moving = self.moving.saturating_sub(bytes);
        self.under_way += bytes;
    }

    /// Notes that a write has ended and its file exists.
    pub(in crate::posix) fn done(&mut self, bytes: u64) {
        self.done += bytes;
        self.under_way = self.under_way.saturating_sub(bytes);
    }

    /// Notes that a write has failed, and may have left a file. Returns the membership, for `undo`.
    pub(in crate::posix) fn fail(&mut self, bytes: u64) -> u64 {
        self.under_way = self.under_way.saturating_sub(bytes);
        self.membership
    }

    /// Notes that a failed write of a membership has left nothing: as if its file had been written and unlinked.
    pub(in crate::posix) fn undo(&mut self, bytes: u64, membership: u64) {
        if membership == self.membership {
            self.done += bytes;
            self.freed += bytes;
        }
    }

    /// Notes that a failed write of a membership may have left its file under its final name. It counts as written: the next
    /// survey finds it, or that it is not there. Whoever unlinks it has its bytes.
    pub(in crate::posix) fn leave_written(&mut self, bytes: u64, membership: u64) {
        if membership == self.membership {
            self.done += bytes;
        }
    }

    /// Notes that a file of at most `bytes` is about to be unlinked.
    pub(in crate::posix) fn begin_unlink(&mut self, bytes: u64) -> Unlinking {
        self.unlinking += bytes;
        Unlinking { bytes, membership: self.membership }
    }

    /// Notes that `freed` bytes of it are free now. Those of an earlier membership are not credited: a survey may have
    /// found the file gone already.
    pub(in crate::posix) fn end_unlink(&mut self, unlinking: Unlinking, freed: u64) {
        if unlinking.membership == self.membership {
            self.unlinking -= unlinking.bytes;
            self.freed += freed.min(unlinking.bytes);
        }
    }

    /// Begins a new membership, in which the `reserved` bytes of writes and renames under way are granted and spent.
    pub(super) fn join(&mut self, reserved: u64) {
        self.id = None;
        self.membership += 1;
        self.unlinking = 0;
        (self.freed, self.spent, self.done) = (0, reserved, 0);
        (self.granted, self.giving, self.owed) = (i64::try_from(reserved).unwrap_or(i64::MAX), 0, 0);
        self.told_hungry = 0;
    }

    /// Bytes of files that are being renamed.
    pub(super) const fn moving(&self) -> u64 {
        self.moving
    }

    /// Returns whether this depot has been a member before.
    pub(super) const fn has_joined(&self) -> bool {
        self.membership > 0
    }

    /// What it reports in a turn in which it is to be granted `granted` bytes. It asks others for what is still missing
    /// then: they would unlink files for nothing until its next turn.
    pub(super) fn report(&self, cap: u64, granted: u64) -> Report {
        // A block larger than any so far may be written once the ledger knows how large.
        let in_flight = self.block_max.max(self.wanted).saturating_mul(self.writes_max);
        let hungry = if self.unspent().saturating_add(granted) >= self.hungry { 0 } else { self.hungry };
        Report { cap, freed: self.freed + self.unlinking, done: self.done, in_flight, hungry }
    }

    /// Takes over what the ledger says.
    pub(super) fn renew(&mut self, row: &Row) {
        (self.granted, self.told_hungry) = (row.granted, row.hungry);
        self.block_max = row.in_flight.checked_div(self.writes_max).unwrap_or(0);
    }
}

/// How many bytes are granted at a time: so few that what all members hold unspent is a small part of the cap.
pub(super) fn piece(cap: u64, block_max: u64, members: u64) -> u64 {
    (cap / 16 / members.max(4)).max(block_max.saturating_mul(4)).min(cap)
}
