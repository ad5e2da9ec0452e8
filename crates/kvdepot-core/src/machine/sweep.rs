//! The walk over the slots that empties spaces which their namespaces have left.

/// A walk over the slots in search of blocks that no client can request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sweep {
    /// Position of the walk, while there is one.
    pub(super) at: Option<usize>,
    /// Whether another space was left since the walk began: then another walk follows.
    pub(super) again: bool,
}
