//! The copy kernel: a few blocks of threads that move many small ranges between device memory and mapped host memory.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::Direction;
use crate::cuda::context::{Context, Pinned, Stream};
use crate::cuda::plan::Range;
use crate::cuda::types::Handle;

/// The PTX of `kernels/kvcopy.cu`, made by `kernels/make_ptx.py`; the driver compiles it for the device. Every driver
/// of CUDA 12 supports ISA 8.0, and sm_80 is the oldest device.
const PTX: &str = concat!(include_str!("../../kernels/kvcopy_80.ptx"), "\0");
/// The oldest compute capability that runs the PTX.
pub(crate) const CAPABILITY_MIN: (u32, u32) = (8, 0);
/// Largest number of bytes that one warp moves for one descriptor.
pub(crate) const TILE_BYTES: usize = 16 << 10;
/// Largest number of descriptors in one launch.
pub(crate) const DESCRIPTORS_MAX: usize = 8192;
/// Number of descriptor buffers of one lane.
const BUFFERS_MAX: usize = 8;
/// Few enough for a block to fit next to an engine's own blocks; one of 1,024 needs an almost empty multiprocessor.
const THREADS_PER_BLOCK: c_uint = 256;
const WARPS_PER_BLOCK: usize = 8;
/// Number of blocks while the engine decodes: enough to saturate a bus, and no more multiprocessors.
const BLOCKS_DECODING: u32 = 8;

/// The kernel's input for each tile; `kvcopy.cu` has the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    from: u64,
    to: u64,
    len: u64,
    unused: u64,
}

/// Two 16-byte loads in the kernel.
const _: () = assert!(size_of::<Descriptor>() == 32);

/// A loaded module.
pub(crate) struct Module {
    context: Arc<Context>,
    handle: Handle,
}

impl Module {
    /// Compiles the PTX for the device, or finds it in the driver's cache.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Self> {
        let capability = context.device().capability;
        if capability < CAPABILITY_MIN {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the copy kernel needs a device of sm_80 or later",
            )
            .with("capability", format!("{}.{}", capability.0, capability.1)));
        }
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the text ends with a zero and is static.
        let code = unsafe { (context.table().module_load_data)(&raw mut handle, PTX.as_ptr().cast()) };
        context.check("cuModuleLoadData", code)?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    pub(crate) fn function(&self, name: &std::ffi::CStr) -> Result<Handle> {
        let _entered = self.context.enter()?;
        let mut function = 0;
        // SAFETY: all pointers live during the call.
        let code = unsafe {
            (self.context.table().module_get_function)(&raw mut function, self.handle, name.as_ptr())
        };
        self.context.check("cuModuleGetFunction", code)?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded by `load`; the lanes that launched its functions have ended.
            let _ = unsafe { (self.context.table().module_unload)(self.handle) };
        }
    }
}

/// The copy kernel of a loaded module.
pub(crate) struct CopyKernel {
    _module: Module,
    function: Handle,
    blocks_max: u32,
}

impl CopyKernel {
    pub(crate) fn load(context: &Arc<Context>, blocks_max: u32) -> Result<Self> {
        let module = Module::load(context)?;
        let function = module.function(c"kvdepot_copy")?;
        Ok(Self { _module: module, function, blocks_max })
    }

    pub(crate) fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// # Safety
    /// As for `Submitter::submit`.
    pub(crate) unsafe fn launch(
        &self,
        context: &Context,
        direction: Direction,
        stream: &Stream,
        ranges: &[Range],
        buffer: &mut Buffer,
        decoding: bool,
    ) -> Result<()> {
        let blocks_max = if decoding { self.blocks_max.min(BLOCKS_DECODING) } else { self.blocks_max };
        let descriptors = buffer.fill(direction, ranges)?;
        let mut address = buffer.pinned.device();
        let mut count = descriptors as u32;
        let mut arguments: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut count).cast()];
        let blocks = u32::try_from(descriptors.div_ceil(WARPS_PER_BLOCK)).unwrap_or(u32::MAX).min(blocks_max);
        let extra = std::ptr::null_mut();
        // SAFETY: the arguments are the kernel's and live during the call; what they point to is valid by the caller's
        // contract.
        let code = unsafe {
            (context.table().launch_kernel)(
                self.function,
                blocks,
                1,
                1,
                THREADS_PER_BLOCK,
                1,
                1,
                0,
                stream.handle(),
                arguments.as_mut_ptr(),
                extra,
            )
        };
        context.check("cuLaunchKernel", code).map_err(|e| e.with("descriptors", descriptors))
    }
}

/// Host memory for the descriptors of one launch.
pub(crate) struct Buffer {
    pinned: Pinned,
}

impl Buffer {
    /// Writes a descriptor for each tile of each range. Returns their number.
    fn fill(&mut self, direction: Direction, ranges: &[Range]) -> Result<usize> {
        let room = self.pinned.len() / size_of::<Descriptor>();
        let needed: usize = ranges.iter().map(|range| range.len.div_ceil(TILE_BYTES)).sum();
        if needed > room {
            return Err(Error::new(ErrorKind::Config, "more tiles than a launch has descriptors")
                .with("tiles", needed)
                .with("descriptors_max", room));
        }
        // SAFETY: the buffer has space for this many, is aligned for them, and no work that reads it is left.
        let descriptors =
            unsafe { std::slice::from_raw_parts_mut(self.pinned.address().cast::<Descriptor>(), needed) };
        let mut next = 0;
        for range in ranges {
            let Some(mapped) = range.mapped else {
                return Err(Error::new(
                    ErrorKind::Config,
                    "a kernel cannot reach memory that is not registered",
                ));
            };
            for offset in (0..range.len).step_by(TILE_BYTES) {
                let (device, host) = (range.device + offset as u64, mapped + offset as u64);
                let (from, to) = match direction {
                    Direction::ToHost => (device, host),
                    Direction::ToDevice => (host, device),
                };
                let len = TILE_BYTES.min(range.len - offset) as u64;
                descriptors[next] = Descriptor { from, to, len, unused: 0 };
                next += 1;
            }
        }
        Ok(needed)
    }
}

/// The buffers of one lane.
pub(crate) struct Buffers {
    context: Arc<Context>,
    state: Mutex<BufferState>,
    returned: Condvar,
}

#[derive(Default)]
struct BufferState {
    free: Vec<Buffer>,
    made: usize,
}

impl Buffers {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), state: Mutex::default(), returned: Condvar::new() }
    }

    /// Takes a buffer that no work uses; waits if all are in use. A piece of work takes only one, and all pieces that
    /// have one are in flight, so the wait ends.
    pub(crate) fn take(&self) -> Result<Buffer> {
        let mut state = self.state.lock();
        loop {
            if let Some(buffer) = state.free.pop() {
                return Ok(buffer);
            }
            if state.made < BUFFERS_MAX {
                let pinned = Pinned::new(&self.context, DESCRIPTORS_MAX * size_of::<Descriptor>())?;
                state.made += 1;
                return Ok(Buffer { pinned });
            }
            self.returned.wait(&mut state);
        }
    }

    pub(crate) fn give_back(&self, buffer: Buffer) {
        self.state.lock().free.push(buffer);
        self.returned.notify_one();
    }
}
