//! Why a depot process stopped serving.

/// Why a depot is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `keep_on` returned `false`.
    Stopped,
    /// No client was attached for the configured time.
    Idle,
    /// Another depot serves this socket already.
    AlreadyServed,
    /// Another depot has taken the pool over.
    HandedOver,
    /// The lock file was deleted, and another depot owns the socket now.
    Replaced,
}
