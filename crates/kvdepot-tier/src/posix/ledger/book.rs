//! The ledger's contents and how they may change: pure, without clock or I/O.
//!
//! The invariant that all of it serves (P5): the bytes of all block files, plus all that members may still write
//! without asking, are at most `bound`. A member that writes spends what it was granted, and one that unlinks may write
//! as much again: neither changes the sum. Only a grant raises `bound`, and never beyond the cap. A member that dies
//! leaves `bound` too high, never too low; a survey of the directories lowers it again.

/// Most members of a ledger, those included that are gone and not forgotten yet.
pub(super) const MEMBERS_MAX: usize = 256;
/// Longest name of a member, in bytes.
pub(super) const WHO_BYTES_MAX: usize = 120;
/// No sum in a ledger is larger: what is read from the disk cannot overflow.
pub(super) const BYTES_MAX: u64 = 1 << 62;

/// Part of the cap that is kept free after a ledger was lost, for writes under way that it knew of.
const LOST_IN_FLIGHT_PART: u64 = 8;

/// One depot that writes to the directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Used once in a ledger. 0 is a stand-in for members that a lost ledger knew.
    pub(super) id: u64,
    /// Host, process and tier, so that those on the same host can tell whether it lives.
    pub(super) who: String,
    /// Grows with every renewal.
    pub(super) beat: u64,
    /// The cap that this member is configured with.
    pub(super) cap: u64,
    /// Bytes granted less bytes given back.
    pub(super) granted: i64,
    /// Bytes that it has unlinked.
    pub(super) freed: u64,
    /// Bytes of its writes that have ended.
    pub(super) done: u64,
    /// The most bytes that its writes under way can have.
    pub(super) in_flight: u64,
    /// Bytes of a block for which it finds no place and no file to unlink.
    pub(super) hungry: u64,
    /// `freed` and `done` when the survey began.
    pub(super) freed_then: u64,
    pub(super) done_then: u64,
    /// Whether `freed` is not older than the survey's end.
    pub(super) is_fresh: bool,
    /// Whether it was found dead: then only `in_flight` counts, because a write may have hung in the kernel.
    pub(super) is_gone: bool,
}

/// A survey of the directories that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    /// The member that lists the directories: the only one that does.
    pub(super) collector: u64,
    /// What it found, once it has ended.
    pub(super) measured: Option<u64>,
}

/// What a member reports when it renews.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) cap: u64,
    pub(super) freed: u64,
    pub(super) done: u64,
    pub(super) in_flight: u64,
    pub(super) hungry: u64,
}

/// The ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Book {
    /// See the module.
    pub(super) bound: u64,
    /// The id of the next member.
    pub(super) next_id: u64,
    /// Surveys that have ended.
    pub(super) rounds: u64,
    /// The number of directories, the same for all members.
    pub(super) directories: u64,
    /// Whether `bound` is known to be too high, so that a survey is worth its time.
    pub(super) is_due: bool,
    pub(super) round: Option<Round>,
    pub(super) rows: Vec<Row>,
}

impl Book {
    /// The first ledger of directories that hold at most `bound` bytes.
    pub(super) fn new(bound: u64, directories: u64) -> Self {
        Self { bound: bound.min(BYTES_MAX), next_id: 1, is_due: true, directories, ..Self::default() }
    }

    /// The ledger after one that cannot be read: everything may be granted, and there may be members who do not know
    /// yet that they have lost their grants.
    pub(super) fn after_loss(cap: u64, directories: u64) -> Self {
        let mut book = Self::new(cap, directories);
        // And writes of the dead that may still arrive: how many nobody knows, but they are few.
        let in_flight = cap / LOST_IN_FLIGHT_PART;
        book.rows.push(Row { id: 0, cap, in_flight, ..Row::named(String::new()) });
        book
    }

    pub(super) fn row(&self, id: u64) -> Option<&Row> {
        self.rows.iter().find(|row| row.id == id && !row.is_gone)
    }

    /// A member's own row. A ledger after a lost one gives the same numbers to others.
    pub(super) fn row_of(&self, id: Option<u64>, who: &str) -> Option<&Row> {
        self.row(id?).filter(|row| row.who == who)
    }

