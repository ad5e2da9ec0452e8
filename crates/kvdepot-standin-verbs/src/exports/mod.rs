//! The C interface: names and types of `infiniband/verbs.h`.
#![allow(non_snake_case, reason = "C names")]

mod control;
mod device;
mod memory;
mod posting;
mod queues;

/// Fails like the library does for calls that return a pointer.
fn null<T>(errno: i32) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

fn set_errno(errno: i32) {
    // SAFETY: the C library gives every thread its own place.
    unsafe { *libc::__errno_location() = errno };
}
