//! The work of a lane on the device: little enough for the engine's own copies and for the driver's queues.

use std::sync::Arc;
use std::time::Duration;

use crate::conformance::{Collect, DeviceMemory, StreamDevice};
use crate::cuda::DeviceSelector;
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::{Rig, Session};
use crate::pages::Pages;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

const HANG: Duration = Duration::from_secs(60);
const DIRECTIONS: [Direction; 2] = [Direction::ToDevice, Direction::ToHost];

/// Memory on both sides, and an engine with the default budgets.
struct Lab<'a> {
    session: &'a Session,
    engine: CudaEngine,
    pages: Pages,
    memory: crate::cuda::tests::rig::Memory,
}

impl<'a> Lab<'a> {
    fn new(session: &'a Session, method: Method, bytes: usize) -> Self {
        let config = CudaConfig::new(DeviceSelector::Ordinal(session.device), Mode::Fixed(method));
        let engine = CudaEngine::attach(session.driver, &config).unwrap();
        let (pages, memory) = (Pages::new(&vec![3; bytes]), session.memory(bytes));
        Self { session, engine, pages, memory }
    }

    /// Copies everything, in `count` copies without neighbours.
    fn copy(&self, direction: Direction, count: usize, wait_event: u64) {
        let len = self.pages.len() / count;
        let mut batch = CopyBatch::new(direction);
        batch.wait_event = wait_event;
        for index in 0..count {
            let device = self.memory.address() + (index * len) as u64;
            // SAFETY: inside of the pages.
            let host = unsafe { self.pages.address().add((count - 1 - index) * len) };
            batch.ops.push(CopyOp { device, host, len });
        }
        batch.end_group();
        let collect = Collect::new(1);
        // SAFETY: the memory lives until the group was reported.
        unsafe { self.engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
        collect.wait().into_iter().for_each(|outcome| outcome.unwrap());
    }
}

/// An engine's own small copies share the device's copy engines. Measured in the stand-in's simulated time.
#[test]
fn another_streams_copy_waits_for_a_millisecond_at_most() {
    const NS_MAX: u64 = 1_000_000;
    let rig = Rig::standin(13_000);
    for (seed, method) in [(1, Method::Memcpy), (2, Method::Batch)] {
        for (bytes, count) in [(64 << 20, 64), (16 << 20, 4096)] {
            let session = rig.session(seed);
            let control = session.control.unwrap();
            let lab = Lab::new(&session, method, bytes);
            // SAFETY: the pages outlive the registration.
            let registration =
                unsafe { lab.engine.register_pool(lab.pages.address(), lab.pages.len()) }.unwrap();
            assert!(registration.wait(HANG));
            for direction in DIRECTIONS {
                let to_device = direction == Direction::ToDevice;
                control.copy_engine_ns(session.device, to_device);
                lab.copy(direction, count, 0);
                let most = control.copy_engine_ns(session.device, to_device);
                assert!((1..=NS_MAX).contains(&most), "{method:?}, {direction:?}, {count} copies: {most} ns");
            }
            drop(registration);
            drop(lab);
            session.end().unwrap();
        }
    }
}

/// The stand-in records everything that would block inside the driver: more calls than a queue takes, and copies of
/// unregistered memory before their event is reached.
#[test]
fn no_call_blocks_inside_the_driver_behind_compute() {
    const BYTES: usize = 8 << 20;
    let rig = Rig::standin(13_000);
    for seed in 0..12 {
        let session = rig.session(seed);
        let method = if seed % 2 == 0 { Method::Memcpy } else { Method::Kernel };
        let lab = Lab::new(&session, method, BYTES);
        let is_registered = seed % 4 < 2;
        // SAFETY: the pages outlive the registration.
        let registration = is_registered
            .then(|| unsafe { lab.engine.register_pool(lab.pages.address(), lab.pages.len()) }.unwrap());
        assert!(registration.as_ref().is_none_or(|registration| registration.wait(HANG)));
        for direction in DIRECTIONS {
            let compute = lab.session.stream();
            lab.session.write_on(compute, &lab.memory, &vec![5; BYTES]);
            lab.copy(direction, 2048, lab.session.record(compute));
        }
        assert_eq!(lab.pages.read(0, BYTES), vec![5; BYTES], "seed {seed}");
        drop(registration);
        drop(lab);
        session
            .end()
            .unwrap_or_else(|what| panic!("{method:?}, registered: {is_registered}, seed {seed}: {what}"));
    }
}
