//! Copies over several allocations at touching addresses, of which the driver takes one at a time.

use std::sync::Arc;
use std::time::Duration;

use crate::conformance::Collect;
use crate::cuda::Mode;
use crate::cuda::mutation::Mutation;
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::{Rig, Session};
use crate::pages::Pages;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

const HANG: Duration = Duration::from_secs(60);
/// No multiple of the size in which a lane submits copies: those would be cut between the allocations anyway.
const LEN: usize = 40 << 10;

/// Copies between device and host memory: `lens` one after another.
fn copy(engine: &dyn CopyEngine, direction: Direction, device: u64, pages: &Pages, lens: &[usize]) {
    let (mut batch, mut at) = (CopyBatch::new(direction), 0);
    for &len in lens {
        // SAFETY: inside of the pages.
        let host = unsafe { pages.address().add(at) };
        batch.ops.push(CopyOp { device: device + at as u64, host, len });
        at += len;
    }
    batch.end_group();
    let collect = Collect::new(1);
    // SAFETY: the memory lives until the group was reported.
    unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
    collect.wait().into_iter().for_each(|outcome| outcome.unwrap());
}

fn there_and_back(session: &Session, method: Method, lens: &[usize]) {
    let engine = session.engine(Mode::Fixed(method), Mutation::default());
    let both = session.control.unwrap().allocate_touching(session.device, [LEN as u64, LEN as u64 / 2]);
    assert_eq!(both[0] + LEN as u64, both[1]);
    let bytes: Vec<u8> = (0..LEN + LEN / 2).map(|i| (i * 7 + i / 253) as u8).collect();
    let (from, to) = (Pages::new(&bytes), Pages::new(&vec![0; bytes.len()]));
    // SAFETY: the pages outlive the registrations.
    let registered =
        [&from, &to].map(|pages| unsafe { engine.register_pool(pages.address(), pages.len()) }.unwrap());
    assert!(registered.iter().all(|registration| registration.wait(HANG)));
    copy(&engine, Direction::ToDevice, both[0], &from, lens);
    copy(&engine, Direction::ToHost, both[0], &to, lens);
    assert!(to.read(0, bytes.len()) == bytes, "{method:?}, {lens:?}");
    drop((registered, engine));
    both.into_iter().for_each(|address| session.free(address));
}

#[test]
fn a_copy_over_two_allocations_is_cut_between_them() {
    for (seed, method) in [Method::Memcpy, Method::Batch, Method::Kernel].into_iter().enumerate() {
        let rig = Rig::standin(13_000);
        for lens in [&[LEN + LEN / 2][..], &[LEN / 4, LEN, LEN / 4], &[LEN, LEN / 2]] {
            let session = rig.session(seed as u64);
            there_and_back(&session, method, lens);
            session.end().unwrap();
        }
    }
}
