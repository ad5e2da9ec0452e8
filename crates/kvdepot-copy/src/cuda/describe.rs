//! Describes the machine's devices and engines for users.

use std::fmt;
use std::path::Path;

use kvdepot_core::Result;
use kvdepot_verbs::{Device, Verbs};
use serde::Serialize;

use crate::cuda::calibration::{self, Calibration, Choice};
use crate::cuda::device::{self, DeviceInfo};
use crate::cuda::driver::Driver;
use crate::cuda::kernel::CAPABILITY_MIN;
use crate::limit::{ATTACH_WAIT, within};

/// Driver, devices and engines of this machine, as this process sees them.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The newest CUDA version that the driver supports, `13.0`; `None` without a driver.
    pub driver: Option<String>,
    /// Why there is no driver or no device.
    pub problem: Option<String>,
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// RDMA adapters by name.
    pub adapters: Vec<String>,
    /// Why there are no adapters.
    pub adapters_problem: Option<String>,
}

/// A device and its abilities.
#[derive(Debug, Serialize)]
pub struct DeviceReport {
    /// The device.
    pub device: DeviceInfo,
    /// Copy engines that it can use.
    pub engines: Vec<&'static str>,
    /// Its measurements, if the cache has them.
    pub calibration: Option<Calibration>,
    /// The choices of `auto`; empty before the device was measured.
    pub choices: Vec<Choice>,
}

/// Describes the machine. Makes no context and measures nothing, so it can run alongside an engine that needs all
/// memory.
pub fn describe(cache_dir: Option<&Path>) -> Report {
    let cache_dir = cache_dir.map(Path::to_owned);
    let asked = move || describe_with(Driver::load()?, cache_dir.as_deref());
    let described = within("describing devices", ATTACH_WAIT, asked).flatten();
    let report =
        described.unwrap_or_else(|error| Report { problem: Some(error.to_string()), ..Report::default() });
    let names = || Ok(Verbs::load()?.devices()?.iter().map(Device::name).collect());
    match within("describing adapters", ATTACH_WAIT, names).flatten() {
        Ok(adapters) => Report { adapters, ..report },
        Err(error) => Report { adapters_problem: Some(error.to_string()), ..report },
    }
}

pub(crate) fn describe_with(driver: &Driver, cache_dir: Option<&Path>) -> Result<Report> {
    let mut devices = Vec::new();
    for ordinal in 0..device::device_count(driver)? {
        let device = device::device(driver, ordinal)?;
        let mut engines = vec!["memcpy"];
        engines.extend(driver.has_batch().then_some("batch"));
        engines.extend((device.capability >= CAPABILITY_MIN).then_some("kernel"));
        engines.push("auto");
        let kept = cache_dir.and_then(|dir| calibration::read(&calibration::file(dir, &device.uuid)).ok());
        let choices = kept.as_ref().map(Calibration::choices).unwrap_or_default();
        devices.push(DeviceReport { device, engines, calibration: kept, choices });
    }
    let problem =
        devices.is_empty().then(|| "the CUDA driver shows no device: see CUDA_VISIBLE_DEVICES".into());
    Ok(Report { driver: Some(driver.version_text()), problem, devices, ..Report::default() })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(driver) = &self.driver {
            writeln!(f, "CUDA driver {driver}")?;
        }
        if let Some(problem) = &self.problem {
            writeln!(f, "{problem}")?;
        }
        for DeviceReport { device, engines, calibration, .. } in &self.devices {
            let (major, minor) = device.capability;
            writeln!(
                f,
                "device {}: {}, sm_{major}{minor}, {} multiprocessors, {}, {}",
                device.ordinal, device.name, device.multiprocessors, device.uuid, device.pci_bus_id
            )?;
            if let Some(node) = device.numa_node(Path::new("/sys")) {
                writeln!(f, "  NUMA node: {node}")?;
            }
            writeln!(f, "  copy engines: {}", engines.join(", "))?;
            match calibration {
                Some(calibration) => {
                    calibration.to_string().lines().try_for_each(|l| writeln!(f, "  {l}"))?
                }
                None => writeln!(f, "  not measured yet")?,
            }
        }
        Ok(())
    }
}
