//! Mistakes that the simulation builds into the machine, to see that it finds them. No other build can make one.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Claims are admitted whether there is room or not.
    AdmitWithoutRoom,
    /// What a displaced slot's write leaves behind is not waited for.
    NoTurnBehindWrite,
    /// A block that arrives after its namespace was reset is leased.
    LeaseAfterReset,
    /// A displaced slot's queued writes are not called off.
    WriteDisplaced,
    /// A tier that has the value before counts as having the new one.
    AlreadyThereIsStored,
    /// Every tier is given every block at its seal.
    PlacementIgnored,
    /// A slot that is being filled is handed over as a block.
    HandOverFilling,
    /// The ledger is not told of blocks that are gone.
    RecordKept,
    /// A namespace is given the number of one that was forgotten.
    HandlesUsedAgain,
    /// A namespace is forgotten although a tier has not stored its epoch.
    ForgetUnstored,
    /// A namespace is forgotten although something is under way in it.
    ForgetWhileBusy,
    /// A past epoch is forgotten although a tier has not ended a command of it.
    ForgetSpaceEarly,
    /// A removal that a tier could not carry out counts as done.
    FailedRemovalCounts,
    /// The end of a removal is taken for that of the one that was sent first.
    RemovalsByOrder,
    /// A tier that owes too many removals is used as if it owed none.
    ClosedTierUsed,
    /// The region that is wished for a block is ignored.
    RegionIgnored,
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
