//! Failing requests and their consequences.

use kvdepot_core::ErrorKind;
use kvdepot_verbs::{
    Access, Buffer, Endpoint, Flags, Operation, Payload, QpConfig, QpState, RcAttributes, RecvList, Remote,
    SendList, WcStatus,
};

use crate::lab::{Lab, content, each, each_standin, gather, gather_ok};

/// Posts `bad` between two good requests. The first succeeds, `bad` fails with `status`, the rest is flushed, and the
/// connection is over.
fn fails_with(lab: &Lab, operation: Operation<'_>, target: &Buffer, status: WcStatus) {
    let cq = lab.cq(64);
    let qp = lab.loopback(&cq);
    let own = lab.buffer(4096);
    own.write(0, b"good");
    let good = [own.mr().sge(0, 4)];
    let mut list = SendList::new();
    list.push(1, Operation::Write(Payload::Sges(&good), target.mr().remote(4000)), Flags::SIGNALED);
    list.push(2, operation, Flags::SILENT);
    list.push(3, Operation::Write(Payload::Sges(&good), target.mr().remote(4004)), Flags::SIGNALED);
    qp.post_send(&mut list).expect("the device finds out later");
    let ended: Vec<_> = gather(&cq, 3).iter().map(|completion| (completion.id, completion.status)).collect();
    assert_eq!(ended, [(1, WcStatus::SUCCESS), (2, status), (3, WcStatus::FLUSHED)]);
    assert_eq!(content(target, 4000, 8), b"good\0\0\0\0");
    assert_eq!(qp.state().expect("asks"), QpState::Error);
    // Requests posted later are flushed too.
    list.clear();
    list.push(4, Operation::Write(Payload::Sges(&good), target.mr().remote(4004)), Flags::SILENT);
    qp.post_send(&mut list).expect("is taken, to be flushed");
    let last = gather(&cq, 1)[0];
    assert_eq!((last.id, last.status), (4, WcStatus::FLUSHED));
    assert_eq!(last.ok().expect_err("flushed").kind(), ErrorKind::Closed);
}

#[test]
fn a_wrong_key_of_the_peer_is_refused() {
    each(|lab| {
        let target = lab.buffer(8192);
        let sge = [target.mr().sge(0, 16)];
        let remote = Remote { rkey: target.mr().rkey() ^ 0x5500, ..target.mr().remote(0) };
        fails_with(lab, Operation::Write(Payload::Sges(&sge), remote), &target, WcStatus::REMOTE_ACCESS);
    });
}

#[test]
fn a_range_past_the_peers_region_is_refused() {
    each(|lab| {
        let target = lab.buffer(8192);
        let sge = [target.mr().sge(0, 4097)];
        let remote = target.mr().remote(4096);
        fails_with(lab, Operation::Write(Payload::Sges(&sge), remote), &target, WcStatus::REMOTE_ACCESS);
        fails_with(lab, Operation::Read(&sge, remote), &lab.buffer(8192), WcStatus::REMOTE_ACCESS);
    });
}

#[test]
fn access_that_was_not_given_is_refused() {
    each(|lab| {
        let target = lab.buffer(8192);
        let closed = Buffer::new(&lab.pd, 4096, Access::LOCAL).expect("a buffer");
        let sge = [target.mr().sge(0, 16)];
        fails_with(lab, Operation::Read(&sge, closed.mr().remote(0)), &target, WcStatus::REMOTE_ACCESS);
        let operation = Operation::Write(Payload::Sges(&sge), closed.mr().remote(0));
        fails_with(lab, operation, &lab.buffer(8192), WcStatus::REMOTE_ACCESS);
    });
}

#[test]
fn a_region_that_ended_is_refused() {
    each(|lab| {
        let target = lab.buffer(8192);
        let sge = [target.mr().sge(0, 16)];
        let gone = lab.buffer(4096).mr().remote(0);
        fails_with(lab, Operation::Read(&sge, gone), &target, WcStatus::REMOTE_ACCESS);
    });
}

/// Checked when the bytes move, not when they are posted: a region must outlive the requests on it.
#[test]
fn a_region_that_ends_too_early_fails_its_requests() {
    each_standin(|lab, _| {
        let cq = lab.cq(64);
        let qp = lab.loopback(&cq);
        let (source, target) = (lab.buffer(4096), lab.buffer(4096));
        let mut list = SendList::new();
        let sge = [source.mr().sge(0, 4096)];
        list.push(1, Operation::Write(Payload::Sges(&sge), target.mr().remote(0)), Flags::SIGNALED);
        qp.post_send(&mut list).expect("takes it");
        drop(source);
        assert_eq!(gather(&cq, 1)[0].status, WcStatus::LOCAL_PROTECTION);
    });
}

