//! Deliberate mistakes that tests plant in the CUDA engine.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Copies do not wait for the engine's compute event.
    SkipComputeWait,
    /// Groups are reported without waiting for their copies.
    ReportAtOnce,
    /// The event of a group is handed out without being recorded.
    SkipGroupRecord,
    /// The batch of a dump lets the driver read its sources before the compute event.
    ReadSourcesAnyTime,
    /// Descriptors are reused while a kernel may still read them.
    ReuseDescriptors,
    /// Unregistered host memory is passed to a kernel.
    KernelOnUnregistered,
    /// Groups that follow a failed one are not reported as failed.
    GoOnAfterFailure,
    /// Bytes in flight are not counted.
    IgnoreBudget,
}

/// The deliberate mistake of an engine, if any.
pub(crate) type Mutation = crate::mutation::Mutation<Mistake>;
