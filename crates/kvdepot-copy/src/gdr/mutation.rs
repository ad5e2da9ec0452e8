//! Deliberate mistakes that tests plant in the GPUDirect engine.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Copies do not wait for the engine's compute event.
    SkipComputeWait,
    /// Groups are reported when they were posted.
    ReportAtOnce,
    /// Groups of a load are submitted when they were posted.
    SubmitAtOnce,
    /// A group ends with the first queue pair that has finished.
    OneQueuePairIsEnough,
    /// The first request of a list reports instead of the last.
    SignalFirst,
    /// Nothing pushes a load's writes to the device.
    SkipFlush,
    /// Registrations of a batch end when it was posted.
    RegionsEndEarly,
    /// Groups that follow a failed one are reported as successful.
    GoOnAfterFailure,
}

/// The deliberate mistake of an engine, if any.
pub(crate) type Mutation = crate::mutation::Mutation<Mistake>;
