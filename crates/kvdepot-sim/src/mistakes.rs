//! Mistakes that tests plant, to see that the simulation finds them.

use kvdepot_core::machine::Flaw;

/// A mistake of the machine, of who runs it, or of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A commit of some shards counts for all.
    SealedEarly,
    /// The end of a client is not told.
    LeaseKept,
    /// A client's end is told before its copies have ended.
    NoQuarantine,
    /// A tier on a full disk acknowledges an epoch that it could not store.
    EpochLost,
    /// Removals are acknowledged and not made.
    RemovalNotSent,
    /// The end of a read that missed is not told.
    MissSwallowed,
    /// Claims are admitted whether there is room or not.
    RoomNotReserved,
    /// A removal does not wait for the write before it.
    RemovalOvertaken,
    /// What arrives after its namespace was reset is leased.
    LeasedAfterReset,
    /// A slot that was displaced is still written.
    DisplacedWritten,
    /// A new value is written beside the one before it.
    ValueKept,
    /// Every tier is given every block at its seal.
    PlacementIgnored,
    /// A depot that takes a pool over does not learn who still copies.
    HoldersForgotten,
    /// A depot that takes a pool over takes blocks of an earlier epoch for those of the current one.
    EpochForgotten,
    /// A slot that is still being filled is handed over as a block.
    FillingHandedOver,
    /// The ledger keeps records of blocks that are gone.
    RecordKept,
    /// The ledger is written a step too late.
    LedgerLate,
    /// Recovery takes a block without its proof.
    UnprovenTaken,
    /// A recovered pool is given out while a client of the crash copies.
    RecoveredNotHeld,
    /// A namespace is given the number of one that was forgotten.
    HandleUsedAgain,
    /// A namespace is forgotten although a tier has not stored its epoch.
    ForgottenUnstored,
    /// A namespace is forgotten while a block of it is written.
    ForgottenWhileBusy,
    /// A past epoch is forgotten while a tier's command of it is under way.
    SpaceForgottenEarly,
    /// A failed removal counts as done.
    FailedRemovalCounts,
    /// The end of a removal is taken for that of the one before it.
    RemovalsMixed,
    /// A tier that owes too many removals is used as if it owed none.
    ClosedTierUsed,
    /// The region that a client wishes is ignored.
    RegionIgnored,
}

impl Mistake {
    /// All of them.
    pub const ALL: [Self; 27] = [
        Self::SealedEarly,
        Self::LeaseKept,
        Self::NoQuarantine,
        Self::EpochLost,
        Self::RemovalNotSent,
        Self::MissSwallowed,
        Self::RoomNotReserved,
        Self::RemovalOvertaken,
        Self::LeasedAfterReset,
        Self::DisplacedWritten,
        Self::ValueKept,
        Self::PlacementIgnored,
        Self::HoldersForgotten,
        Self::EpochForgotten,
        Self::FillingHandedOver,
        Self::RecordKept,
        Self::LedgerLate,
        Self::UnprovenTaken,
        Self::RecoveredNotHeld,
        Self::HandleUsedAgain,
        Self::ForgottenUnstored,
        Self::ForgottenWhileBusy,
        Self::SpaceForgottenEarly,
        Self::FailedRemovalCounts,
        Self::RemovalsMixed,
        Self::ClosedTierUsed,
        Self::RegionIgnored,
    ];

    /// The mistake of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mistake| format!("{mistake:?}") == name)
    }

    /// How it is built into the machine, if it is there.
    pub(crate) const fn flaw(self) -> Option<Flaw> {
        match self {
            Self::RoomNotReserved => Some(Flaw::AdmitWithoutRoom),
            Self::RemovalOvertaken => Some(Flaw::NoTurnBehindWrite),
            Self::LeasedAfterReset => Some(Flaw::LeaseAfterReset),
            Self::DisplacedWritten => Some(Flaw::WriteDisplaced),
            Self::FillingHandedOver => Some(Flaw::HandOverFilling),
            Self::RecordKept => Some(Flaw::RecordKept),
            Self::ValueKept => Some(Flaw::AlreadyThereIsStored),
            Self::PlacementIgnored => Some(Flaw::PlacementIgnored),
            Self::HandleUsedAgain => Some(Flaw::HandlesUsedAgain),
            Self::ForgottenUnstored => Some(Flaw::ForgetUnstored),
            Self::ForgottenWhileBusy => Some(Flaw::ForgetWhileBusy),
            Self::SpaceForgottenEarly => Some(Flaw::ForgetSpaceEarly),
            Self::FailedRemovalCounts => Some(Flaw::FailedRemovalCounts),
            Self::RemovalsMixed => Some(Flaw::RemovalsByOrder),
            Self::ClosedTierUsed => Some(Flaw::ClosedTierUsed),
            Self::RegionIgnored => Some(Flaw::RegionIgnored),
            _ => None,
        }
    }
}
