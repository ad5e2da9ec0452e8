//! Converts failed calls into errors: kind, call, device, errno, and advice.

use std::io;

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::thread::CapabilitySet;

/// Returns the error of a call on `device` that set `errno`.
pub(crate) fn last_os(call: &'static str, device: &str) -> Error {
    // Never -1, so `from_errno` does not call back here.
    let errno = io::Error::last_os_error().raw_os_error().filter(|&errno| errno > 0);
    from_errno(call, device, errno.unwrap_or(libc::EIO))
}

/// Returns the error of a call on `device` that returned `returned`: an errno, or -1 with the number in errno.
pub(crate) fn from_errno(call: &'static str, device: &str, returned: i32) -> Error {
    if returned == -1 {
        return last_os(call, device);
    }
    let errno = returned.abs();
    let (kind, sentence) = match errno {
        libc::ENOSYS => (
            ErrorKind::Unavailable,
            "there is no RDMA device: the kernel has no RDMA support loaded (modprobe the adapter's driver, or \
             rdma_rxe for a software device)",
        ),
        libc::EOPNOTSUPP => (ErrorKind::Unsupported, "the RDMA device or its driver cannot do this"),
        libc::ENOMEM => (
            ErrorKind::Unavailable,
            "the RDMA device has no space for more (queues, regions or memory); use fewer or smaller ones, or raise \
             the limit on locked memory (ulimit -l)",
        ),
        libc::EACCES | libc::EPERM => (
            ErrorKind::Permission,
            "not allowed to use the RDMA device; give this user /dev/infiniband/uverbs* (a container needs the \
             devices and IPC_LOCK)",
        ),
        libc::ENODEV | libc::EIO => {
            (ErrorKind::Unavailable, "the RDMA device was removed or is broken; see the kernel's log")
        }
        libc::EINVAL => (ErrorKind::Config, "the RDMA device refused a value"),
        _ => (ErrorKind::Io, "a call of the RDMA library failed"),
    };
    Error::new(kind, sentence)
        .with("call", call)
        .with("device", device)
        .with("errno", errno)
        .with_source(io::Error::from_raw_os_error(errno))
}

/// The kind of memory to be registered, which decides what a refusal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOf {
    /// Memory of this process.
    Host,
    /// A GPU's memory by its address, which needs a peer memory module in the kernel.
    Peer,
    /// Another device's memory as a dma-buf.
    DmaBuf,
}

/// Returns the error of a refused registration.
pub(crate) fn registration(
    call: &'static str,
    device: &str,
    errno: i32,
    memory: MemoryOf,
    bytes: usize,
) -> Error {
    let errno = errno.abs();
    let error = match (memory, errno) {
        (MemoryOf::Host, libc::ENOMEM | libc::EAGAIN | libc::EPERM) => limit_too_low(locked_limit()),
        (MemoryOf::Host, libc::EFAULT) => Error::new(
            ErrorKind::Config,
            "memory could not be registered with the RDMA device: the range is not mapped, or not writable",
        ),
        (MemoryOf::Peer, libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP | libc::ENOMEM) => Error::new(
            ErrorKind::Unsupported,
            "the RDMA device cannot reach the GPU's memory: peer memory support is missing (modprobe \
             nvidia-peermem, or a driver and kernel with dma-buf)",
        ),
        (MemoryOf::DmaBuf, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => Error::new(
            ErrorKind::Unsupported,
            "the RDMA device cannot register memory by dma-buf (needs a driver with dma-buf support; without it, \
             modprobe nvidia-peermem)",
        ),
        _ => return from_errno(call, device, errno).with("len_bytes", bytes),
    };
    error
        .with("call", call)
        .with("device", device)
        .with("errno", errno)
        .with("len_bytes", bytes)
        .with_source(io::Error::from_raw_os_error(errno))
}

/// Returns how many bytes this process may register with RDMA devices; `None` if nothing limits it.
pub fn locked_bytes_max() -> Option<u64> {
    let capabilities = rustix::thread::capabilities(None);
    let is_exempt = capabilities.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    locked_limit().filter(|_| !is_exempt)
}

/// Fails if a process that may register `locked_bytes_max` bytes cannot register memory of `bytes`.
pub fn check_locked(bytes: usize, locked_bytes_max: Option<u64>) -> Result<()> {
    match locked_bytes_max {
        Some(max) if max < bytes as u64 => Err(limit_too_low(Some(max)).with("len_bytes", bytes)),
        _ => Ok(()),
    }
}

fn limit_too_low(limit: Option<u64>) -> Error {
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |bytes| bytes.to_string());
    Error::new(
        ErrorKind::Permission,
        "memory could not be registered with the RDMA device: the limit on locked memory is too low (RLIMIT_MEMLOCK; \
         raise it with ulimit -l, LimitMEMLOCK= or --ulimit memlock=-1, or give IPC_LOCK)",
    )
    .with("locked_bytes_max", limit)
}

fn locked_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}
