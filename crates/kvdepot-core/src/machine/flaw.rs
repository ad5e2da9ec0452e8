//! Mistakes that the simulation plants in the machine, to check that it finds them. No other build can enable one.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Claims are admitted even if there is no space.
    AdmitWithoutRoom,
    /// The removal of what a displaced slot's write leaves behind is not waited for.
    NoTurnBehindWrite,
    /// A block that arrives after its namespace was reset is leased.
    LeaseAfterReset,
    /// A displaced slot's queued writes are not cancelled.
    WriteDisplaced,
    /// A tier that already has the earlier value counts as having the new one.
    AlreadyThereIsStored,
    /// Every tier is given every block at its seal.
    PlacementIgnored,
    /// Blocks of low priority are written to tiers before anybody uses them.
    LowPriorityWritten,
    /// A slot that is being filled is handed over as a block.
    HandOverFilling,
    /// The ledger is not updated when a block leaves.
    RecordKept,
    /// A new namespace gets the number of a forgotten one.
    HandlesUsedAgain,
    /// A namespace is forgotten although a tier has not stored its epoch.
    ForgetUnstored,
    /// Tiers are given blocks of a namespace about which one of them has not answered.
    ProvisionalWritten,
    /// A namespace is forgotten although something is in flight in it.
    ForgetWhileBusy,
    /// A past epoch is forgotten although a tier has not completed a command of it.
    ForgetSpaceEarly,
    /// A removal that a tier failed to carry out counts as done.
    FailedRemovalCounts,
    /// The end of a removal is attributed to the removal that was sent first.
    RemovalsByOrder,
    /// A tier that owes too many removals is used as if it owed none.
    ClosedTierUsed,
    /// The preferred region of a block is ignored.
    RegionIgnored,
    /// What a tier evicts is given to any tier that gets such blocks, even to one above it.
    DemotedUpwards,
    /// A tier's budget of written bytes is ignored.
    BudgetIgnored,
    /// More than an hour's share of a tier's budget accumulates.
    BudgetSavesUp,
    /// A tier's budget gets the bytes of every failed write back, although the tier may have stored it.
    BudgetRefundsErrors,
    /// A claim whose connection has ended goes on until it is released.
    EndedClaimGoesOn,
    /// A load whose connection has ended goes on until it is answered.
    EndedLoadGoesOn,
    /// A block is not kept in its slot for the last requests that wait for it.
    ArrivalNotPinned,
    /// The last requests that wait for a block are leased it, although it was removed or reset after the first.
    ArrivalNotLookedAt,
    /// The lease of a block in a tier's memory is not ended when its slot is freed.
    LeaseNotEnded,
    /// The lease of a block in a tier's memory is ended while a reader has the block.
    LeaseEndedEarly,
    /// A block in a tier's memory is leased to a reader that cannot read it there.
    LeasedToAnyReader,
    /// A block in a tier's memory is found again after its tier found it damaged for another reader.
    DamagedShownAgain,
    /// Blocks in memory that a tier has lost are still found.
    LossIgnored,
    /// Blocks in memory that a tier has lost are found until the walk that dooms them gets there.
    LossNoticedLate,
    /// A claim counts what it has leased, although it was lost, removed or reset since.
    LostHitCounts,
    /// The slot of a write that hangs is used again, although the tier still reads it.
    HungWriteLetGo,
    /// The slot of a read that hangs is used again, although the tier still fills it.
    HungReadLetGo,
    /// The slot of a client that is late with its dump is used again, although the client may still copy into it.
    LateFillLetGo,
    /// More of a tier's memory is leased than may be.
    LeasedShareIgnored,
    /// A read that failed goes on in the next tier, whichever its claims allow.
    ReadGoesOnAnywhere,
}

/// The mistake of a machine, if it has one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flaws {
    #[cfg(any(test, feature = "model"))]
    flaw: Option<Flaw>,
}

impl Flaws {
    #[cfg(any(test, feature = "model"))]
    pub(crate) const fn of(flaw: Flaw) -> Self {
        Self { flaw: Some(flaw) }
    }

    #[cfg(any(test, feature = "model"))]
    pub(crate) fn has(self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    #[cfg(not(any(test, feature = "model")))]
    pub(crate) const fn has(self, _flaw: Flaw) -> bool {
        false
    }
}
