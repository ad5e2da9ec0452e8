//! Mistakes that tests plant, to check that the simulation finds them.

use kvdepot_core::machine::Flaw;

/// A mistake of the machine, of its runner, or of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A commit of some shards counts for all of them.
    SealedEarly,
    /// The depot does not learn of the end of a client.
    LeaseKept,
    /// The depot learns of a client's end before its copies have ended.
    NoQuarantine,
    /// A tier on a full disk acknowledges an epoch that it could not store.
    EpochLost,
    /// Removals are acknowledged but not carried out.
    RemovalNotSent,
    /// The end of a read that missed is not reported.
    MissSwallowed,
    /// Claims are admitted even if there is no space.
    RoomNotReserved,
    /// A removal does not wait for the write before it.
    RemovalOvertaken,
    /// A block that arrives after its namespace was reset is leased.
    LeasedAfterReset,
    /// A displaced slot is still written.
    DisplacedWritten,
    /// A new value is stored next to the earlier one.
    ValueKept,
    /// Every tier gets every block when it is sealed.
    PlacementIgnored,
    /// Blocks of low priority are written to tiers before anybody uses them.
    LowPriorityWritten,
    /// A depot that takes over a pool does not learn which clients still copy.
    HoldersForgotten,
    /// A depot that takes over a pool mistakes blocks of an earlier epoch for blocks of the current one.
    EpochForgotten,
    /// A slot that is still being filled is handed over as a block.
    FillingHandedOver,
    /// The ledger keeps records of blocks that have left.
    RecordKept,
    /// The ledger is written a step too late.
    LedgerLate,
    /// Recovery takes over a block without its proof.
    UnprovenTaken,
    /// A recovered pool is handed out while a client of the crashed depot copies.
    RecoveredNotHeld,
    /// A new namespace gets the number of a forgotten one.
    HandleUsedAgain,
    /// A namespace is forgotten although a tier has not stored its epoch.
    ForgottenUnstored,
    /// Tiers are given blocks of a namespace that is provisional.
    ProvisionalWritten,
    /// A namespace is forgotten while a block of it is written.
    ForgottenWhileBusy,
    /// A past epoch is forgotten while a tier's command of it is in flight.
    SpaceForgottenEarly,
    /// A failed removal counts as done.
    FailedRemovalCounts,
    /// The end of a removal is attributed to the previous one.
    RemovalsMixed,
    /// A tier that owes too many removals is used as if it owed none.
    ClosedTierUsed,
    /// A client's preferred region is ignored.
    RegionIgnored,
    /// A tier's budget of written bytes is ignored.
    BudgetIgnored,
    /// What a tier evicts is written to a tier above it.
    DemotedUpwards,
    /// A claim whose connection has ended goes on until it is released.
    EndedClaimGoesOn,
    /// A load whose connection has ended goes on until it is answered.
    EndedLoadGoesOn,
    /// A block is not kept in its slot for the last requests that wait for it.
    ArrivalNotPinned,
    /// The last requests that wait for a block get it, although it was reset or removed after the first.
    ArrivalNotLookedAt,
    /// A client that ended while the list of a hand-over was written keeps its slots at the next depot.
    EndUnnoticed,
    /// More than an hour's share of a tier's budget of written bytes accumulates.
    BudgetSavedUp,
    /// A tier's budget gets the bytes of every failed write back.
    ErrorsRefunded,
    /// The lease of a block in a tier's memory is not ended when its slot is freed.
    LeaseNotEnded,
    /// The lease of a block in a tier's memory is ended while a reader has it.
    LeaseEndedEarly,
    /// A block in a tier's memory is leased to a reader that cannot read there.
    LeasedToAnyReader,
    /// A block in a tier's memory is found again after the tier found it damaged.
    DamagedShownAgain,
    /// Blocks in memory that a tier has lost are still found.
    LossIgnored,
    /// Blocks in memory that a tier has lost are found until a walk over all slots gets there.
    LossNoticedLate,
    /// A claim counts what it has leased, although it was lost, removed or reset since.
    LostHitCounts,
    /// More of a tier's memory is leased than may be.
    LeasedShareIgnored,
    /// The slot of a write that hangs is used again, although the tier still reads it.
    HungWriteLetGo,
    /// The slot of a read that hangs is used again, although the tier still fills it.
    HungReadLetGo,
    /// The slot of a client that is late with its dump is used again, although the client may still copy into it.
    LateFillLetGo,
    /// A read that failed goes on in a tier that its claims exclude.
    ReadGoesOnAnywhere,
}

