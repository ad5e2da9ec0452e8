//! Entry points: streams, events, kernels.

use std::ffi::{c_int, c_uint, c_void};

use parking_lot::MutexGuard;

use crate::abi::put;
use crate::code;
use crate::kernels::Kernel;
use crate::schedule::Op;
use crate::world::{Event, State, call, device_of};

/// The only flags that kvdepot creates streams with: does not wait for the default stream.
const STREAM_NON_BLOCKING: c_uint = 1;

/// Whether a stream may be used from the current context.
pub(crate) fn known_stream(state: &mut State, stream: u64, name: &str) -> Result<(), i32> {
    if stream != 0 && device_of(stream) != Some(state.device) {
        state.violation(format!("{name} on a stream of another context"));
        return Err(code::INVALID_HANDLE);
    }
    if state.streams.contains_key(&stream) {
        return Ok(());
    }
    state.violation(format!("{name} on a stream that is not there"));
    Err(code::INVALID_HANDLE)
}

fn known_event(state: &mut State, event: u64, name: &str) -> Result<(), i32> {
    if state.events.contains_key(&event) {
        return Ok(());
    }
    state.violation(format!("{name} on an event that is not there, or of another context"));
    Err(code::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut u64, flags: c_uint, _priority: c_int) -> c_int {
    call("cuStreamCreateWithPriority", |_, state| {
        if flags != STREAM_NON_BLOCKING {
            state.violation("a stream that waits for the default stream".into());
            return Err(code::INVALID_VALUE);
        }
        let created = state.new_stream();
        // SAFETY: the API's contract.
        unsafe { put(stream, created) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    call("cuStreamDestroy_v2", |world, state| {
        known_stream(state, stream, "cuStreamDestroy_v2")?;
        // The real driver lets the work run to its end; here that is now.
        world.run_until(state, |state| drained(state, stream))?;
        state.streams.remove(&stream);
        Ok(())
    })
}

fn drained(state: &State, stream: u64) -> bool {
    state.streams.get(&stream).is_none_or(|stream| stream.queue.is_empty())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    call("cuStreamSynchronize", |world, state| {
        known_stream(state, stream, "cuStreamSynchronize")?;
        world.run_until(state, |state| drained(state, stream))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) -> c_int {
    call("cuStreamWaitEvent", |_, state| {
        known_stream(state, stream, "cuStreamWaitEvent")?;
        // The event may be of another device; this stand-in knows only its own.
        known_event(state, event, "cuStreamWaitEvent")?;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let number = state.events.get(&event).map_or(0, |event| event.recorded);
        state.push(stream, Op::Wait { event, number });
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> c_int {
    call("cuEventCreate", |_, state| {
        let handle = state.handle();
        state.events.insert(handle, Event::default());
        // SAFETY: the API's contract.
        unsafe { put(event, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    call("cuEventDestroy_v2", |_, state| {
        known_event(state, event, "cuEventDestroy_v2")?;
        state.events.remove(&event);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    call("cuEventRecord", |_, state| {
        known_stream(state, stream, "cuEventRecord")?;
        known_event(state, event, "cuEventRecord")?;
        let number = state.events.get_mut(&event).map_or(0, |event| {
            event.recorded += 1;
            event.recorded
        });
        state.push(stream, Op::Record { event, number });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    call("cuCtxSynchronize", |world, state| {
        world.run_until(state, |state| state.streams.values().all(|stream| stream.queue.is_empty()))
    })
}

fn all_reached(state: &State, event: u64) -> bool {
    state.events.get(&event).is_none_or(|event| event.completed >= event.recorded)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> c_int {
    call("cuEventQuery", |_, state| {
        known_event(state, event, "cuEventQuery")?;
        // Whoever asks again and again must see the world move.
        state.step();
        if all_reached(state, event) { Ok(()) } else { Err(code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    call("cuEventSynchronize", |world, state| {
        known_event(state, event, "cuEventSynchronize")?;
        let number = state.events.get(&event).map_or(0, |event| event.recorded);
        world.run_until(state, |state| state.reached(event, number))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: u64,
    arguments: *const *const c_void,
    extra: *const *const c_void,
) -> c_int {
    call("cuLaunchKernel", |_, state: &mut MutexGuard<'static, State>| {
        known_stream(state, stream, "cuLaunchKernel")?;
        let Some(&kernel) = state.functions.get(&function) else { return Err(code::INVALID_HANDLE) };
        let threads = u64::from(block_x) * u64::from(block_y) * u64::from(block_z);
        let blocks = u64::from(grid_x) * u64::from(grid_y) * u64::from(grid_z);
        if threads == 0 || threads > 1024 || blocks == 0 || arguments.is_null() || !extra.is_null() {
            state.violation(format!("a launch of {blocks} blocks of {threads} threads"));
            return Err(code::INVALID_VALUE);
        }
        if kernel == Kernel::Copy && blocks >= state.largest_launch[0] {
            state.largest_launch = [blocks, threads];
        }
        let read = |(index, &bytes): (usize, &usize)| {
            // SAFETY: the API's contract: one pointer for each argument of the kernel, each to a value of its size.
            unsafe {
                let argument = *arguments.add(index);
                if bytes == 4 {
                    u64::from(argument.cast::<u32>().read_unaligned())
                } else {
                    argument.cast::<u64>().read_unaligned()
                }
            }
        };
        let arguments: Vec<u64> = kernel.argument_bytes().iter().enumerate().map(read).collect();
        state.push(stream, Op::Launch { kernel, arguments });
        Ok(())
    })
}
