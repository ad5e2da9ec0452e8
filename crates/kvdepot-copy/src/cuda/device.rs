//! Lists devices and selects one.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use kvdepot_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::cuda::driver::Driver;
use crate::cuda::types::{
    ATTRIBUTE_CAPABILITY_MAJOR, ATTRIBUTE_CAPABILITY_MINOR, ATTRIBUTE_MULTIPROCESSORS, Uuid,
};

/// Buffer size for a device's name.
const NAME_BYTES: usize = 128;

/// A device, as the driver describes it to this process.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// Its number in this process (`CUDA_VISIBLE_DEVICES` renumbers devices).
    pub ordinal: u32,
    /// The driver's handle.
    #[serde(skip)]
    pub(crate) handle: c_int,
    /// Its name.
    pub name: String,
    /// `GPU-…`, as nvidia-smi prints it.
    pub uuid: String,
    /// `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Compute capability: `(9, 0)` is sm_90.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

impl DeviceInfo {
    /// Returns the NUMA node of the device if the machine reports it; `sysfs` is `/sys`.
    pub fn numa_node(&self, sysfs: &Path) -> Option<u32> {
        let path = sysfs.join("bus/pci/devices").join(self.pci_bus_id.to_ascii_lowercase()).join("numa_node");
        // -1 if the node is unknown.
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    }
}

/// Selects a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSelector {
    /// By number in this process.
    Ordinal(u32),
    /// By `GPU-…`.
    Uuid(String),
    /// By PCI bus id.
    PciBusId(String),
}

impl FromStr for DeviceSelector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        if text.starts_with("GPU-") {
            return Ok(Self::Uuid(text.into()));
        }
        if text.contains(':') && text.contains('.') {
            return Ok(Self::PciBusId(text.into()));
        }
        let help = "no device is called so: give a number, a UUID (GPU-…) or a PCI bus id (0000:3b:00.0)";
        Err(Error::new(ErrorKind::Config, help).with("device", text))
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "{ordinal}"),
            Self::Uuid(text) | Self::PciBusId(text) => f.write_str(text),
        }
    }
}

impl DeviceSelector {
    fn names(&self, device: &DeviceInfo) -> bool {
        match self {
            Self::Ordinal(ordinal) => *ordinal == device.ordinal,
            Self::Uuid(uuid) => uuid.eq_ignore_ascii_case(&device.uuid),
            Self::PciBusId(id) => bus_id_tail(id).eq_ignore_ascii_case(bus_id_tail(&device.pci_bus_id)),
        }
    }

    /// Returns the selected device.
    pub fn find(&self, driver: &Driver) -> Result<DeviceInfo> {
        let count = device_count(driver)?;
        if let Self::Ordinal(ordinal) = self
            && *ordinal < count
        {
            return device(driver, *ordinal);
        }
        for ordinal in 0..count {
            let found = device(driver, ordinal)?;
            if self.names(&found) {
                return Ok(found);
            }
        }
        let help = "no such CUDA device in this process: see CUDA_VISIBLE_DEVICES";
        Err(Error::new(ErrorKind::Config, help).with("device", self).with("devices", count))
    }
}

/// Strips leading zeros of the domain, which tools print with four or eight digits.
fn bus_id_tail(id: &str) -> &str {
    id.trim_start_matches('0')
}

/// Returns the number of devices that this process sees.
pub fn device_count(driver: &Driver) -> Result<u32> {
    let mut count = 0;
    // SAFETY: the pointer lives during the call.
    driver.check("cuDeviceGetCount", unsafe { (driver.table().device_get_count)(&raw mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Describes a device.
pub fn device(driver: &Driver, ordinal: u32) -> Result<DeviceInfo> {
    let table = driver.table();
    let mut handle = 0;
    let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    let (mut name, mut bus) = ([0 as c_char; NAME_BYTES], [0 as c_char; NAME_BYTES]);
    let mut uuid = Uuid::default();
    let room = NAME_BYTES as c_int;
    // SAFETY: every pointer lives during its call, and the buffers have the stated sizes.
    unsafe {
        driver.check("cuDeviceGet", (table.device_get)(&raw mut handle, number))?;
        driver.check("cuDeviceGetName", (table.device_get_name)(name.as_mut_ptr(), room, handle))?;
        driver.check("cuDeviceGetUuid_v2", (table.device_get_uuid)(&raw mut uuid, handle))?;
        driver.check("cuDeviceGetPCIBusId", (table.device_get_pci_bus_id)(bus.as_mut_ptr(), room, handle))?;
    }
    let attribute = |which| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the pointer lives during the call.
        let code = unsafe { (table.device_get_attribute)(&raw mut value, which, handle) };
        driver.check("cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    Ok(DeviceInfo {
        ordinal,
        handle,
        name: text(&name),
        uuid: uuid_text(&uuid.bytes),
        pci_bus_id: text(&bus),
        capability: (attribute(ATTRIBUTE_CAPABILITY_MAJOR)?, attribute(ATTRIBUTE_CAPABILITY_MINOR)?),
        multiprocessors: attribute(ATTRIBUTE_MULTIPROCESSORS)?,
    })
}

fn text(bytes: &[c_char; NAME_BYTES]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_s_node_is_read_by_its_bus_id() {
        let sysfs = tempfile::tempdir().unwrap();
        let mut device = DeviceInfo {
            ordinal: 0,
            handle: 0,
            name: String::new(),
            uuid: String::new(),
            pci_bus_id: "0000:8A:00.0".to_owned(),
            capability: (9, 0),
            multiprocessors: 1,
        };
        let folder = sysfs.path().join("bus/pci/devices/0000:8a:00.0");
        std::fs::create_dir_all(&folder).unwrap();
        for (text, node) in [("1\n", Some(1)), ("-1\n", None), ("", None)] {
            std::fs::write(folder.join("numa_node"), text).unwrap();
            assert_eq!(device.numa_node(sysfs.path()), node, "{text:?}");
        }
        device.pci_bus_id = "0000:8B:00.0".to_owned();
        assert_eq!(device.numa_node(sysfs.path()), None);
    }
}
