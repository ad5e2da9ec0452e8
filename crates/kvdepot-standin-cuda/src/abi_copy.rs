//! Entry points: copies, one by one and in batches of both ABIs.

use std::ffi::{c_int, c_uint};

use crate::abi_stream::known_stream;
use crate::code;
use crate::memory::{Memory, Place};
use crate::schedule::{Maker, Op, Part, Source};
use crate::world::{State, World, call};
use parking_lot::MutexGuard;

/// `CUmemcpyAttributes`, as cuda.h lays it out.
#[repr(C)]
struct Attributes {
    source_access_order: c_int,
    source_location: [c_int; 2],
    target_location: [c_int; 2],
    flags: c_uint,
}
const _: () = assert!(size_of::<Attributes>() == 24);

const ORDER_STREAM: c_int = 1;
const ORDER_ANY: c_int = 3;

/// Refuses a range that is not of one of the expected kinds.
fn expect(state: &mut State, name: &str, address: u64, len: u64, good: &[Place]) -> Result<Place, i32> {
    let place = state.memory.place(address, len);
    if good.contains(&place) {
        return Ok(place);
    }
    state.violation(format!("{name}: {address:#x}, {len} bytes, is {place:?}, not one of {good:?}"));
    Err(code::INVALID_VALUE)
}

/// The real driver waits inside the call until it can copy pageable memory, and calls of other threads wait, too.
fn may_block(state: &mut State, stream: u64, place: Place, name: &str) {
    if place == Place::Pageable && state.waits_for_an_event(stream) {
        state.violation(format!(
            "{name} of pageable memory would block inside the driver until an event comes"
        ));
    }
}

const HOST: &[Place] = &[Place::Pinned, Place::Pageable];
const DEVICE: &[Place] = &[Place::Device];

