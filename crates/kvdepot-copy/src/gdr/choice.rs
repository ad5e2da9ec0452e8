//! Chooses the adapter for a device: the nearest on the PCI bus, unless one is named.

use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Device, Verbs};

use crate::gdr::config::{GdrConfig, NICS_VARIABLE};

/// An adapter and its distance from the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name: `mlx5_0`.
    pub name: String,
    /// Steps on the bus between adapter and device. `None` if the path leaves the bus (another root, or a software
    /// adapter).
    pub bus_steps: Option<usize>,
    /// Whether both are on one NUMA node, if the machine reports it.
    pub same_node: bool,
}

/// Returns all adapters, the nearest to the device at `bus_id` first.
pub fn nearest(devices: &[Device], sysfs: &Path, bus_id: &str) -> Vec<Nic> {
    let gpu = sysfs.join("bus/pci/devices").join(bus_id.to_ascii_lowercase());
    let gpu_path = gpu.canonicalize().ok();
    let gpu_node = number(&gpu.join("numa_node"));
    let mut nics: Vec<Nic> = devices
        .iter()
        .map(|device| Nic {
            name: device.name(),
            bus_steps: gpu_path.as_deref().zip(device.pci_path()).and_then(|(gpu, nic)| steps(gpu, &nic)),
            same_node: gpu_node.is_some() && gpu_node == device.numa_node(),
        })
        .collect();
    nics.sort_by_key(|nic| (nic.bus_steps.unwrap_or(usize::MAX), !nic.same_node));
    nics
}

/// Returns the adapters to try for device number `ordinal` at `bus_id`: the named one, or all, the nearest first.
pub(crate) fn candidates(
    verbs: &Verbs,
    config: &GdrConfig,
    ordinal: u32,
    bus_id: &str,
) -> Result<Vec<String>> {
    if !config.nics.is_empty() {
        let name = usize::try_from(ordinal).ok().and_then(|ordinal| config.nics.get(ordinal));
        let Some(name) = name else {
            return Err(Error::new(
                ErrorKind::Config,
                format!("{NICS_VARIABLE} names no adapter for this device: it needs one for each, by the device's number"),
            )
            .with("device", ordinal)
            .with("nics", config.nics.join(",")));
        };
        return Ok(vec![verbs.device(name)?.name()]);
    }
    let nics = nearest(&verbs.devices()?, &config.sysfs, bus_id);
    Ok(nics.into_iter().map(|nic| nic.name).collect())
}

/// Returns the number of bridges between two functions; `None` if they have no bridge in common.
fn steps(a: &Path, b: &Path) -> Option<usize> {
    let (a, b) = (functions(a)?, functions(b)?);
    let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    // The first component is the root complex.
    (common > 0).then_some(a.len() + b.len() - 2 * common)
}

/// Returns the components of the path from the root complex on.
fn functions(path: &Path) -> Option<Vec<PathBuf>> {
    let parts: Vec<PathBuf> = path
        .components()
        .map(|part| PathBuf::from(part.as_os_str()))
        .skip_while(|part| !part.to_string_lossy().starts_with("pci"))
        .collect();
    (!parts.is_empty()).then_some(parts)
}

fn number(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