impl Mistake {
    /// All of them.
    pub const ALL: [Self; 50] = [
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
        Self::LowPriorityWritten,
        Self::HoldersForgotten,
        Self::EpochForgotten,
        Self::FillingHandedOver,
        Self::RecordKept,
        Self::LedgerLate,
        Self::UnprovenTaken,
        Self::RecoveredNotHeld,
        Self::HandleUsedAgain,
        Self::ForgottenUnstored,
        Self::ProvisionalWritten,
        Self::ForgottenWhileBusy,
        Self::SpaceForgottenEarly,
        Self::FailedRemovalCounts,
        Self::RemovalsMixed,
        Self::ClosedTierUsed,
        Self::RegionIgnored,
        Self::BudgetIgnored,
        Self::DemotedUpwards,
        Self::EndedClaimGoesOn,
        Self::EndedLoadGoesOn,
        Self::ArrivalNotPinned,
        Self::ArrivalNotLookedAt,
        Self::EndUnnoticed,
        Self::BudgetSavedUp,
        Self::ErrorsRefunded,
        Self::LeaseNotEnded,
        Self::LeaseEndedEarly,
        Self::LeasedToAnyReader,
        Self::DamagedShownAgain,
        Self::LossIgnored,
        Self::LossNoticedLate,
        Self::LostHitCounts,
        Self::LeasedShareIgnored,
        Self::HungWriteLetGo,
        Self::HungReadLetGo,
        Self::LateFillLetGo,
        Self::ReadGoesOnAnywhere,
    ];

    /// Returns the mistake with that name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mistake| format!("{mistake:?}") == name)
    }

    /// Returns the machine's flaw for it, if it is one of the machine.
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
            Self::LowPriorityWritten => Some(Flaw::LowPriorityWritten),
            Self::HandleUsedAgain => Some(Flaw::HandlesUsedAgain),
            Self::ProvisionalWritten => Some(Flaw::ProvisionalWritten),
            Self::ForgottenUnstored => Some(Flaw::ForgetUnstored),
            Self::ForgottenWhileBusy => Some(Flaw::ForgetWhileBusy),
            Self::SpaceForgottenEarly => Some(Flaw::ForgetSpaceEarly),
            Self::FailedRemovalCounts => Some(Flaw::FailedRemovalCounts),
            Self::RemovalsMixed => Some(Flaw::RemovalsByOrder),
            Self::ClosedTierUsed => Some(Flaw::ClosedTierUsed),
            Self::RegionIgnored => Some(Flaw::RegionIgnored),
            Self::BudgetIgnored => Some(Flaw::BudgetIgnored),
            Self::DemotedUpwards => Some(Flaw::DemotedUpwards),
            Self::BudgetSavedUp => Some(Flaw::BudgetSavesUp),
            Self::ErrorsRefunded => Some(Flaw::BudgetRefundsErrors),
            Self::EndedClaimGoesOn => Some(Flaw::EndedClaimGoesOn),
            Self::EndedLoadGoesOn => Some(Flaw::EndedLoadGoesOn),
            Self::ArrivalNotPinned => Some(Flaw::ArrivalNotPinned),
            Self::ArrivalNotLookedAt => Some(Flaw::ArrivalNotLookedAt),
            Self::LeaseNotEnded => Some(Flaw::LeaseNotEnded),
            Self::LeaseEndedEarly => Some(Flaw::LeaseEndedEarly),
            Self::LeasedToAnyReader => Some(Flaw::LeasedToAnyReader),
            Self::DamagedShownAgain => Some(Flaw::DamagedShownAgain),
            Self::LossIgnored => Some(Flaw::LossIgnored),
            Self::LossNoticedLate => Some(Flaw::LossNoticedLate),
            Self::LostHitCounts => Some(Flaw::LostHitCounts),
            Self::LeasedShareIgnored => Some(Flaw::LeasedShareIgnored),
            Self::HungWriteLetGo => Some(Flaw::HungWriteLetGo),
            Self::HungReadLetGo => Some(Flaw::HungReadLetGo),
            Self::LateFillLetGo => Some(Flaw::LateFillLetGo),
            Self::ReadGoesOnAnywhere => Some(Flaw::ReadGoesOnAnywhere),
            _ => None,
        }
    }
}
