//! The last holder of a copy engine may be a copy that ends on one of that engine's threads. The engine must not be
//! dropped there: it would wait for its own end (P2).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink};
use kvdepot_core::Result;
use kvdepot_depot::client::DeviceEngine;

/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// Reports the thread on which it is dropped.
#[derive(Debug)]
struct Device(Sender<String>);

impl CopyEngine for Device {
    fn name(&self) -> &'static str {
        "device"
    }

    unsafe fn run(&self, _: CopyBatch, _: Arc<dyn GroupSink>) -> Result<()> {
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.0.send(std::thread::current().name().unwrap_or_default().to_owned()).unwrap();
    }
}

/// The thread on which an engine ends whose last holder drops it on the thread of this name.
fn ends_on(name: &str) -> String {
    let (dropped, drops) = unbounded();
    let engine: Arc<dyn CopyEngine> = Arc::new(Device(dropped));
    let held = DeviceEngine::new(engine);
    std::thread::Builder::new().name(name.to_owned()).spawn(move || drop(held)).unwrap().join().unwrap();
    drops.recv_timeout(HANG).unwrap()
}

#[test]
fn an_engine_does_not_end_on_a_thread_of_its_own() {
    assert_ne!(ends_on("kvdepot-copy0"), "kvdepot-copy0");
    assert_eq!(ends_on("the user's"), "the user's");
}
