//! Handles can be dropped in any order: each keeps its dependencies alive.

use kvdepot_verbs::{
    Access, Buffer, CompletionChannel, Cq, Flags, Operation, Payload, QpConfig, SendList, Srq,
};

use crate::lab::{each, gather_ok};

#[test]
fn what_is_used_outlives_its_handle() {
    each(|lab| {
        let channel = CompletionChannel::new(&lab.context).expect("a channel");
        let cq = Cq::with_events(&channel, 16, 1).expect("a queue");
        drop(channel);
        let srq = Srq::new(&lab.pd, 4, 1).expect("shared receives");
        let qp = lab.qp(QpConfig { srq: Some(srq.clone()), ..QpConfig::new(&cq, 8, 8) });
        drop(srq);
        let own = kvdepot_verbs::Endpoint::new(&qp, &lab.port, 5);
        qp.connect(&lab.port, Access::ALL, &own, &own, &lab.attributes).expect("connects");
        let buffer = lab.buffer(8192);
        let sge = [buffer.mr().sge(0, 64)];
        let mut list = SendList::new();
        list.push(1, Operation::Write(Payload::Sges(&sge), buffer.mr().remote(4096)), Flags::SIGNALED);
        qp.post_send(&mut list).expect("takes it");
        gather_ok(&cq, 1);
        drop(cq);
        qp.post_send(&mut list).expect("its queue is still there");
        drop(qp);
        drop(buffer);
    });
}

#[test]
fn a_domain_lives_as_long_as_its_regions() {
    each(|lab| {
        let pd = kvdepot_verbs::Pd::new(&lab.context).expect("a domain");
        let buffer = Buffer::new(&pd, 100, Access::LOCAL).expect("a buffer");
        drop(pd);
        buffer.write(0, b"kept");
        let mut bytes = [0; 4];
        buffer.read(0, &mut bytes);
        assert_eq!(&bytes, b"kept");
        assert_eq!(buffer.mr().pd().context().name(), lab.context.name());
    });
}
