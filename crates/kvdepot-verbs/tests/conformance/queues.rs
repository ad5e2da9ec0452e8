//! Capacity of queues, waiting, and immediate refusals.

use std::time::{Duration, Instant};

use kvdepot_core::ErrorKind;
use kvdepot_verbs::{
    Access, CompletionChannel, Cq, Endpoint, Flags, Operation, Payload, QpConfig, QpState, SendList,
};

use crate::lab::{deadline, each, each_standin, gather_ok};

/// A wait ends with a completion, or at its deadline without one.
#[test]
fn a_wait_has_a_deadline() {
    each(|lab| {
        let cq = lab.event_cq(16);
        let qp = lab.loopback(&cq);
        let mut out = Vec::new();
        let soon = Instant::now() + Duration::from_millis(5);
        assert_eq!(cq.wait(Duration::from_millis(1), soon, &mut out).expect("waits"), 0);
        assert!(Instant::now() >= soon && out.is_empty());
        let buffer = lab.buffer(100_000);
        for round in 0..4 {
            let mut list = SendList::new();
            let sge = [buffer.mr().sge(0, 50_000)];
            let operation = Operation::Write(Payload::Sges(&sge), buffer.mr().remote(50_000));
            list.push(round, operation, Flags::SIGNALED);
            qp.post_send(&mut list).expect("takes it");
            assert_eq!(cq.wait(Duration::ZERO, deadline(), &mut out).expect("waits"), 1);
            assert_eq!(out.pop().expect("one").id, round);
        }
    });
}

/// Several queues on one channel: an event names its queue.
#[test]
fn an_event_names_its_queue() {
    each(|lab| {
        let channel = CompletionChannel::new(&lab.context).expect("a channel");
        let queues = [3, 4].map(|token| Cq::with_events(&channel, 16, token).expect("a queue"));
        let pairs = queues.each_ref().map(|cq| lab.loopback(cq));
        let buffer = lab.buffer(8192);
        for (index, token) in [(1, 4), (0, 3)] {
            queues[index].request_event(false).expect("arms");
            let mut list = SendList::new();
            let sge = [buffer.mr().sge(0, 4096)];
            list.push(1, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(4096)), Flags::SIGNALED);
            pairs[index].post_send(&mut list).expect("takes it");
            assert_eq!(channel.wait(deadline()).expect("waits"), Some(token));
            gather_ok(&queues[index], 1);
        }
        assert_eq!(channel.take().expect("looks"), None, "one event each");
    });
}

/// Silent requests keep their places until a later completion was polled.
#[test]
fn a_full_queue_says_so_and_how_much_it_took() {
    each_standin(|lab, _| {
        let cq = lab.cq(64);
        let qp = lab.qp(QpConfig::new(&cq, 8, 1));
        let own = Endpoint::new(&qp, &lab.port, 1);
        qp.connect(&lab.port, Access::ALL, &own, &own, &lab.attributes).expect("connects");
        let buffer = lab.buffer(4096);
        let sge = [buffer.mr().sge(0, 8)];
        let write = Operation::Write(Payload::Sges(&sge), buffer.mr().remote(64));
        let mut list = SendList::new();
        for id in 0..12 {
            list.push(id, write, Flags { signaled: id == 7, ..Flags::SILENT });
        }
        let refused = qp.post_send(&mut list).expect_err("there are eight places");
        assert_eq!((refused.posted, refused.error.kind()), (8, ErrorKind::Busy));
        assert_eq!(gather_ok(&cq, 1)[0].id, 7);
        list.clear();
        list.push(0, write, Flags::SIGNALED);
        qp.post_send(&mut list).expect("the eight places are free again");
        gather_ok(&cq, 1);
    });
}

/// An overflow of a completion queue is an error of the next poll, not silence.
#[test]
fn an_overrun_queue_is_an_error() {
    let standin = kvdepot_standin_verbs::StandIn::new(3);
    let verbs = kvdepot_verbs::Verbs::load_from(standin.path()).expect("loads");
    let (context, port) = kvdepot_verbs::PortChoice::default().open(&verbs).expect("a port");
    let pd = kvdepot_verbs::Pd::new(&context).expect("a domain");
    let (small, other) = (Cq::new(&context, 2).expect("a queue"), Cq::new(&context, 16).expect("a queue"));
    let attributes = kvdepot_verbs::RcAttributes::default();
    let connect = |cq: &Cq| {
        let qp = kvdepot_verbs::Qp::new(&pd, QpConfig::new(cq, 16, 1)).expect("a queue pair");
        let own = Endpoint::new(&qp, &port, 1);
        qp.connect(&port, Access::ALL, &own, &own, &attributes).expect("connects");
        qp
    };
    let (qp, worker) = (connect(&small), connect(&other));
    let buffer = kvdepot_verbs::Buffer::new(&pd, 4096, Access::ALL).expect("a buffer");
    let sge = [buffer.mr().sge(0, 8)];
    let mut list = SendList::new();
    for id in 0..4 {
        list.push(id, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(64)), Flags::SIGNALED);
    }
    qp.post_send(&mut list).expect("takes four");
    // Polls of the other queue let the device work without emptying the small one.
    let mut out = Vec::new();
    while standin.get("violations") == 0 {
        worker.config().send_cq.poll(&mut out).expect("polls");
    }
    let error = small.poll(&mut out).expect_err("it overran");
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("more completions than it has entries"), "{error}");
}

#[test]
fn a_queue_pair_goes_through_its_states() {
    each(|lab| {
        let cq = lab.cq(16);
        let qp = lab.qp(QpConfig::new(&cq, 8, 8));
        let own = Endpoint::new(&qp, &lab.port, 1);
        assert_eq!(qp.state().expect("asks"), QpState::Reset);
        assert!(qp.ready_to_send(1, &lab.attributes).is_err(), "not before it can receive");
        qp.init(&lab.port, Access::ALL).expect("to Init");
        assert_eq!(qp.state().expect("asks"), QpState::Init);
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Sges(&[])), Flags::SIGNALED);
        assert_eq!(qp.post_send(&mut list).expect_err("not yet").posted, 0);
        qp.ready_to_receive(&lab.port, &own, &lab.attributes).expect("to ReadyToReceive");
        qp.ready_to_send(1, &lab.attributes).expect("to ReadyToSend");
        assert_eq!(qp.state().expect("asks"), QpState::ReadyToSend);
        qp.stop().expect("to Error");
        assert_eq!(qp.state().expect("asks"), QpState::Error);
    });
}
