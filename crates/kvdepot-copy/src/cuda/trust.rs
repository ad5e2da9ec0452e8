//! The test at attach: each copy method that an engine may choose copies bytes in both directions once before it is
//! used.
//!
//! A driver, device or entry point that does not behave as expected shows here, and not in the KV of a request.

use kvdepot_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::Direction;
use crate::cuda::context::{DeviceBuffer, Pinned, Priority, Stream};
use crate::cuda::kernel::Buffers;
use crate::cuda::plan::Range;
use crate::cuda::submit::{Method, Submitter};

/// Size of the memory on either side.
const BYTES: usize = 256 << 10;
/// Lengths of the copies: pages, tiles of the kernel and longer, and odd ones.
const LENS: [usize; 8] = [4096, 1536, (64 << 10) + 16, 16, 20 << 10, 333, 1, 16 << 10];
/// Bytes between copies that must stay unchanged. The gap keeps most copies aligned.
const GAP: usize = 32;

const _: () = {
    let (mut sum, mut index) = (0, 0);
    while index < LENS.len() {
        sum += LENS[index].next_multiple_of(16) + GAP;
        index += 1;
    }
    assert!(sum <= BYTES);
};

/// A copy method that is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distrusted {
    /// The method.
    pub method: Method,
    /// The reason.
    pub reason: String,
}

/// Tests copy methods and returns those that failed. An error means that nothing could be tested.
pub(crate) fn check(submitter: &Submitter, methods: &[Method]) -> Result<Vec<Distrusted>> {
    let context = &submitter.context;
    let _entered = context.enter()?;
    let (device, host) = (DeviceBuffer::new(context, BYTES)?, Pinned::new(context, BYTES)?);
    let other = Pinned::new(context, BYTES)?;
    // Declared last, so that it is drained and dropped before the memory that its work uses.
    let stream = Stream::new(context, Priority::Least)?;
    let trial = Trial { submitter, device, host, other, buffers: Buffers::new(context), stream };
    let mut distrusted = Vec::new();
    for &method in methods {
        let reason = match trial.run(method) {
            Ok(None) => continue,
            Ok(Some(reason)) => reason.to_owned(),
            // Without plain copies no other method can be tested.
            Err(error) if method == Method::Memcpy => return Err(error),
            Err(error) => error.to_string(),
        };
        tracing::warn!("the copy engine {} is not used on this device: {reason}", method.as_str());
        distrusted.push(Distrusted { method, reason });
    }
    Ok(distrusted)
}

/// Fails for a device whose plain copies are wrong.
pub(crate) fn useless(distrusted: &[Distrusted]) -> Result<()> {
    let plain = distrusted.iter().find(|one| one.method == Method::Memcpy);
    plain.map_or(Ok(()), |one| {
        Err(Error::new(
            ErrorKind::Io,
            "the CUDA device copies wrong bytes, so it is not used; see the kernel's log and nvidia-smi -q -d ECC",
        )
        .with("reason", &one.reason))
    })
}

struct Trial<'a> {
    submitter: &'a Submitter,
    stream: Stream,
    buffers: Buffers,
    device: DeviceBuffer,
    /// Host memory of the method under test.
    host: Pinned,
    /// Host memory of plain copies, which show the content of the device.
    other: Pinned,
}

impl Trial<'_> {
    /// Returns what is wrong with a method, if anything.
    fn run(&self, method: Method) -> Result<Option<&'static str>> {
        let ranges = self.ranges();
        // To the device: bytes between the copies stay unchanged.
        fill(&self.host, |at| (at * 7 + at / 251) as u8);
        fill(&self.other, |_| 0xC3);
        self.plain(Direction::ToDevice)?;
        self.submit(method, Direction::ToDevice, &ranges)?;
        fill(&self.other, |_| 0);
        self.plain(Direction::ToHost)?;
        let device = self.device.address();
        let mut expected = vec![0xC3; BYTES];
        for range in &ranges {
            let (to, from) = ((range.device - device) as usize, range.host - self.host.address() as usize);
            expected[to..to + range.len].copy_from_slice(&bytes(&self.host)[from..from + range.len]);
        }
        if bytes(&self.other) != expected {
            return Ok(Some("wrong bytes came to the device when it was tested"));
        }
        // And back.
        fill(&self.other, |at| (at * 11 + at / 241) as u8);
        self.plain(Direction::ToDevice)?;
        fill(&self.host, |_| 0x3C);
        self.submit(method, Direction::ToHost, &ranges)?;
        let mut expected = vec![0x3C; BYTES];
        for range in &ranges {
            let (from, to) = ((range.device - device) as usize, range.host - self.host.address() as usize);
            expected[to..to + range.len].copy_from_slice(&bytes(&self.other)[from..from + range.len]);
        }
        let wrong = bytes(&self.host) != expected;
        Ok(wrong.then_some("wrong bytes came from the device when it was tested"))
    }

    /// Returns copies in different orders on the device and in host memory, as pages lie.
    fn ranges(&self) -> Vec<Range> {
        let (mut device, mut host) = (0, BYTES);
        LENS.iter()
            .map(|&len| {
                let place = len.next_multiple_of(16) + GAP;
                host -= place;
                let range = Range {
                    device: self.device.address() + device as u64,
                    host: self.host.address() as usize + host,
                    len,
                    mapped: Some(self.host.device() + host as u64),
                };
                device += place;
                range
            })
            .collect()
    }

    /// Copies everything between the device and the other host memory.
    fn plain(&self, direction: Direction) -> Result<()> {
        let (device, host) = (self.device.address(), self.other.address() as usize);
        let whole = Range { device, host, len: BYTES, mapped: Some(self.other.device()) };
        self.submit(Method::Memcpy, direction, &[whole])
    }

    fn submit(&self, method: Method, direction: Direction, ranges: &[Range]) -> Result<()> {
        let mut buffer = if method == Method::Kernel { Some(self.buffers.take()?) } else { None };
        // SAFETY: both sides live until the stream was waited for; no other code knows them.
        let submitted =
            unsafe { self.submitter.submit(method, direction, &self.stream, ranges, buffer.as_mut(), false) };
        let ended = self.stream.synchronize();
        if let Some(buffer) = buffer {
            self.buffers.give_back(buffer);
        }
        submitted.and(ended)
    }
}

fn fill(pinned: &Pinned, byte: impl Fn(usize) -> u8) {
    // SAFETY: this module's own memory, of this length, which no work uses: every submission was waited for.
    let bytes = unsafe { std::slice::from_raw_parts_mut(pinned.address(), pinned.len()) };
    bytes.iter_mut().enumerate().for_each(|(at, place)| *place = byte(at));
}

fn bytes(pinned: &Pinned) -> &[u8] {
    // SAFETY: as in `fill`; nothing writes it while it is read.
    unsafe { std::slice::from_raw_parts(pinned.address(), pinned.len()) }
}
