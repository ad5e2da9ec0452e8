//! What a member does in its turn with the ledger: pure. The clock is a number that its runner hands in.
//!
//! Nobody's clock is compared with another one. A member is found dead when its row has not changed for `LEASE_MS` of
//! the observer's clock; it stops writing by itself when it has not renewed for half of that of its own.

use std::collections::HashMap;

use super::book::{BYTES_MAX, Book, Row};
use super::purse::{Purse, piece};
use super::times::Times;

/// This depot's survey of the directories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::posix) enum Survey {
    #[default]
    None,
    /// Under way.
    Running,
    /// All files have this many bytes.
    Bytes(u64),
    /// Not all could be listed.
    Failed,
}

/// What is known here of another member's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It cannot be seen from here.
    Unseen,
    Runs,
    /// Its tier is closed, but its process runs: writes that hang may still arrive.
    Closed,
    /// Its process has ended, and its writes with it.
    Ended,
}

/// Why a depot may not take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    TooMany,
    /// The others have this many directories: surveys of theirs would miss files of this depot.
    OtherDirectories(u64),
}

/// What a member knows besides the ledger.
#[derive(Debug)]
pub(super) struct Member {
    who: String,
    /// The cap of this depot's configuration.
    cap: u64,
    /// The number of its directories.
    directories: u64,
    times: Times,
    /// Of each row: its last beat, and since when that has been the last one.
    seen: HashMap<u64, (u64, u64)>,
    rounds_seen: (u64, u64),
    not_before_ms: u64,
}

/// The outcome of a turn: what to write, and what follows once it is written.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) book: Book,
    /// This member's row.
    pub(super) id: u64,
    /// Bytes that it gives back.
    pub(super) given: u64,
    /// Whether it is to survey the directories now.
    pub(super) surveys: bool,
    /// Whether it notes the end of its survey, which is over then.
    pub(super) has_told: bool,
}

impl Member {
    pub(super) fn new(who: String, cap: u64, directories: u64, times: Times) -> Self {
        let cap = cap.min(BYTES_MAX);
        let (seen, rounds_seen) = (HashMap::new(), (u64::MAX, 0));
        Self { who, cap, directories, times, seen, rounds_seen, not_before_ms: 0 }
    }

    /// Decides on the next ledger. `reserved` are the bytes of writes under way. `fate` tells what is known of members on
    /// this host. What the turn gives back is set aside in the purse, until a later turn is written or this one is known
    /// not to be.
    pub(super) fn turn(
        &mut self,
        mut book: Book,
        purse: &mut Purse,
        reserved: u64,
        survey: Survey,
        now_ms: u64,
        fate: impl Fn(&str) -> Fate,
    ) -> Result<Turn, Refusal> {
        let own = book.row_of(purse.id, &self.who).map(|row| row.id);
        self.expire(&mut book, own, now_ms, fate);
        self.agree(&mut book, own)?;
        let id = match book.row_of(purse.id, &self.who) {
            Some(row) => {
                purse.renew(row);
                row.id
            }
            None => {
                // Declared dead by others, it may have written since if its clock stood still, as on a paused machine.
                book.is_due |= purse.has_joined();
                // The earlier grants are void, and so is what it would give back.
                let reserved = reserved.saturating_add(purse.moving());
                purse.join(reserved);
                let joined = book.join(self.who.clone(), reserved, purse.report(self.cap, 0));
                joined.ok_or(Refusal::TooMany)?
            }
        };
        book.is_due |= std::mem::take(&mut purse.is_in_doubt);
        purse.feed();
        let wish = self.wish(&book, purse, id);
        if wish < 0 {
            purse.giving += wish.unsigned_abs();
        }
        let granted = u64::try_from(wish).unwrap_or(0).min(book.pot());
        book.renew(id, purse.report(self.cap, granted), wish);
        if book.round.is_some_and(|round| round.collector == id) {
            match survey {
                Survey::Bytes(bytes) => {
                    book.end_survey(bytes);
                    book.renew(id, purse.report(self.cap, granted), 0);
                }
                Survey::Failed => {
                    book.round = None;
                    self.not_before_ms = now_ms + self.times.retry_ms;
                }
                // The answer to the turn that began it was lost.
                Survey::None => book.round = book.round.filter(|round| round.measured.is_some()),
                Survey::Running => {}
            }
            book.end_round();
        }
        let surveys = survey == Survey::None && self.is_to_collect(&book, id, now_ms);
        if surveys {
            book.begin_round(id);
        }
        let has_told = matches!(survey, Survey::Bytes(_) | Survey::Failed);
        Ok(Turn { book, id, given: wish.min(0).unsigned_abs(), surveys, has_told })
    }

    /// The name of this member.
    pub(super) fn who(&self) -> &str {
        &self.who
    }

    /// Notes that a turn was written, and by when it began.
    pub(super) fn written(&mut self, turn: &Turn, purse: &mut Purse, began_ms: u64) {
        purse.id = Some(turn.id);
        purse.valid_until_ms = began_ms + self.times.lease_ms / 2;
        purse.giving = 0;
        purse.wanted = 0;
        self.look(&turn.book, purse);
    }