/// Reads a source while the call is under way.
///
/// # Safety
/// `from` was found good for `len` bytes, or is memory of the caller's.
unsafe fn take(memory: &Memory, from: u64, len: u64) -> Source {
    // SAFETY: the caller's contract.
    Source::Taken(unsafe { std::slice::from_raw_parts(memory.pointer(from), len as usize) }.to_vec())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> c_int {
    call("cuMemcpyHtoDAsync_v2", |_, state| {
        known_stream(state, stream, "cuMemcpyHtoDAsync_v2")?;
        let len = len as u64;
        let place = expect(state, "cuMemcpyHtoDAsync_v2 from", from, len, HOST)?;
        expect(state, "cuMemcpyHtoDAsync_v2 to", to, len, DEVICE)?;
        may_block(state, stream, place, "cuMemcpyHtoDAsync_v2");
        // The real driver may read pageable memory immediately (into its own buffer), or when the stream reaches the
        // copy.
        let source = if place == Place::Pageable && state.rng.percent(50) {
            // SAFETY: the API's contract: `from` may be read.
            unsafe { take(&state.memory, from, len) }
        } else {
            Source::Address(from)
        };
        state.push(stream, Op::Copies(vec![Part { to, from: source, len, by: Maker::Memcpy }]));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> c_int {
    call("cuMemcpyDtoHAsync_v2", |world, state| {
        known_stream(state, stream, "cuMemcpyDtoHAsync_v2")?;
        let len = len as u64;
        let place = expect(state, "cuMemcpyDtoHAsync_v2 to", to, len, HOST)?;
        expect(state, "cuMemcpyDtoHAsync_v2 from", from, len, DEVICE)?;
        may_block(state, stream, place, "cuMemcpyDtoHAsync_v2");
        state
            .push(stream, Op::Copies(vec![Part { to, from: Source::Address(from), len, by: Maker::Memcpy }]));
        if place == Place::Pageable {
            // The real driver returns only after a copy into pageable memory.
            let event = marker(state, stream);
            world.run_until(state, |state| state.reached(event, 1))?;
            state.events.remove(&event);
        }
        Ok(())
    })
}

fn marker(state: &mut State, stream: u64) -> u64 {
    let event = state.handle();
    state.events.insert(event, crate::world::Event { recorded: 1, completed: 0 });
    state.push(stream, Op::Record { event, number: 1 });
    event
}

/// Common part of both ABIs.
struct Batch {
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const Attributes,
    attribute_indices: *const usize,
    attribute_count: usize,
    stream: u64,
}

impl Batch {
    /// # Safety
    /// The arrays are as long as the counts say.
    unsafe fn run(&self, _world: &World, state: &mut MutexGuard<'_, State>) -> Result<(), i32> {
        known_stream(state, self.stream, "cuMemcpyBatchAsync")?;
        let empty = self.count == 0 || self.attribute_count == 0 || self.attribute_count > self.count;
        if empty || self.stream == 0 {
            state.violation("cuMemcpyBatchAsync without copies, attributes or stream".into());
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's contract.
        let (to, from, sizes, attributes, indices) = unsafe {
            (
                std::slice::from_raw_parts(self.to, self.count),
                std::slice::from_raw_parts(self.from, self.count),
                std::slice::from_raw_parts(self.sizes, self.count),
                std::slice::from_raw_parts(self.attributes, self.attribute_count),
                std::slice::from_raw_parts(self.attribute_indices, self.attribute_count),
            )
        };
        let ascending = indices.windows(2).all(|pair| pair[0] < pair[1]);
        if indices[0] != 0 || !ascending || indices.iter().any(|&index| index >= self.count) {
            state.violation("cuMemcpyBatchAsync with bad attribute indices".into());
            return Err(code::INVALID_VALUE);
        }
        let mut parts = Vec::with_capacity(self.count);
        for index in 0..self.count {
            let len = sizes[index] as u64;
            let known = &[Place::Device, Place::Pinned];
            expect(state, "cuMemcpyBatchAsync from", from[index], len, known)?;
            expect(state, "cuMemcpyBatchAsync to", to[index], len, known)?;
            let order = attributes[indices.partition_point(|&first| first <= index) - 1].source_access_order;
            if !(ORDER_STREAM..=ORDER_ANY).contains(&order) {
                return Err(code::INVALID_VALUE);
            }
            // Any order but the stream's allows to read now.
            let source = if order != ORDER_STREAM && (order != ORDER_ANY || state.rng.percent(50)) {
                // SAFETY: `expect` found the range in memory that lives.
                unsafe { take(&state.memory, from[index], len) }
            } else {
                Source::Address(from[index])
            };
            parts.push(Part { to: to[index], from: source, len, by: Maker::Batch });
        }
        state.push(self.stream, Op::Copies(parts));
        Ok(())
    }
}

/// The ABI of CUDA 12.8, which reports where a batch failed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const std::ffi::c_void,
    attribute_indices: *const usize,
    attribute_count: usize,
    fail_index: *mut usize,
    stream: u64,
) -> c_int {
    call("cuMemcpyBatchAsync", |world, state| {
        if fail_index.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let attributes = attributes.cast();
        let batch = Batch { to, from, sizes, count, attributes, attribute_indices, attribute_count, stream };
        // SAFETY: the API's contract.
        let answer = unsafe { batch.run(world, state) };
        if answer.is_err() {
            // SAFETY: not null; all ones: not one copy in particular.
            unsafe { fail_index.write(usize::MAX) };
        }
        answer
    })
}

/// The ABI of CUDA 13.0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const std::ffi::c_void,
    attribute_indices: *const usize,
    attribute_count: usize,
    stream: u64,
) -> c_int {
    call("cuMemcpyBatchAsync", |world, state| {
        let attributes = attributes.cast();
        let batch = Batch { to, from, sizes, count, attributes, attribute_indices, attribute_count, stream };
        // SAFETY: the API's contract.
        unsafe { batch.run(world, state) }
    })
}