    fn row_mut(&mut self, id: u64) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| row.id == id && !row.is_gone)
    }

    pub(super) fn live(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| !row.is_gone)
    }

    /// The cap in force: the smallest of any member.
    pub(super) fn cap(&self) -> Option<u64> {
        self.live().map(|row| row.cap).min()
    }

    /// Bytes that can still be granted.
    pub(super) fn pot(&self) -> u64 {
        self.cap().unwrap_or(0).saturating_sub(self.bound)
    }

    /// Bytes that the member `id` should give up for others, which find no place and no file to unlink.
    pub(super) fn shortage(&self, id: u64) -> u64 {
        if self.row(id).is_none_or(|row| row.hungry > 0) {
            return 0;
        }
        let hungry = self.live().map(|row| row.hungry).max().unwrap_or(0);
        hungry.saturating_sub(self.pot())
    }

    /// Adds a member whose writes under way may have `reserved` bytes, which count as granted. `None` if there are too
    /// many.
    pub(super) fn join(&mut self, who: String, reserved: u64, report: Report) -> Option<u64> {
        if self.rows.len() >= MEMBERS_MAX {
            return None;
        }
        // While nobody took part, anybody may have written: an import, or an earlier version.
        let is_alone = self.live().next().is_none();
        self.is_due |= is_alone;
        let id = self.next_id.max(1);
        self.next_id = id + 1;
        self.bound = self.bound.saturating_add(reserved).min(BYTES_MAX);
        let mut row = Row { id, granted: i64::try_from(reserved).unwrap_or(i64::MAX), ..Row::named(who) };
        row.take(report);
        self.rows.push(row);
        Some(id)
    }

    /// Renews a member, and grants it up to `wish` bytes or takes back what it gives. Returns what changed hands; `None`
    /// if there is no such member any more.
    pub(super) fn renew(&mut self, id: u64, report: Report, wish: i64) -> Option<i64> {
        let ended = self.round.is_some_and(|round| round.measured.is_some());
        let row = self.row_mut(id)?;
        row.take(report);
        row.beat += 1;
        row.is_fresh |= ended;
        // The cap that was reported just now counts.
        let pot = i64::try_from(self.pot()).unwrap_or(i64::MAX);
        let granted = wish.min(pot);
        self.row_mut(id)?.granted += granted;
        self.bound = self.bound.saturating_add_signed(granted);
        Some(granted)
    }

    /// Ends a member in order: it gives back `unspent`, and `reserved` bytes of its writes may still arrive.
    pub(super) fn leave(&mut self, id: u64, unspent: u64, reserved: u64) {
        if self.row(id).is_none() {
            return;
        }
        let was_due = self.is_due;
        self.bound -= unspent.min(self.bound);
        self.expire(id, reserved);
        // Its books are balanced.
        self.is_due = was_due || reserved > 0;
        self.rows.retain(|row| !row.is_gone || row.in_flight > 0);
    }

    /// Declares a member dead, of whose writes `in_flight` bytes may still arrive. What it was granted stays granted
    /// until a survey has shown what it used.
    pub(super) fn expire(&mut self, id: u64, in_flight: u64) {
        let Some(row) = self.row_mut(id) else { return };
        (row.is_gone, row.in_flight) = (true, in_flight);
        self.is_due = true;
        // What it wrote since the round began is not known.
        self.round = None;
    }

    /// Notes that nothing of a dead member can arrive any more.
    pub(super) fn forget(&mut self, id: u64) {
        for row in self.rows.iter_mut().filter(|row| row.id == id && row.is_gone && row.in_flight > 0) {
            row.in_flight = 0;
            self.is_due = true;
        }
    }

    /// Begins a survey.
    pub(super) fn begin_round(&mut self, collector: u64) {
        for row in &mut self.rows {
            (row.freed_then, row.done_then, row.is_fresh) = (row.freed, row.done, false);
        }
        self.round = Some(Round { collector, measured: None });
    }

    /// Notes what a survey has found. Every member must report once more, the collector included.
    pub(super) fn end_survey(&mut self, bytes: u64) {
        if let Some(round) = &mut self.round {
            round.measured = Some(bytes);
            self.rows.iter_mut().for_each(|row| row.is_fresh = false);
        }
    }

    /// Draws the conclusion of a survey, once every member has reported since its end. Returns whether it did.
    ///
    /// A file that exists now was listed, or was not there for all of the survey: then it belongs to writes that had not
    /// ended when the survey began. So the files and all that members may still write are at most what was listed, plus
    /// for each member what it was granted and has freed, less the writes that had ended before. Files freed after a
    /// member's last report were listed, or belong to such writes.
    pub(super) fn end_round(&mut self) -> bool {
        let Some(Round { measured: Some(measured), .. }) = self.round else { return false };
        if self.live().any(|row| !row.is_fresh) {
            return false;
        }
        let (mut most, mut least) = (i128::from(measured), i128::from(measured));
        for row in &self.rows {
            // A file that is renamed while the directories are listed may be listed twice.
            least -= i128::from(row.in_flight);
            if row.is_gone {
                most += i128::from(row.in_flight);
            } else {
                most += (i128::from(row.granted) + i128::from(row.freed) - i128::from(row.done_then)).max(0);
                least -= i128::from(row.freed) - i128::from(row.freed_then);
                least -= i128::from(row.done) - i128::from(row.done_then);
            }
        }
        let most = u64::try_from(most).unwrap_or(0).min(BYTES_MAX);
        // More than the ledger accounts for: somebody writes who does not take part.
        let is_foreign = least > i128::from(self.bound);
        self.bound = if is_foreign { most } else { self.bound.min(most) };
        self.rows.retain(|row| !row.is_gone || row.in_flight > 0);
        self.round = None;
        self.is_due = false;
        self.rounds += 1;
        true
    }
}

impl Row {
    fn named(who: String) -> Self {
        Self {
            id: 0,
            who,
            beat: 0,
            cap: 0,
            granted: 0,
            freed: 0,
            done: 0,
            in_flight: 0,
            hungry: 0,
            freed_then: 0,
            done_then: 0,
            is_fresh: false,
            is_gone: false,
        }
    }

    fn take(&mut self, report: Report) {
        let Report { cap, freed, done, in_flight, hungry } = report;
        (self.cap, self.freed, self.done, self.in_flight, self.hungry) =
            (cap, freed, done, in_flight, hungry);
    }
}
