//! The words that misses are counted by.

use super::gone::{Fate, Short};

/// Why the first block that a request did not get was not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Reason {
    /// Nothing is remembered of it.
    NeverStored,
    /// It made room for others, in the pool or in a tier.
    Evicted,
    /// The same hash is there in another namespace.
    OtherNamespace,
    /// Its dump was refused.
    Dropped,
    /// No tier could write it.
    WriteFailed,
    /// A tier could not read it.
    ReadFailed,
    /// Its checksum differed.
    Checksum,
    /// A tier found it gone or damaged.
    Lost,
    /// A tier that may have it is switched off or out of reach.
    Unavailable,
    /// It was not in the pool in time, or a tier did not answer whether it has it.
    TooSlow,
    /// The engine computes it sooner than it comes.
    NotWorthIt,
    /// The pool had no room for it.
    NoRoom,
    /// Somebody was storing it.
    BeingStored,
    /// Its namespace was reset.
    Reset,
    /// Its namespace was forgotten.
    Forgotten,
    /// A client removed it.
    Removed,
    /// A tier's budget of written bytes was used up.
    OverBudget,
    /// It was in no place that the request may be loaded from; another tier may have it.
    Excluded,
}

impl Reason {
    /// All of them, in the order in which they are counted.
    pub const ALL: [Self; 18] = [
        Self::NeverStored,
        Self::Evicted,
        Self::OtherNamespace,
        Self::Dropped,
        Self::WriteFailed,
        Self::ReadFailed,
        Self::Checksum,
        Self::Lost,
        Self::Unavailable,
        Self::TooSlow,
        Self::NotWorthIt,
        Self::NoRoom,
        Self::BeingStored,
        Self::Reset,
        Self::Forgotten,
        Self::Removed,
        Self::OverBudget,
        Self::Excluded,
    ];

    /// Stable name: a metric's label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NeverStored => "never_stored",
            Self::Evicted => "evicted",
            Self::OtherNamespace => "other_namespace",
            Self::Dropped => "dropped",
            Self::WriteFailed => "write_failed",
            Self::ReadFailed => "read_failed",
            Self::Checksum => "checksum",
            Self::Lost => "lost",
            Self::Unavailable => "unavailable",
            Self::TooSlow => "too_slow",
            Self::NotWorthIt => "not_worth_it",
            Self::NoRoom => "no_room",
            Self::BeingStored => "being_stored",
            Self::Reset => "reset",
            Self::Forgotten => "forgotten",
            Self::Removed => "removed",
            Self::OverBudget => "over_budget",
            Self::Excluded => "excluded",
        }
    }

    /// What a claim itself knows. None: it depends on what became of the block.
    pub const fn of_claim(short: Short) -> Option<Self> {
        match short {
            Short::Absent => None,
            Short::BeingStored => Some(Self::BeingStored),
            Short::TooSlow => Some(Self::TooSlow),
            Short::NotWorthIt => Some(Self::NotWorthIt),
            Short::NoRoom => Some(Self::NoRoom),
            Short::Excluded => Some(Self::Excluded),
        }
    }
}

impl From<Fate> for Reason {
    fn from(fate: Fate) -> Self {
        match fate {
            Fate::Evicted => Self::Evicted,
            Fate::Lost => Self::Lost,
            Fate::Dropped => Self::Dropped,
            Fate::WriteFailed => Self::WriteFailed,
            Fate::ReadFailed => Self::ReadFailed,
            Fate::Checksum => Self::Checksum,
            Fate::TooSlow => Self::TooSlow,
            Fate::Reset => Self::Reset,
            Fate::Forgotten => Self::Forgotten,
            Fate::Removed => Self::Removed,
            Fate::OverBudget => Self::OverBudget,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_at_their_own_places_under_names_of_their_own() {
        let mut names: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert!(Reason::ALL.iter().enumerate().all(|(place, reason)| *reason as usize == place));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        assert!(Fate::ALL.iter().all(|&fate| Reason::from(fate) != Reason::NeverStored));
    }
}
