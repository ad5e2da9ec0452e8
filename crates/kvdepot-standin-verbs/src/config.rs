//! Configuration of the stand-in. Without a controlling test, environment variables set it: `KVDEPOT_STANDIN_SEED`
//! (number), `KVDEPOT_STANDIN_LINK` (`ib`, `ethernet`), `KVDEPOT_STANDIN_DEVICE` (name).

use std::path::PathBuf;

use kvdepot_verbs::sys::{IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_PORT_ACTIVE};

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) lazy: bool,
    /// No work is done at all.
    pub(crate) hung: bool,
    /// If the sender of a message fails, the receive that it was going into is lost, as on devices that do not report
    /// it. Otherwise it is returned to its queue.
    pub(crate) loses_receives: bool,
    /// Name of the first device; the others have their number in place of its last digit.
    pub(crate) device: String,
    pub(crate) devices: usize,
    pub(crate) link: u8,
    pub(crate) port_state: u32,
    /// Devices whose ports are down, one bit each.
    pub(crate) ports_down: u64,
    /// Maximum bytes of all regions together; it models RLIMIT_MEMLOCK.
    pub(crate) region_bytes_max: u64,
    /// Maximum bytes of other devices' memory in all regions together; it models a GPU's window on the bus (BAR1).
    pub(crate) peer_bytes_max: u64,
    /// Whether memory can be registered by dma-buf.
    pub(crate) dmabuf: bool,
    /// Added to the addresses of another device's memory; 0 if such memory cannot be registered by address.
    pub(crate) peer_offset: u64,
    /// Directory with the devices' entries of sysfs.
    pub(crate) sysfs: PathBuf,
}

impl Config {
    pub(crate) fn from_environment() -> Self {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let ethernet = text("KVDEPOT_STANDIN_LINK").is_some_and(|link| link.eq_ignore_ascii_case("ethernet"));
        Self {
            seed: text("KVDEPOT_STANDIN_SEED").and_then(|seed| seed.parse().ok()).unwrap_or(1),
            lazy: false,
            hung: false,
            loses_receives: false,
            device: text("KVDEPOT_STANDIN_DEVICE").unwrap_or_else(|| "standin0".to_owned()),
            devices: 1,
            link: if ethernet { IBV_LINK_LAYER_ETHERNET } else { IBV_LINK_LAYER_INFINIBAND },
            port_state: IBV_PORT_ACTIVE,
            ports_down: 0,
            region_bytes_max: u64::MAX,
            peer_bytes_max: u64::MAX,
            dmabuf: true,
            peer_offset: 0,
            sysfs: PathBuf::from("/sys/class/infiniband"),
        }
    }

    pub(crate) fn device_name(&self, index: usize) -> String {
        if index == 0 {
            return self.device.clone();
        }
        format!("{}{index}", self.device.trim_end_matches(|c: char| c.is_ascii_digit()))
    }

    pub(crate) fn ethernet(&self) -> bool {
        self.link == IBV_LINK_LAYER_ETHERNET
    }
}
