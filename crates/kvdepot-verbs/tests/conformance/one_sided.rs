//! READ and WRITE, on a connection to itself and to a peer.

use kvdepot_verbs::{Done, Flags, Operation, Payload, Qp, SendList};

use crate::lab::{Lab, content, deadline, each, gather_ok, pattern};

const SIZES: [usize; 7] = [0, 1, 7, 4096, 4097, 65_536, 300_001];

/// Written bytes are in place after the completion, no other byte changes, and reading them back returns the same.
fn there_and_back(lab: &Lab, qp: &Qp, cq: &kvdepot_verbs::Cq) {
    let total: usize = SIZES.iter().sum();
    let (source, target) = (lab.buffer(total), lab.buffer(total + 2));
    let bytes = pattern(total, lab.seed);
    source.write(0, &bytes);
    target.write(0, &vec![0xEE; total + 2]);
    let mut list = SendList::new();
    let mut at = 0;
    for (index, &len) in SIZES.iter().enumerate() {
        let sge = source.mr().sge(at, len as u32);
        let operation = Operation::Write(Payload::Sges(&[sge]), target.mr().remote(at + 1));
        list.push(index as u64, operation, Flags::SIGNALED);
        at += len;
    }
    qp.post_send(&mut list).expect("takes WRITEs");
    let done = gather_ok(cq, SIZES.len());
    assert!(
        done.iter().all(|completion| completion.done == Done::Write && completion.qp_number == qp.number())
    );
    let order: Vec<u64> = done.iter().map(|completion| completion.id).collect();
    assert_eq!(order, (0..SIZES.len() as u64).collect::<Vec<_>>(), "completions come in order");
    let landed = content(&target, 0, total + 2);
    assert_eq!(&landed[1..=total], &bytes[..], "written");
    assert_eq!((landed[0], landed[total + 1]), (0xEE, 0xEE), "bytes beside the target changed");

    source.write(0, &vec![0; total]);
    list.clear();
    at = 0;
    for (index, &len) in SIZES.iter().enumerate() {
        let sge = source.mr().sge(at, len as u32);
        list.push(index as u64, Operation::Read(&[sge], target.mr().remote(at + 1)), Flags::SIGNALED);
        at += len;
    }
    qp.post_send(&mut list).expect("takes READs");
    assert!(gather_ok(cq, SIZES.len()).iter().all(|completion| completion.done == Done::Read));
    assert_eq!(content(&source, 0, total), bytes, "read");
}

#[test]
fn a_queue_pair_connected_to_itself_copies() {
    each(|lab| {
        let cq = lab.cq(64);
        let qp = lab.loopback(&cq);
        there_and_back(lab, &qp, &cq);
    });
}

#[test]
fn a_pair_copies_both_ways() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        there_and_back(lab, &a, &left);
        there_and_back(lab, &b, &right);
    });
}

#[test]
fn many_connections_work_side_by_side() {
    each(|lab| {
        let cq = lab.cq(256);
        let pairs: Vec<Qp> = (0..4).map(|_| lab.loopback(&cq)).collect();
        let (source, target) = (lab.buffer(64 * 4096), lab.buffer(64 * 4096));
        let bytes = pattern(64 * 4096, lab.seed);
        source.write(0, &bytes);
        for (index, qp) in pairs.iter().enumerate() {
            let mut list = SendList::new();
            for block in (index..64).step_by(4) {
                let sge = source.mr().sge(block * 4096, 4096);
                let to = target.mr().remote((63 - block) * 4096);
                list.push(block as u64, Operation::Write(Payload::Sges(&[sge]), to), Flags::SIGNALED);
            }
            qp.post_send(&mut list).expect("takes WRITEs");
        }
        gather_ok(&cq, 64);
        let landed = content(&target, 0, 64 * 4096);
        for block in 0..64 {
            let (from, to) = (block * 4096, (63 - block) * 4096);
            assert_eq!(landed[to..to + 4096], bytes[from..from + 4096], "block {block}");
        }
    });
}

/// A READ sees the WRITE posted before it on the same connection.
#[test]
fn a_read_sees_the_write_before_it() {
    each(|lab| {
        let cq = lab.cq(16);
        let qp = lab.loopback(&cq);
        let (source, middle, target) = (lab.buffer(50_000), lab.buffer(50_000), lab.buffer(50_000));
        let bytes = pattern(50_000, lab.seed);
        source.write(0, &bytes);
        let mut list = SendList::new();
        let (from, back) = (source.mr().sge(0, 50_000), target.mr().sge(0, 50_000));
        list.push(1, Operation::Write(Payload::Sges(&[from]), middle.mr().remote(0)), Flags::SILENT);
        list.push(2, Operation::Read(&[back], middle.mr().remote(0)), Flags::SIGNALED);
        qp.post_send(&mut list).expect("takes both");
        assert_eq!(gather_ok(&cq, 1)[0].id, 2, "the first was silent");
        assert_eq!(content(&target, 0, 50_000), bytes);
    });
}

/// A fenced WRITE sends the bytes that the READ before it has brought.
#[test]
fn a_fence_waits_for_reads() {
    each(|lab| {
        let cq = lab.cq(16);
        let qp = lab.loopback(&cq);
        let (source, middle, target) = (lab.buffer(50_000), lab.buffer(50_000), lab.buffer(50_000));
        let bytes = pattern(50_000, lab.seed);
        source.write(0, &bytes);
        let mut list = SendList::new();
        let (into, from) = (middle.mr().sge(0, 50_000), middle.mr().sge(0, 50_000));
        list.push(1, Operation::Read(&[into], source.mr().remote(0)), Flags::SILENT);
        let fenced = Flags { fence: true, ..Flags::SIGNALED };
        list.push(2, Operation::Write(Payload::Sges(&[from]), target.mr().remote(0)), fenced);
        qp.post_send(&mut list).expect("takes both");
        gather_ok(&cq, 1);
        assert_eq!(content(&target, 0, 50_000), bytes);
    });
}

/// One doorbell for a list; only the last request reports; the list can be posted again.
#[test]
fn a_list_rings_once_and_reports_once() {
    each(|lab| {
        let cq = lab.event_cq(16);
        let qp = lab.loopback(&cq);
        let (source, target) = (lab.buffer(32 * 512), lab.buffer(32 * 512));
        let mut list = SendList::new();
        for block in 0..32 {
            let sge = source.mr().sge(block * 512, 512);
            let to = target.mr().remote(block * 512);
            list.push(block as u64, Operation::Write(Payload::Sges(&[sge]), to), Flags::SILENT);
        }
        list.signal_last();
        for round in 0..6 {
            let bytes = pattern(32 * 512, round);
            source.write(0, &bytes);
            qp.post_send(&mut list).expect("the places of silent requests came back");
            let mut out = Vec::new();
            let spin = std::time::Duration::ZERO;
            assert_eq!(cq.wait(spin, deadline(), &mut out).expect("waits"), 1);
            assert_eq!((out[0].id, out[0].ok().expect("succeeds")), (31, Done::Write));
            assert_eq!(content(&target, 0, 32 * 512), bytes, "round {round}");
        }
        if let Some(standin) = &lab.standin {
            assert_eq!((standin.get("doorbells"), standin.get("signaled")), (6, 6));
        }
    });
}
