//! A device, an adapter, and an engine between them.

use std::time::Duration;

use kvdepot_standin_verbs::StandIn;
use kvdepot_verbs::Verbs;

use crate::cuda::DeviceSelector;
use crate::cuda::tests::rig::{Rig, Session};
use crate::gdr::config::GdrConfig;
use crate::gdr::engine::GdrEngine;
use crate::gdr::mutation::Mutation;

/// The offset that the stand-in for libcuda adds to addresses of device memory.
const DEVICE_OFFSET: u64 = 0x2000_0000_0000_0000;

/// A driver and an adapter for one test alone.
pub(super) struct Lab {
    pub(super) rig: Rig,
    pub(super) standin: StandIn,
    pub(super) verbs: Verbs,
}

impl Lab {
    /// Makes a lab with everything that GPUDirect RDMA needs.
    pub(super) fn new() -> Self {
        let standin = StandIn::new(0);
        standin.set("peer_offset", DEVICE_OFFSET);
        let verbs = Verbs::load_from(standin.path()).unwrap();
        Self { rig: Rig::standin(13_000), standin, verbs }
    }

    /// Starts a session of the device with a schedule of the adapter. Every other one exports no memory as a dma-buf,
    /// and every third is an Ethernet adapter.
    pub(super) fn session(&self, seed: u64) -> Session {
        self.standin.reset(seed);
        self.standin.set("ethernet", u64::from(seed.is_multiple_of(3)));
        self.standin.set("dmabuf", seed % 2);
        self.rig.session(seed)
    }

    pub(super) fn config(&self) -> GdrConfig {
        GdrConfig {
            nics: Vec::new(),
            queue_pairs: 3,
            timeout: Duration::from_secs(60),
            registration_piece_bytes: 16 << 10,
            // The stand-in locks nothing, whatever the limit of whoever runs the tests.
            locked_bytes_max: None,
            ..GdrConfig::new(DeviceSelector::Ordinal(self.rig.device))
        }
    }

    pub(super) fn engine(&self, mutation: Mutation) -> GdrEngine {
        GdrEngine::attach_with(self.rig.driver, &self.verbs, &self.config(), mutation).unwrap()
    }

    /// Ends a session and checks that nothing is left with driver or adapter, and that neither was misused.
    pub(super) fn end(&self, session: Session) -> Result<(), String> {
        session.end()?;
        match (self.standin.get("violations"), self.standin.get("objects")) {
            (0, 0) => Ok(()),
            (violations, objects) => Err(format!("{violations} violations, {objects} objects left")),
        }
    }
}
