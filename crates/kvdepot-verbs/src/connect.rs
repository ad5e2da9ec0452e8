//! The parameters that two queue pairs exchange, and those of a reliable connection.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::context::DeviceLimits;
use crate::port::{LinkLayer, Port};
use crate::qp::Qp;
use crate::sys::{IBV_QPS_RTR, IBV_QPS_RTS, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr};

/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;

/// One end of a connection, as its peer must know it. The caller transfers it to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The number of the queue pair.
    pub qp_number: u32,
    /// The sequence number of the first packet that this end sends; 24 bits.
    pub psn: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Address; zero on InfiniBand without one.
    pub gid: [u8; 16],
    /// Path MTU, with the library's numbers.
    pub mtu: u32,
}

impl Endpoint {
    /// Describes `qp` on `port`. Any `psn` works; a random one distinguishes old packets from new ones.
    pub fn new(qp: &Qp, port: &Port, psn: u32) -> Self {
        Self {
            qp_number: qp.number(),
            psn: psn & PSN_MASK,
            lid: port.lid,
            gid: port.gid.map_or([0; 16], |gid| gid.raw),
            mtu: port.mtu,
        }
    }
}

/// The parameters of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RcAttributes {
    /// Largest number of READs that each side may have in flight.
    pub reads_max: u8,
    /// Timeout for an acknowledgement: 4.096 us times two to this power; 0 = infinite.
    pub timeout: u8,
    /// Number of retries, 7 at most.
    pub retries: u8,
    /// Number of retries when the peer has no receive posted; 7 = infinite.
    pub receiver_not_ready_retries: u8,
    /// How long a peer waits before it retries when we have no receive posted, with the library's numbers: 12 = 0.64
    /// ms.
    pub receiver_not_ready_timer: u8,
    /// Largest number of routers on the path.
    pub hop_limit: u8,
    /// Traffic class (RoCE: DSCP and ECN).
    pub traffic_class: u8,
    /// Service level (RoCE: priority).
    pub service_level: u8,
}

impl Default for RcAttributes {
    /// 16 READs, 67 ms, 7 retries, unlimited retries when the receiver is not ready. Software devices on slow machines
    /// need `timeout` 18 to 21.
    fn default() -> Self {
        Self {
            reads_max: 16,
            timeout: 14,
            retries: 7,
            receiver_not_ready_retries: 7,
            receiver_not_ready_timer: 12,
            hop_limit: 64,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

impl RcAttributes {
    /// Returns the attributes reduced to a device's limits.
    #[must_use]
    pub fn within(self, limits: &DeviceLimits) -> Self {
        Self { reads_max: self.reads_max.min(limits.reads_max), ..self }
    }

    pub(crate) fn to_receive(self, port: &Port, peer: &Endpoint) -> Result<ibv_qp_attr> {
        // InfiniBand within a subnet uses the LID alone; a GID would need a route that small fabrics do not have.
        let is_global = port.link == LinkLayer::Ethernet || peer.lid == 0;
        let own_gid = match (is_global, port.gid) {
            (false, _) => None,
            (true, Some(gid)) if peer.gid != [0; 16] => Some(gid),
            (true, _) => {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "an RDMA connection needs the addresses (GID) of both sides: do both use the same link type?",
                )
                .with("port", port.number)
                .with("peer_qp_number", peer.qp_number));
            }
        };
        Ok(ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: port.mtu.min(peer.mtu),
            dest_qp_num: peer.qp_number,
            rq_psn: peer.psn & PSN_MASK,
            max_dest_rd_atomic: self.reads_max,
            min_rnr_timer: self.receiver_not_ready_timer,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: ibv_gid { raw: if is_global { peer.gid } else { [0; 16] } },
                    flow_label: 0,
                    sgid_index: own_gid.map_or(0, |gid| gid.index),
                    hop_limit: self.hop_limit,
                    traffic_class: self.traffic_class,
                },
                dlid: peer.lid,
                sl: self.service_level,
                src_path_bits: 0,
                static_rate: 0,
                is_global: u8::from(is_global),
                port_num: port.number,
            },
            ..Default::default()
        })
    }

    pub(crate) fn to_send(self, psn: u32) -> ibv_qp_attr {
        ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: psn & PSN_MASK,
            timeout: self.timeout,
            retry_cnt: self.retries,
            rnr_retry: self.receiver_not_ready_retries,
            max_rd_atomic: self.reads_max,
            ..Default::default()
        }
    }
}
