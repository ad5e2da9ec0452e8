//! A simple InfiniStore client over RDMA. It uses the stand-in for libibverbs or, with `KVDEPOT_TEST_VERBS=system`,
//! this machine's own library and first active port.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::collections::VecDeque;
use std::net::Shutdown;
use std::time::Instant;

use kvdepot_standin_verbs::StandIn;
use kvdepot_verbs::{
    Access, Buffer, Completion, Context, Cq, Done, Endpoint, Flags, Operation, Payload, Pd, Port, PortChoice,
    Qp, QpConfig, RcAttributes, RecvList, SendList, Verbs, WcStatus,
};
use kvdepot_wire::infini::{ConnInfo, RemoteMeta, Reply, Request, op};
use serde_json::json;

use crate::common::{LONG, config};
use crate::wire::{Infini, Wired};

/// Number of outstanding requests that a client supports.
const REQUESTS: u32 = 256;
/// Longest request of a client in these tests.
pub(crate) const MESSAGE_BYTES: usize = 4096;

/// The acknowledgement timeout for a software device on an emulated processor.
const DEVICE_ACK_TIMEOUT: u8 = 20;

/// Returns whether the machine's own device is under test instead of the stand-in.
pub(crate) fn on_device() -> bool {
    std::env::var("KVDEPOT_TEST_VERBS").is_ok_and(|which| which == "system")
}

/// A depot with RDMA at its wire door, over its own stand-in or the machine's device.
pub(crate) struct Lab {
    pub(crate) wired: Wired,
    standin: Option<StandIn>,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) port: Port,
    attributes: RcAttributes,
}

impl Lab {
    /// A small pool, with pieces of memory so small that values span several.
    pub(crate) fn open(seed: u64, pool_bytes: u64, rdma: serde_json::Value) -> Self {
        Self::open_with(seed, config(pool_bytes, json!({})), rdma, json!({}))
    }

    pub(crate) fn open_with(
        seed: u64,
        depot: kvdepot_depot::DepotConfig,
        rdma: serde_json::Value,
        wire: serde_json::Value,
    ) -> Self {
        let standin = (!on_device()).then(|| StandIn::new(seed));
        let library = standin.as_ref().map(|standin| standin.path().to_owned());
        let mut attributes = RcAttributes::default();
        let mut wire = wire;
        wire["rdma"] = json!({
            "library": library, "receives": 8, "receive_bytes": MESSAGE_BYTES, "region_bytes": 65_536,
        });
        if standin.is_none() {
            attributes.timeout = DEVICE_ACK_TIMEOUT;
            wire["rdma"]["ack_timeout"] = DEVICE_ACK_TIMEOUT.into();
        }
        for (key, value) in rdma.as_object().unwrap() {
            wire["rdma"][key] = value.clone();
        }
        let wired = Wired::open(depot, wire);
        let verbs = library.as_deref().map_or_else(Verbs::load, Verbs::load_from).unwrap();
        let (context, port) = PortChoice::default().open(&verbs).unwrap();
        let pd = Pd::new(&context).unwrap();
        Self { wired, standin, context, pd, port, attributes }
    }

    /// Returns the stand-in, for behaviour that no real device can be made to show; such tests check [`on_device`]
    /// first.
    pub(crate) fn standin(&self) -> &StandIn {
        self.standin.as_ref().expect("not on a real device")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(self)
    }

    /// Waits until the server has this number of connections, and has finished with those that are gone.
    pub(crate) fn is_left_with(&self, connections: usize) {
        let line = format!("kvdepot_wire_connections {connections}\n");
        let deadline = Instant::now() + LONG;
        while !self.wired.http("GET /metrics", None).1.contains(&line) {
            assert!(Instant::now() < deadline, "a connection does not end");
        }
        // Answered by the same thread after it was notified of the other connections' end.
        let mut last = self.client();
        last.read(&[("none", 0)], 1);
        assert_eq!(last.answers(1), [404]);
    }

    /// The final checks of every test: verbs were used correctly, and nothing is held.
    pub(crate) fn settled(&self) {
        self.wired.wait_stat("pool_leased_bytes", 0);
        self.wired.wait_stat("pool_filling_bytes", 0);
        if let Some(standin) = &self.standin {
            assert_eq!(standin.get("violations"), 0, "rules of verbs were broken");
        }
    }
}

pub(crate) struct Client {
    pub(crate) qp: Qp,
    cq: Cq,
    /// The requests, in order.
    outbox: Buffer,
    /// The memory for values.
    pub(crate) memory: Buffer,
    pub(crate) tcp: Infini,
    sent: u64,
    list: SendList,
    came: VecDeque<Result<i32, WcStatus>>,
    /// Whether a receive is posted for each answer.
    pub(crate) receives: bool,
}

