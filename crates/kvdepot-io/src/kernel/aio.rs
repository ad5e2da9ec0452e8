//! Linux aio (io_submit), by raw system calls. It is in every kernel, and allowed in containers that forbid io_uring.
//!
//! It is asynchronous for O_DIRECT only: `io_submit` of anything else returns after the bytes have moved. The kernel
//! cannot cancel file I/O that was submitted.

use std::io;
use std::time::Duration;

use super::{Completion, Entry, KernelQueue, Work};

const CMD_PREADV: u16 = 7;
const CMD_PWRITEV: u16 = 8;
const CMD_FDSYNC: u16 = 3;
const CMD_POLL: u16 = 5;

/// `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);

/// An aio context.
#[derive(Debug)]
pub struct AioQueue {
    context: libc::c_ulong,
    events: Vec<IoEvent>,
    /// Completions of operations that the kernel refused.
    refused: Vec<Completion>,
    in_kernel: usize,
}

impl AioQueue {
    /// Creates a context for this number of concurrent operations.
    pub fn new(operations: usize) -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        let count = libc::c_long::try_from(operations).unwrap_or(libc::c_long::MAX);
        // SAFETY: the call writes one number, which outlives it.
        check(unsafe { libc::syscall(libc::SYS_io_setup, count, &raw mut context) })?;
        let events = vec![IoEvent::default(); operations.max(1)];
        Ok(Self { context, events, refused: Vec::new(), in_kernel: 0 })
    }
}

fn check(returned: libc::c_long) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}

impl KernelQueue for AioQueue {
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()> {
        let Entry { token, fd, work, pieces, offset } = entry;
        let (opcode, buf, bytes) = match work {
            Work::Read => (CMD_PREADV, pieces.as_ptr() as u64, pieces.len() as u64),
            Work::Write => (CMD_PWRITEV, pieces.as_ptr() as u64, pieces.len() as u64),
            Work::SyncData => (CMD_FDSYNC, 0, 0),
            Work::Readable => (CMD_POLL, u64::from(libc::POLLIN.cast_unsigned()), 0),
        };
        let offset = i64::try_from(offset).unwrap_or(i64::MAX);
        let fd = fd.cast_unsigned();
        let mut iocb = Iocb { data: token, opcode, fd, buf, bytes, offset, ..Iocb::default() };
        let mut list = [&raw mut iocb];
        loop {
            // SAFETY: the kernel copies the control block and the list of pieces during the call; the memory that they name
            // stays valid until the completion, as the caller of `push` promised.
            let submitted = check(unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, 1 as libc::c_long, list.as_mut_ptr())
            });
            match submitted {
                Ok(_) => self.in_kernel += 1,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    let result = -i64::from(e.raw_os_error().unwrap_or(libc::EIO));
                    self.refused.push(Completion { token, result, is_refused: true });
                }
            }
            return Ok(());
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        let timeout = if self.refused.is_empty() { timeout } else { Some(Duration::ZERO) };
        out.append(&mut self.refused);
        let mut time = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let time = time.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
        let (min, max) = (1 as libc::c_long, self.events.len() as libc::c_long);
        // SAFETY: the kernel fills at most `max` events of a list that has as many, and only reads the time.
        let came = check(unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, min, max, self.events.as_mut_ptr(), time)
        });
        let came = match came {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            came => came?,
        };
        self.in_kernel = self.in_kernel.saturating_sub(came);
        let events = &self.events[..came];
        let completed =
            |event: &IoEvent| Completion { token: event.data, result: event.result, is_refused: false };
        out.extend(events.iter().map(completed));
        Ok(())
    }

    fn cancel(&mut self, _token: u64) {}

    fn takes_buffered_reads(&self) -> bool {
        false
    }
}

impl Drop for AioQueue {
    /// Waits for the operations that the kernel holds.
    fn drop(&mut self) {
        // SAFETY: the context is ours and is not used again.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
