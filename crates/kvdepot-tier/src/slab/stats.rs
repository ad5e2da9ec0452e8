//! What a Slab tier counts.

/// The counters of a Slab tier since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabStats {
    /// Bytes of records accepted for writing: blocks with their headers.
    pub accepted_bytes: u64,
    /// Bytes of any kind written to the segments.
    pub written_bytes: u64,
    /// Of those, bytes of records that were written again because their segment was recycled.
    pub rewritten_bytes: u64,
    /// Number of groups written.
    pub groups: u64,
    /// Number of syncs.
    pub syncs: u64,
    /// Number of segments recycled.
    pub segments_recycled: u64,
    /// Number of blocks evicted.
    pub blocks_evicted: u64,
}