#[test]
fn a_message_longer_than_its_receive_fails_both_sides() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let inbox = lab.buffer(4096);
        let mut receives = RecvList::new();
        receives.push(7, &[inbox.mr().sge(0, 8)]);
        b.post_recv(&mut receives).expect("takes a receive");
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Inline(b"nine byte")), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        // The specification says the first, and the software device reports the second; also below.
        let sent = gather(&left, 1)[0].status;
        assert!([WcStatus::REMOTE_INVALID_REQUEST, WcStatus::REMOTE_OPERATION].contains(&sent), "{sent:?}");
        let received = gather(&right, 1)[0];
        assert_eq!(received.id, 7);
        let status = received.status;
        assert!([WcStatus::LOCAL_LENGTH, WcStatus::LOCAL_OPERATION].contains(&status), "{status:?}");
    });
}

#[test]
fn a_peer_without_receives_is_given_up() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let make = |cq| lab.qp(QpConfig { max_inline_bytes: 16, ..QpConfig::new(cq, 8, 8) });
        let (a, b) = (make(&left), make(&right));
        lab.join(&a, &b, &RcAttributes { receiver_not_ready_retries: 1, ..lab.attributes });
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Inline(b"x")), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        let ended = gather(&left, 1)[0];
        assert_eq!(ended.status, WcStatus::RECEIVER_NOT_READY);
        assert_eq!(ended.ok().expect_err("given up").kind(), ErrorKind::Unavailable);
    });
}

#[test]
fn stopping_flushes_what_was_posted() {
    each(|lab| {
        let cq = lab.cq(64);
        let qp = lab.loopback(&cq);
        let inbox = lab.buffer(4096);
        let mut receives = RecvList::new();
        for id in 0..5 {
            receives.push(id, &[inbox.mr().sge(0, 8)]);
        }
        qp.post_recv(&mut receives).expect("takes receives");
        qp.stop().expect("stops");
        let flushed = gather(&cq, 5);
        assert!(flushed.iter().all(|completion| completion.status == WcStatus::FLUSHED), "{flushed:?}");
    });
}

#[test]
fn a_cut_link_ends_everything_as_unanswered() {
    each_standin(|lab, standin| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, _b) = lab.pair(&left, &right);
        let buffer = lab.buffer(8192);
        let sge = [buffer.mr().sge(0, 64)];
        let mut list = SendList::new();
        list.push(1, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(4096)), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        gather_ok(&left, 1);
        standin.cut(a.number());
        list.push(2, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(4096)), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes them");
        let ended: Vec<_> = gather(&left, 2).iter().map(|completion| completion.status).collect();
        assert_eq!(ended, [WcStatus::RETRIES_EXCEEDED, WcStatus::FLUSHED]);
    });
}

/// A peer that expects other packet numbers does not answer: both sides must agree on them.
#[test]
fn packet_numbers_must_match() {
    each_standin(|lab, _| {
        let cq = lab.cq(16);
        let qp = lab.qp(QpConfig::new(&cq, 8, 8));
        let own = Endpoint::new(&qp, &lab.port, 1);
        let told = Endpoint { psn: 2, ..own };
        qp.connect(&lab.port, Access::ALL, &own, &told, &lab.attributes).expect("nobody notices yet");
        let buffer = lab.buffer(4096);
        let sge = [buffer.mr().sge(0, 8)];
        let mut list = SendList::new();
        list.push(1, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(8)), Flags::SIGNALED);
        qp.post_send(&mut list).expect("takes it");
        assert_eq!(gather(&cq, 1)[0].status, WcStatus::RETRIES_EXCEEDED);
    });
}

/// Every call that the library may refuse fails with an error that names the call, the device and the number.
#[test]
fn every_refused_call_is_an_error_that_names_it() {
    each_standin(|lab, standin| {
        let cq = lab.cq(16);
        let make = |lab: &Lab| kvdepot_verbs::Qp::new(&lab.pd, QpConfig::new(&cq, 8, 8));
        let calls: [(&str, &dyn Fn() -> kvdepot_core::Result<()>); 5] = [
            ("ibv_alloc_pd", &|| kvdepot_verbs::Pd::new(&lab.context).map(drop)),
            ("ibv_create_cq", &|| kvdepot_verbs::Cq::new(&lab.context, 4).map(drop)),
            ("ibv_create_qp", &|| make(lab).map(drop)),
            ("ibv_create_srq", &|| kvdepot_verbs::Srq::new(&lab.pd, 4, 1).map(drop)),
            ("ibv_create_comp_channel", &|| kvdepot_verbs::CompletionChannel::new(&lab.context).map(drop)),
        ];
        for (name, call) in calls {
            standin.fail(name, 1, 1, libc::EIO);
            call().expect("the first time succeeds");
            let text = call().expect_err("the second fails").to_string();
            assert!(text.contains(name) && text.contains("standin0") && text.contains("errno=5"), "{text}");
            call().expect("and then it succeeds again");
        }
    });
}
