//! The devices with which an attachment's pools are registered.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::client::attached_pool::AttachedPool;
use crate::client::device::DeviceEngine;

/// The devices whose engines have pools of an attachment registered.
#[derive(Debug, Default)]
pub(crate) struct Devices(Mutex<Vec<Weak<DeviceEngine>>>);

impl Devices {
    pub(crate) fn add(&self, device: &Arc<DeviceEngine>) {
        let mut devices = self.0.lock();
        devices.retain(|known| known.strong_count() > 0);
        if !devices.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(device))) {
            devices.push(Arc::downgrade(device));
        }
    }

    /// Unmaps a pool and ends its registrations as soon as no copy uses it.
    pub(crate) fn give_up(&self, pool: &AttachedPool) {
        let Some(mapping) = pool.release() else { return };
        // From here on a device that requests the mapping gets none, so none registers it after this.
        let registered: Vec<_> = self.all().iter().filter_map(|device| device.forget(&mapping)).collect();
        unmap((registered, mapping));
    }

    fn all(&self) -> Vec<Arc<DeviceEngine>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

/// Drops mapped memory in a thread of its own: the driver or the kernel may take seconds, during which the next depot can be
/// attached. If no thread can be started, it is done here.
pub(super) fn unmap(mapped: impl Send + 'static) {
    let _ = std::thread::Builder::new().name("kvdepot-unmap".to_owned()).spawn(move || drop(mapped));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tells by which thread it was dropped.
    struct Tells(std::sync::mpsc::Sender<std::thread::ThreadId>);

    impl Drop for Tells {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).expect("the test waits for it");
        }
    }

    #[test]
    fn whoever_gives_up_mapped_memory_does_not_unmap_it() {
        let (tell, told) = std::sync::mpsc::channel();
        unmap(Tells(tell));
        assert_ne!(told.recv().expect("it is dropped"), std::thread::current().id());
    }
}