    /// Notes that another one wrote the ledger first.
    pub(super) fn lost(turn: &Turn, purse: &mut Purse) {
        if purse.id == Some(turn.id) {
            purse.giving = purse.giving.saturating_sub(turn.given);
        }
    }

    /// Takes over what a ledger says that was read or written.
    pub(super) fn look(&self, book: &Book, purse: &mut Purse) {
        let Some(row) = book.row_of(purse.id, &self.who) else { return };
        purse.renew(row);
        purse.feed();
        purse.cap = book.cap().unwrap_or(self.cap).min(self.cap);
        purse.pot = book.pot();
        let is_lost = book.row(0).is_some();
        purse.is_settling = (book.is_due || book.round.is_some()) && !is_lost;
        purse.members = book.live().count() as u64;
        purse.bound = book.bound;
        // One pays for all, or all would unlink as much as one should.
        let pays = book.live().map(|row| row.id).min() == purse.id;
        let excess = if pays { book.bound.saturating_sub(purse.cap) } else { 0 };
        purse.owed = excess.max(purse.id.map_or(0, |id| book.shortage(id)));
    }

    /// Bytes to ask for, or to give back (negative).
    fn wish(&self, book: &Book, purse: &Purse, id: u64) -> i64 {
        let cap = book.cap().unwrap_or(self.cap);
        let unspent = purse.unspent();
        let others = book.live().any(|row| row.id != id);
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let hungry = purse.hungry;
        let shortage = if hungry > 0 { 0 } else { book.shortage(id) };
        let excess = book.bound.saturating_sub(cap).max(shortage);
        if excess > 0 {
            return -bytes(unspent.min(excess));
        }
        let piece = piece(cap, purse.block_max.max(purse.wanted), purse.members);
        if others && unspent > 2 * piece {
            return -bytes(unspent - piece);
        }
        let wanted = purse.wanted.max(hungry);
        if unspent >= wanted && unspent >= piece / 2 || wanted == 0 && !purse.is_low() {
            return 0;
        }
        // Alone, it takes more at a time, and gives it back when another one comes. Not much more: if it dies, nobody
        // can use the rest for a while.
        let most = if others { piece } else { piece.max(book.pot() / 8) };
        bytes(most.saturating_sub(unspent))
    }

    /// Makes sure that all members survey the same directories.
    fn agree(&self, book: &mut Book, own: Option<u64>) -> Result<(), Refusal> {
        if own.is_some() || book.directories == self.directories {
            return Ok(());
        }
        if book.live().any(|row| row.id != 0) {
            return Err(Refusal::OtherDirectories(book.directories));
        }
        // Nobody knows what lies in those that are new.
        (book.directories, book.bound) = (self.directories, book.bound.max(self.cap));
        Ok(())
    }

    /// Finds those who have gone.
    fn expire(&mut self, book: &mut Book, own: Option<u64>, now_ms: u64, fate: impl Fn(&str) -> Fate) {
        self.seen.retain(|id, _| book.rows.iter().any(|row| row.id == *id));
        let mut over = Vec::new();
        for Row { id, beat, who, is_gone, in_flight, .. } in &book.rows {
            if Some(*id) == own && !is_gone {
                continue;
            }
            if *who == self.who {
                // An attempt to join of which the answer was lost; or an earlier membership, whose writes under way are
                // reserved in the present one.
                over.push((*id, *is_gone, 0));
                continue;
            }
            // A row that is gone beats no more: its time begins when it goes.
            let beat = if *is_gone { u64::MAX } else { *beat };
            let seen = self.seen.entry(*id).or_insert((beat, now_ms));
            if seen.0 != beat {
                *seen = (beat, now_ms);
            }
            let silent_ms = now_ms.saturating_sub(seen.1);
            let fate = if who.is_empty() { Fate::Unseen } else { fate(who) };
            if *is_gone {
                // A process that was stopped goes on with its writes when it is continued, however late.
                let may_arrive = fate == Fate::Runs || silent_ms < self.times.arrival_ms;
                if *in_flight > 0 && (fate == Fate::Ended || !may_arrive) {
                    over.push((*id, true, 0));
                }
            } else if fate == Fate::Ended {
                over.push((*id, false, 0));
            } else if fate == Fate::Closed || silent_ms >= self.times.lease_ms {
                over.push((*id, false, *in_flight));
            }
        }
        for (id, was_gone, in_flight) in over {
            if was_gone { book.forget(id) } else { book.expire(id, in_flight) }
        }
        if self.rounds_seen.0 != book.rounds {
            self.rounds_seen = (book.rounds, now_ms);
        }
    }

    fn is_to_collect(&self, book: &Book, id: u64, now_ms: u64) -> bool {
        let is_first = book.live().map(|row| row.id).min() == Some(id);
        let is_time = now_ms.saturating_sub(self.rounds_seen.1) >= self.times.round_ms;
        book.round.is_none() && is_first && now_ms >= self.not_before_ms && (book.is_due || is_time)
    }
}
