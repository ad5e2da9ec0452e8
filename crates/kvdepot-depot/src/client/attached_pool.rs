//! A depot's pool as mapped by this process. It stays mapped, and registered with devices, when the depot is lost and
//! attached again. When the depot is dead it is released immediately, and unmapped after the last copy that uses it.

use std::sync::{Arc, Weak};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::device::DeviceEngine;
use crate::pool::PoolMapping;

/// See the module.
#[derive(Debug)]
pub(crate) struct AttachedPool {
    depot: u64,
    mapping: Mutex<Option<Arc<PoolMapping>>>,
}

/// All pools that this process has mapped, by the depot's id.
static MAPPED: Mutex<Vec<(u64, Weak<PoolMapping>)>> = Mutex::new(Vec::new());

/// Returns whether this process had pools of other depots mapped and has none of them any more: a copy holds the
/// mapping.
pub(crate) fn has_earlier_ended(depot: u64) -> bool {
    let mapped = MAPPED.lock();
    let mut earlier = mapped.iter().filter(|(id, _)| *id != depot).peekable();
    earlier.peek().is_some() && earlier.all(|(_, mapping)| mapping.strong_count() == 0)
}

impl AttachedPool {
    pub(crate) fn new(depot: u64, mapping: Arc<PoolMapping>) -> Self {
        MAPPED.lock().push((depot, Arc::downgrade(&mapping)));
        Self { depot, mapping: Mutex::new(Some(mapping)) }
    }

    /// Returns the id of the depot that owns it.
    pub(crate) const fn depot(&self) -> u64 {
        self.depot
    }

    /// Returns the mapping; `Unavailable` after the pool was released.
    pub(crate) fn mapping(&self) -> Result<Arc<PoolMapping>> {
        let gone =
            || Error::new(ErrorKind::Unavailable, "the pool of this depot was released: the depot is lost");
        self.mapping.lock().clone().ok_or_else(gone)
    }

    /// Unmaps the pool and ends its registrations as soon as no copy uses it.
    pub(crate) fn give_up(&self, devices: &Devices) {
        let Some(mapping) = self.mapping.lock().take() else { return };
        // From here on a device that requests the mapping gets none, so none registers it after this.
        let registered: Vec<_> = devices.all().iter().filter_map(|device| device.forget(&mapping)).collect();
        // The driver or the kernel may take seconds, during which the next depot can be attached. If there is no
        // thread, it is done here.
        let undo = move || drop((registered, mapping));
        let _ = std::thread::Builder::new().name("kvdepot-unmap".to_owned()).spawn(undo);
    }
}

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

    fn all(&self) -> Vec<Arc<DeviceEngine>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
