//! Submits copies to the driver by one of the methods.

use std::ffi::c_void;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::Direction;
use crate::cuda::context::{Context, Stream};
use crate::cuda::gate::Amount;
use crate::cuda::kernel::{Buffer, CopyKernel};
use crate::cuda::mutation::{Mistake, Mutation};
use crate::cuda::plan::Range;
use crate::cuda::types::{
    FLAG_OVERLAP_WITH_COMPUTE, MemcpyAttributes, SOURCE_ORDER_ANY, SOURCE_ORDER_STREAM,
};

/// Largest number of copies in one call of `cuMemcpyBatchAsync` (P7). With more, some drivers get slower per copy.
const BATCH_COPIES_MAX: usize = 1024;

/// A copy method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// One call of the driver for each range.
    Memcpy,
    /// One call for many ranges; drivers of CUDA 12.8 and later.
    Batch,
    /// A kernel that reads and writes host memory itself.
    Kernel,
}

impl Method {
    /// Returns the device and driver resources for ranges copied by this method, and for the event after them.
    pub(crate) fn amount(self, ranges: &[Range]) -> Amount {
        let plain = ranges.iter().filter(|range| self.is_plain(range)).count();
        let together = ranges.len() - plain;
        Amount {
            bytes: ranges.iter().map(|range| range.len as u64).sum(),
            copies: if self == Self::Kernel { plain } else { ranges.len() },
            calls: plain + together.div_ceil(BATCH_COPIES_MAX) + 1,
        }
    }

    /// Returns whether a range needs its own call: batches and kernels need registered memory.
    pub(crate) fn is_plain(self, range: &Range) -> bool {
        self == Self::Memcpy || range.mapped.is_none()
    }

    /// Returns the lower-case name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Batch => "batch",
            Self::Kernel => "kernel",
        }
    }
}

/// Submits ranges to a stream.
pub(crate) struct Submitter {
    pub(crate) context: Arc<Context>,
    pub(crate) kernel: Option<CopyKernel>,
    pub(crate) mutation: Mutation,
}

impl Submitter {
    /// Queues ranges; the context is current. Ranges queued before an error may still be copied. `buffer` is for the
    /// kernel's descriptors and must stay untouched until the stream has completed this work. While the engine is
    /// `decoding` the kernel takes fewer multiprocessors.
    ///
    /// # Safety
    /// Both sides of every range are valid until the stream has completed this work.
    pub(crate) unsafe fn submit(
        &self,
        method: Method,
        direction: Direction,
        stream: &Stream,
        ranges: &[Range],
        buffer: Option<&mut Buffer>,
        decoding: bool,
    ) -> Result<()> {
        // Batches and kernels need registered memory, plain calls do not.
        let (registered, rest): (Vec<Range>, Vec<Range>) = match method {
            Method::Memcpy => (Vec::new(), ranges.to_vec()),
            Method::Kernel if self.mutation.is(Mistake::KernelOnUnregistered) => {
                let known = |r: &Range| Range { mapped: r.mapped.or(Some(r.host as u64)), ..*r };
                (ranges.iter().map(known).collect(), Vec::new())
            }
            Method::Batch | Method::Kernel => ranges.iter().partition(|range| range.mapped.is_some()),
        };
        // SAFETY: the caller's contract, passed on.
        unsafe {
            if !registered.is_empty() {
                match (method, &self.kernel, buffer) {
                    (Method::Batch, ..) => self.batch(direction, stream, &registered)?,
                    (Method::Kernel, Some(kernel), Some(buffer)) => {
                        kernel.launch(&self.context, direction, stream, &registered, buffer, decoding)?;
                    }
                    _ => self.memcpy(direction, stream, &registered)?,
                }
            }
            self.memcpy(direction, stream, &rest)
        }
    }

    /// # Safety
    /// As for `submit`.
    unsafe fn memcpy(&self, direction: Direction, stream: &Stream, ranges: &[Range]) -> Result<()> {
        let table = self.context.table();
        for range in ranges {
            let host = range.host as *mut c_void;
            // SAFETY: the caller's contract.
            let (call, code) = unsafe {
                match direction {
                    Direction::ToHost => (
                        "cuMemcpyDtoHAsync_v2",
                        (table.memcpy_to_host)(host, range.device, range.len, stream.handle()),
                    ),
                    Direction::ToDevice => (
                        "cuMemcpyHtoDAsync_v2",
                        (table.memcpy_to_device)(range.device, host, range.len, stream.handle()),
                    ),
                }
            };
            self.context.check(call, code).map_err(|e| name_range(e, range))?;
        }
        Ok(())
    }

    /// # Safety
    /// As for `submit`.
    unsafe fn batch(&self, direction: Direction, stream: &Stream, ranges: &[Range]) -> Result<()> {
        let attributes = MemcpyAttributes {
            source_access_order: self.source_order(direction),
            flags: FLAG_OVERLAP_WITH_COMPUTE,
            ..MemcpyAttributes::default()
        };
        for chunk in ranges.chunks(BATCH_COPIES_MAX) {
            let device: Vec<u64> = chunk.iter().map(|range| range.device).collect();
            let host: Vec<u64> = chunk.iter().map(|range| range.host as u64).collect();
            let sizes: Vec<usize> = chunk.iter().map(|range| range.len).collect();
            let (to, from) = match direction {
                Direction::ToHost => (&host, &device),
                Direction::ToDevice => (&device, &host),
            };
            let (to, from, sizes) = (to.as_ptr(), from.as_ptr(), sizes.as_ptr());
            let (count, first, mut failed) = (chunk.len(), 0, usize::MAX);
            let table = self.context.table();
            // SAFETY: the arrays live during the call and have `count` entries; the ranges by the caller's contract.
            let code = unsafe {
                match (table.batch_2, table.batch_1) {
                    (Some(batch), _) => batch(
                        to,
                        from,
                        sizes,
                        count,
                        &raw const attributes,
                        &raw const first,
                        1,
                        stream.handle(),
                    ),
                    (None, Some(batch)) => batch(
                        to,
                        from,
                        sizes,
                        count,
                        &raw const attributes,
                        &raw const first,
                        1,
                        &raw mut failed,
                        stream.handle(),
                    ),
                    (None, None) => {
                        let text =
                            "this CUDA driver copies no batches: update it to one for CUDA 12.8 or later";
                        return Err(Error::new(ErrorKind::Unsupported, text));
                    }
                }
            };
            self.context.check("cuMemcpyBatchAsync", code).map_err(|e| {
                let e = e.with("copies", count);
                chunk.get(failed).map_or(e.clone(), |range| name_range(e, range))
            })?;
        }
        Ok(())
    }

    /// A load's sources are in sealed slots that nothing writes, so the driver may read them at any time. A dump's
    /// sources are written by the engine's compute: reads out of stream order could come before its event (P3).
    fn source_order(&self, direction: Direction) -> i32 {
        if direction == Direction::ToDevice || self.mutation.is(Mistake::ReadSourcesAnyTime) {
            SOURCE_ORDER_ANY
        } else {
            SOURCE_ORDER_STREAM
        }
    }
}

fn name_range(error: Error, range: &Range) -> Error {
    error
        .with("device_address", format!("{:#x}", range.device))
        .with("host_address", format!("{:#x}", range.host))
        .with("bytes", range.len)
}
