//! Ports of a device, their addresses, and the choice of one.

use std::net::Ipv6Addr;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::context::Context;
use crate::device::Verbs;
use crate::failure;
use crate::sys::{
    IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_gid,
    ibv_gid_entry, ibv_port_attr,
};

/// Largest number of GID table entries to search.
const GIDS_MAX: u32 = 1024;

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// Addresses are LIDs; a GID is only used beyond the subnet.
    InfiniBand,
    /// RoCE: addresses are GIDs.
    Ethernet,
}

/// How RoCE encapsulates packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// An InfiniBand port's address, or unknown.
    InfiniBand,
    /// RoCE version 1: Ethernet frames.
    RoceV1,
    /// RoCE version 2: UDP, routable.
    RoceV2,
}

/// An entry of a port's table of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table.
    pub index: u8,
    /// The address.
    pub raw: [u8; 16],
    /// Its type; `InfiniBand` if the library is too old to tell.
    pub kind: GidType,
}

impl Gid {
    /// Returns whether it is an IPv4-mapped IPv6 address.
    pub fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.raw).to_ipv4_mapped().is_some()
    }

    fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.raw).is_unicast_link_local()
    }
}

/// An active port and the address to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// Link layer.
    pub link: LinkLayer,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Path MTU, with the library's numbers: 1 = 256 bytes to 5 = 4096.
    pub mtu: u32,
    /// Largest message in bytes.
    pub message_bytes_max: u32,
    /// The address; `None` only on InfiniBand.
    pub gid: Option<Gid>,
}

/// Selects device, port and address. The default is the first device with an active port and its first active port; on
/// Ethernet the first IPv4 address of RoCE version 2, else the first that is not link-local.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortChoice {
    /// Name of the device.
    pub device: Option<String>,
    /// Number of the port.
    pub port: Option<u8>,
    /// Index of the address in the port's table.
    pub gid_index: Option<u8>,
    /// The required link layer.
    pub link: Option<LinkLayer>,
}

impl PortChoice {
    /// Opens the device and finds the port.
    pub fn open(&self, verbs: &Verbs) -> Result<(Context, Port)> {
        if let Some(name) = &self.device {
            let context = Context::open(&verbs.device(name)?)?;
            let port = self.find(&context)?;
            return Ok((context, port));
        }
        let mut first_error = None;
        for device in verbs.devices()? {
            match Context::open(&device).and_then(|context| Ok((self.find(&context)?, context))) {
                Ok((port, context)) => return Ok((context, port)),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "there is no RDMA device")))
    }

    /// Finds the port on an open device.
    pub fn find(&self, context: &Context) -> Result<Port> {
        let ports = match self.port {
            Some(port) => port..=port,
            None => 1..=context.limits()?.ports,
        };
        let mut states = Vec::new();
        for number in ports {
            let attributes = query(context, number)?;
            let link = if attributes.link_layer == IBV_LINK_LAYER_ETHERNET {
                LinkLayer::Ethernet
            } else {
                LinkLayer::InfiniBand
            };
            if attributes.state != IBV_PORT_ACTIVE || self.link.is_some_and(|wanted| wanted != link) {
                states.push(format!("{number}: {} {link:?}", state_name(attributes.state)));
                continue;
            }
            return Ok(Port {
                number,
                link,
                lid: attributes.lid,
                mtu: attributes.active_mtu,
                message_bytes_max: attributes.max_msg_sz,
                gid: self.gid(context, number, link, attributes.gid_tbl_len)?,
            });
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "no port of the RDMA device is up; check cable, switch and (InfiniBand) subnet manager, or choose another \
             port or link type",
        )
        .with("device", context.name())
        .with("ports", states.join(", ")))
    }

    fn gid(&self, context: &Context, port: u8, link: LinkLayer, table_len: i32) -> Result<Option<Gid>> {
        let table_len = u32::try_from(table_len).unwrap_or(0).min(GIDS_MAX).min(256);
        if let Some(index) = self.gid_index {
            let gid = if u32::from(index) < table_len { query_gid(context, port, index) } else { None };
            return gid.map(Some).ok_or_else(|| {
                Error::new(ErrorKind::Config, "the RDMA port has no address at this place of its table")
                    .with("device", context.name())
                    .with("port", port)
                    .with("gid_index", index)
            });
        }
        let gids: Vec<Gid> =
            (0..table_len).filter_map(|index| query_gid(context, port, u8::try_from(index).ok()?)).collect();
        if link == LinkLayer::InfiniBand {
            return Ok(gids.first().copied());
        }
        let routable = |gid: &&Gid| !gid.is_link_local();
        let best = gids
            .iter()
            .find(|gid| gid.is_ipv4() && gid.kind == GidType::RoceV2)
            .or_else(|| gids.iter().filter(routable).find(|gid| gid.kind == GidType::RoceV2))
            .or_else(|| gids.iter().find(routable))
            .or_else(|| gids.first());
        best.copied().map(Some).ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                "the RoCE port has no address: give its network interface an IP address",
            )
            .with("device", context.name())
            .with("port", port)
        })
    }
}

fn query(context: &Context, number: u8) -> Result<ibv_port_attr> {
    let mut attributes = ibv_port_attr::default();
    // SAFETY: the context is open; the call fills the attributes, of which it knows a prefix.
    let rc = unsafe { (context.table().ibv_query_port)(context.raw(), number, &raw mut attributes) };
    match rc {
        0 => Ok(attributes),
        rc => Err(failure::from_errno("ibv_query_port", context.name(), rc).with("port", number)),
    }
}

/// Returns the address at `index`; `None` if the entry is empty.
fn query_gid(context: &Context, port: u8, index: u8) -> Option<Gid> {
    let table = context.table();
    if let Some(query) = table._ibv_query_gid_ex {
        let mut entry = ibv_gid_entry::default();
        let size = std::mem::size_of::<ibv_gid_entry>();
        // SAFETY: the context is open; the call fills at most `size` bytes.
        let rc = unsafe { query(context.raw(), port.into(), index.into(), &raw mut entry, 0, size) };
        if rc == 0 && entry.gid.raw != [0; 16] {
            let kind = match entry.gid_type {
                IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                _ => GidType::InfiniBand,
            };
            return Some(Gid { index, raw: entry.gid.raw, kind });
        }
        // An old kernel answers the extended call with an error, and the plain one with the address.
    }
    let mut gid = ibv_gid::default();
    // SAFETY: the context is open; the call fills the address.
    let rc = unsafe { (table.ibv_query_gid)(context.raw(), port, index.into(), &raw mut gid) };
    (rc == 0 && gid.raw != [0; 16]).then_some(Gid { index, raw: gid.raw, kind: GidType::InfiniBand })
}

fn state_name(state: u32) -> &'static str {
    match state {
        1 => "down",
        2 => "initialising",
        3 => "armed",
        4 => "active",
        5 => "active, deferred",
        _ => "unknown",
    }
}
