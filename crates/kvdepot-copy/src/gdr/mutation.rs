//! Mistakes that tests build into an engine, to see that the suite finds them. No other build can make one.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Copies do not wait for the engine's compute event.
    SkipComputeWait,
    /// Groups end when they were posted.
    ReportAtOnce,
    /// Groups of a load are submitted when they were posted.
    SubmitAtOnce,
    /// A group ends with the first queue pair that is through.
    OneQueuePairIsEnough,
    /// The first request of a list reports instead of the last.
    SignalFirst,
    /// Nothing pushes a load's writes to the device.
    SkipFlush,
    /// Registrations of a batch end when it was posted.
    RegionsEndEarly,
    /// Groups that follow a failed one are reported as done.
    GoOnAfterFailure,
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
