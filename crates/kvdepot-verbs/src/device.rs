//! The library and its devices.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::failure;
use crate::sys::ibv_device;
use crate::table::Table;

/// A loaded libibverbs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Verbs {
    table: Arc<Table>,
}

impl Verbs {
    /// Loads the system's library. If it is missing, the error is of kind `Unsupported` and says what to install.
    pub fn load() -> Result<Self> {
        Ok(Self { table: Arc::new(Table::load(None)?) })
    }

    /// Loads the library at `path`; tests use the stand-in's.
    pub fn load_from(path: &Path) -> Result<Self> {
        Ok(Self { table: Arc::new(Table::load(Some(path))?) })
    }

    /// Returns all devices of this machine, at least one; an error of kind `Unavailable` if there is none.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let mut count = 0;
        // SAFETY: the function takes a pointer for the count and returns a list of that many devices, or null.
        let list = unsafe { (self.table.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(failure::last_os("ibv_get_device_list", "any"));
        }
        let list = Arc::new(List { table: Arc::clone(&self.table), list });
        if count <= 0 {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "there is no RDMA device; load the adapter's driver, or use a transport without RDMA",
            )
            .with("call", "ibv_get_device_list"));
        }
        Ok((0..usize::try_from(count).unwrap_or(0))
            .map(|index| {
                // SAFETY: the list has `count` entries.
                let device = unsafe { *list.list.add(index) };
                Device { list: Arc::clone(&list), device }
            })
            .collect())
    }

    /// Returns the device called `name`. The error names the existing devices.
    pub fn device(&self, name: &str) -> Result<Device> {
        let mut devices = self.devices()?;
        match devices.iter().position(|device| device.name() == name) {
            Some(index) => Ok(devices.swap_remove(index)),
            None => {
                let names: Vec<String> = devices.iter().map(Device::name).collect();
                Err(Error::new(ErrorKind::Config, "there is no RDMA device of this name")
                    .with("device", name)
                    .with("devices", names.join(" ")))
            }
        }
    }
}

struct List {
    table: Arc<Table>,
    list: *mut *mut ibv_device,
}

// SAFETY: the list and its devices are read-only for us, and the library's calls on them may come from any thread.
unsafe impl Send for List {}
// SAFETY: as for Send.
unsafe impl Sync for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_get_device_list`, freed once; a `Device` holds the list, so none outlives it.
        unsafe { (self.table.ibv_free_device_list)(self.list) };
    }
}

/// An unopened RDMA device.
#[derive(Clone)]
pub struct Device {
    list: Arc<List>,
    device: *mut ibv_device,
}

// SAFETY: as for `List`, to which the device belongs.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

impl Device {
    /// Returns its name as in `ibv_devices`: `mlx5_0`.
    pub fn name(&self) -> String {
        // SAFETY: the device is valid while its list is.
        text(unsafe { &(*self.device).name })
    }

    /// Returns its node GUID, as the number that tools print.
    pub fn guid(&self) -> u64 {
        // SAFETY: the device is valid while its list is.
        u64::from_be(unsafe { (self.list.table.ibv_get_device_guid)(self.device) })
    }

    /// Returns its directory in sysfs: `/sys/class/infiniband/mlx5_0`.
    pub fn sysfs(&self) -> PathBuf {
        // SAFETY: the device is valid while its list is.
        PathBuf::from(text(unsafe { &(*self.device).ibdev_path }))
    }

    /// Returns the directory of its PCI function in sysfs, below those of all its bridges. `None` for software devices.
    pub fn pci_path(&self) -> Option<PathBuf> {
        self.sysfs().join("device").canonicalize().ok()
    }

    /// Returns its NUMA node, if the machine reports it.
    pub fn numa_node(&self) -> Option<u32> {
        std::fs::read_to_string(self.sysfs().join("device/numa_node")).ok()?.trim().parse().ok()
    }

    pub(crate) fn table(&self) -> &Arc<Table> {
        &self.list.table
    }

    pub(crate) fn raw(&self) -> *mut ibv_device {
        self.device
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

/// Converts text in a C array; bytes after the first zero are ignored.
fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|&c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned())
}
