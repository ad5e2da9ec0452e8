//! How a batch of reads is divided: into waves of bounded size, each wave into regions that are copied in parallel,
//! each region into runs that are contiguous on the medium. Pure.

/// Regions begin at multiples of this within a block, and none is smaller unless its wave is.
pub(super) const CUT_BYTES: usize = 64 << 10;

/// A part of a block that is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Index of the block in the batch.
    pub(super) item: usize,
    /// Offset on the medium.
    pub(super) at: u64,
    /// Offset in the block's slot.
    pub(super) from: usize,
    pub(super) bytes: usize,
}

/// Spans that are contiguous on the medium: one access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) spans: Vec<Span>,
}

/// The work of one worker.
pub(super) type Region = Vec<Run>;
/// Regions that are copied in parallel; the next wave begins when all have ended.
pub(super) type Wave = Vec<Region>;

/// Bounds of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// The most regions of a wave.
    pub(super) regions: usize,
    /// The most bytes of a wave; at least one cut.
    pub(super) wave_bytes: usize,
}

/// Divides complete blocks.
pub(super) fn plan(mut blocks: Vec<Span>, limits: Limits) -> Vec<Wave> {
    blocks.retain(|span| span.bytes > 0);
    blocks.sort_by_key(|span| span.at);
    let mut waves = Vec::new();
    let mut rest = blocks.into_iter().peekable();
    let mut left_over = None;
    while rest.peek().is_some() || left_over.is_some() {
        let mut wave = Vec::new();
        let mut room = limits.wave_bytes.max(CUT_BYTES);
        while let Some(span) = left_over.take().or_else(|| rest.next()) {
            let (now, later) = cut(span, room);
            room -= now.map_or(0, |now: Span| now.bytes);
            wave.extend(now);
            left_over = later;
            if left_over.is_some() {
                break;
            }
        }
        waves.push(divide(wave, limits.regions.max(1)));
    }
    waves
}

/// As much of a span as fits, up to a cut, and the rest.
fn cut(span: Span, room: usize) -> (Option<Span>, Option<Span>) {
    if span.bytes <= room {
        return (Some(span), None);
    }
    // Cuts lie at multiples within the block, so that only a block's last part has an odd length.
    let end = (span.from + room) / CUT_BYTES * CUT_BYTES;
    if end <= span.from {
        return (None, Some(span));
    }
    let bytes = end - span.from;
    let rest = Span { at: span.at + bytes as u64, from: end, bytes: span.bytes - bytes, ..span };
    (Some(Span { bytes, ..span }), Some(rest))
}

/// Divides a wave into regions of about the same size.
fn divide(wave: Vec<Span>, most: usize) -> Wave {
    let whole: usize = wave.iter().map(|span| span.bytes).sum();
    let share = whole.div_ceil(most).next_multiple_of(CUT_BYTES);
    let mut regions: Wave = Vec::new();
    let mut region: Region = Vec::new();
    let mut room = share;
    let mut todo: std::collections::VecDeque<Span> = wave.into();
    while let Some(span) = todo.pop_front() {
        let is_last = regions.len() + 1 == most;
        let (now, later) = if is_last { (Some(span), None) } else { cut(span, room) };
        if let Some(now) = now {
            room = room.saturating_sub(now.bytes);
            push(&mut region, now);
        }
        if let Some(later) = later {
            todo.push_front(later);
        }
        if (later.is_some() || room == 0) && !is_last && !region.is_empty() {
            regions.push(std::mem::take(&mut region));
            room = share;
        }
    }
    if !region.is_empty() {
        regions.push(region);
    }
    regions
}

/// Adds a span to the last run if it directly follows it.
fn push(region: &mut Region, span: Span) {
    let behind = |last: &Span| last.at + last.bytes as u64 == span.at;
    match region.last_mut() {
        Some(run) if run.spans.last().is_some_and(behind) => run.spans.push(span),
        _ => region.push(Run { spans: vec![span] }),
    }
}
