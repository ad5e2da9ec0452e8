//! The host engine passes the suite, alone and with helpers.

use std::cell::UnsafeCell;

use kvdepot_copy::HostEngine;
use kvdepot_copy::conformance::{DeviceMemory, check};

struct Heap(UnsafeCell<Vec<u8>>);

impl DeviceMemory for Heap {
    fn address(&self) -> u64 {
        // SAFETY: the vector is never resized, so its buffer does not move.
        unsafe { (*self.0.get()).as_ptr() as u64 }
    }
    fn read(&self) -> Vec<u8> {
        // SAFETY: called when no copy is in flight.
        unsafe { (*self.0.get()).clone() }
    }
    fn write(&self, bytes: &[u8]) {
        // SAFETY: called when no copy is in flight.
        unsafe { (&mut *self.0.get()).copy_from_slice(bytes) }
    }
}

#[test]
fn host_engine_conforms() {
    for threads in [1, 2, 5] {
        let engine = HostEngine::new(threads).unwrap();
        check(&engine, |len| Heap(UnsafeCell::new(vec![0; len])));
    }
}

#[test]
fn too_many_threads_are_refused() {
    assert!(HostEngine::new(1000).is_err());
}