impl Client {
    pub(crate) fn connect(lab: &Lab) -> Self {
        let cq = Cq::new(&lab.context, 2 * REQUESTS).unwrap();
        let qp = Qp::new(&lab.pd, QpConfig::new(&cq, REQUESTS, REQUESTS)).unwrap();
        let own = Endpoint::new(&qp, &lab.port, 0x0012_3456);
        let info = ConnInfo { qpn: own.qp_number, psn: own.psn, gid: own.gid, lid: own.lid, mtu: own.mtu };
        let mut tcp = lab.wired.infini();
        let Reply::Exchange(peer) = tcp.ask(&Request::Exchange(info)) else { panic!("no exchange") };
        let peer =
            Endpoint { qp_number: peer.qpn, psn: peer.psn, gid: peer.gid, lid: peer.lid, mtu: peer.mtu };
        qp.connect(&lab.port, Access::ALL, &own, &peer, &lab.attributes).unwrap();
        let outbox = Buffer::new(&lab.pd, REQUESTS as usize * MESSAGE_BYTES, Access::LOCAL).unwrap();
        let memory = Buffer::new(&lab.pd, 16 << 20, Access::ALL).unwrap();
        Self {
            qp,
            cq,
            outbox,
            memory,
            tcp,
            sent: 0,
            list: SendList::new(),
            came: VecDeque::new(),
            receives: true,
        }
    }

    /// Sends bytes as a request; the answer goes into a receive without memory.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        let mut receives = RecvList::new();
        receives.push(1 << 32 | self.sent, &[]);
        if self.receives {
            self.qp.post_recv(&mut receives).unwrap();
        }
        let offset = (self.sent % u64::from(REQUESTS)) as usize * MESSAGE_BYTES;
        self.outbox.write(offset, bytes);
        self.list.clear();
        let sge = [self.outbox.mr().sge(offset, bytes.len() as u32)];
        self.list.push(self.sent, Operation::Send(Payload::Sges(&sge)), Flags::SIGNALED);
        self.qp.post_send(&mut self.list).unwrap();
        self.sent += 1;
    }

    pub(crate) fn meta<'a>(&self, op: u8, blocks: &[(&'a str, usize)], block_bytes: u32) -> RemoteMeta<'a> {
        RemoteMeta {
            op,
            keys: blocks.iter().map(|(key, _)| key.as_bytes()).collect(),
            block_bytes,
            rkey: self.memory.mr().rkey(),
            addresses: blocks.iter().map(|(_, offset)| self.memory.mr().remote(*offset).address).collect(),
        }
    }

    /// Requests that values at offsets of the memory be stored.
    pub(crate) fn write(&mut self, blocks: &[(&str, usize)], block_bytes: u32) {
        let meta = self.meta(op::RDMA_WRITE, blocks, block_bytes).encode();
        self.send_raw(&meta);
    }

    /// Requests values at offsets of the memory.
    pub(crate) fn read(&mut self, blocks: &[(&str, usize)], block_bytes: u32) {
        let meta = self.meta(op::RDMA_READ, blocks, block_bytes).encode();
        self.send_raw(&meta);
    }

    /// Returns the next `count` answers, in order.
    pub(crate) fn answers(&mut self, count: usize) -> Vec<i32> {
        let answers = self.take(count);
        answers.into_iter().map(|answer| answer.unwrap_or_else(|status| panic!("{status:?}"))).collect()
    }

    /// Returns the next `count` outcomes of requests, in order: an answer's code, or how the connection failed.
    pub(crate) fn take(&mut self, count: usize) -> Vec<Result<i32, WcStatus>> {
        let deadline = Instant::now() + LONG;
        let mut completions: Vec<Completion> = Vec::new();
        while self.came.len() < count {
            assert!(Instant::now() < deadline, "{} of {count} answers came", self.came.len());
            if self.cq.poll(&mut completions).unwrap() == 0 {
                std::thread::yield_now();
            }
            for completion in completions.drain(..) {
                if completion.id >> 32 == 0 {
                    continue;
                }
                let code = completion.imm.map(i32::from_le_bytes);
                match completion.status {
                    WcStatus::SUCCESS => {
                        assert_eq!(completion.done, Done::Receive);
                        self.came.push_back(Ok(code.expect("an answer carries its code")));
                    }
                    status => self.came.push_back(Err(status)),
                }
            }
        }
        self.came.drain(..count).collect()
    }

    /// Closes only the TCP connection: the queue pair and its memory stay.
    pub(crate) fn hang_up(&self) {
        // The server may have closed it first.
        let _ = self.tcp.0.shutdown(Shutdown::Both);
    }

    /// Polls the queue once: the stand-in only works while it is polled.
    pub(crate) fn poll(&self) {
        self.cq.poll(&mut Vec::new()).unwrap();
        std::thread::yield_now();
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes);
        bytes
    }
}
