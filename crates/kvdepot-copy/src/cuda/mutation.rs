//! Mistakes that tests build into an engine, to see that the suite finds them. No other build can make one.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Copies do not wait for the engine's compute event.
    SkipComputeWait,
    /// Groups are reported without waiting for their copies.
    ReportAtOnce,
    /// The event of a group is handed out without being recorded.
    SkipGroupRecord,
    /// A batch of a dump lets the driver read its sources before the compute event.
    ReadSourcesAnyTime,
    /// Descriptors are used again while a kernel may still read them.
    ReuseDescriptors,
    /// Host memory that is not registered is given to a kernel.
    KernelOnUnregistered,
    /// Groups that follow a failed one are not reported as failed.
    GoOnAfterFailure,
    /// Bytes in flight are not counted.
    IgnoreBudget,
}

/// The mistake of an engine, if it has one.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mutation(pub(crate) Option<Mistake>);

/// The mistake of an engine: none.
#[cfg(not(test))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mutation(());

impl Mutation {
    #[cfg(test)]
    pub(crate) fn is(self, mistake: Mistake) -> bool {
        self.0 == Some(mistake)
    }

    #[cfg(not(test))]
    pub(crate) const fn is(self, _mistake: Mistake) -> bool {
        false
    }
}
