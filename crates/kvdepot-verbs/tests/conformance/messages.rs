//! SEND, immediate bytes, inline bytes, shared receives.

use kvdepot_verbs::{Done, Flags, Operation, Payload, QpConfig, RecvList, SendList, Srq};

use crate::lab::{content, each, gather_ok, pattern};

#[test]
fn messages_arrive_in_order_with_their_bytes() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let (source, inbox) = (lab.buffer(8 * 5000), lab.buffer(8 * 5000));
        let bytes = pattern(8 * 5000, lab.seed);
        source.write(0, &bytes);
        let mut receives = RecvList::new();
        for slot in 0..8 {
            receives.push(100 + slot as u64, &[inbox.mr().sge(slot * 5000, 5000)]);
        }
        b.post_recv(&mut receives).expect("takes receives");
        let mut list = SendList::new();
        for slot in 0..8usize {
            let sge = [source.mr().sge(slot * 5000, 4000 + slot as u32)];
            let operation = if slot % 2 == 0 {
                Operation::Send(Payload::Sges(&sge))
            } else {
                Operation::SendImm(Payload::Sges(&sge), [slot as u8, 2, 3, 4])
            };
            list.push(slot as u64, operation, Flags::SIGNALED);
        }
        a.post_send(&mut list).expect("takes SENDs");
        assert!(gather_ok(&left, 8).iter().all(|sent| sent.done == Done::Send));
        for (slot, received) in gather_ok(&right, 8).iter().enumerate() {
            assert_eq!((received.id, received.done), (100 + slot as u64, Done::Receive));
            assert_eq!(received.len_bytes as usize, 4000 + slot);
            assert_eq!(received.imm, (slot % 2 == 1).then_some([slot as u8, 2, 3, 4]));
            assert_eq!(
                content(&inbox, slot * 5000, 4000 + slot),
                bytes[slot * 5000..slot * 5000 + 4000 + slot]
            );
        }
    });
}

/// The peer of a WRITE WITH IMM sees the written bytes when it gets the four immediate ones.
#[test]
fn a_write_with_imm_is_placed_before_it_is_told() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let (source, target) = (lab.buffer(70_000), lab.buffer(70_000));
        let bytes = pattern(70_000, lab.seed);
        source.write(0, &bytes);
        let mut receives = RecvList::new();
        receives.push(5, &[]);
        b.post_recv(&mut receives).expect("takes a receive without memory");
        let mut list = SendList::new();
        let sge = [source.mr().sge(0, 70_000)];
        let operation = Operation::WriteImm(Payload::Sges(&sge), target.mr().remote(0), [0xC8, 0, 0, 0]);
        list.push(1, operation, Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        let told = gather_ok(&right, 1)[0];
        assert_eq!((told.id, told.done, told.imm), (5, Done::ReceiveWrite, Some([0xC8, 0, 0, 0])));
        assert_eq!(content(&target, 0, 70_000), bytes);
        gather_ok(&left, 1);
    });
}

/// An acknowledgement without bytes, as InfiniStore's server sends it.
#[test]
fn four_bytes_travel_alone() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let mut receives = RecvList::new();
        receives.push(9, &[]);
        b.post_recv(&mut receives).expect("takes a receive without memory");
        let mut list = SendList::new();
        list.push(1, Operation::SendImm(Payload::Sges(&[]), 404u32.to_le_bytes()), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        let told = gather_ok(&right, 1)[0];
        assert_eq!((told.done, told.len_bytes, told.imm), (Done::Receive, 0, Some(404u32.to_le_bytes())));
        gather_ok(&left, 1);
    });
}

/// Inline bytes are copied when they are posted: later changes to them do not matter.
#[test]
fn inline_bytes_are_taken_at_once() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let inbox = lab.buffer(4096);
        let mut receives = RecvList::new();
        receives.push(1, &[inbox.mr().sge(0, 64)]);
        b.post_recv(&mut receives).expect("takes a receive");
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Inline(b"taken at once")), Flags::SILENT);
        let target = inbox.mr().remote(1000);
        list.push(2, Operation::Write(Payload::Inline(b"written inline"), target), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes both");
        list.clear();
        list.push(0, Operation::Send(Payload::Inline(&[0xFF; 64])), Flags::SILENT);
        drop(list);
        gather_ok(&left, 1);
        assert_eq!(gather_ok(&right, 1)[0].len_bytes, 13);
        assert_eq!(content(&inbox, 0, 13), b"taken at once");
        assert_eq!(content(&inbox, 1000, 14), b"written inline");
    });
}

/// A sender whose peer has no receive yet waits for one.
#[test]
fn a_message_waits_for_its_receive() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let (a, b) = lab.pair(&left, &right);
        let mut list = SendList::new();
        list.push(1, Operation::Send(Payload::Inline(b"early")), Flags::SIGNALED);
        a.post_send(&mut list).expect("takes it");
        let mut out = Vec::new();
        for _ in 0..50 {
            left.poll(&mut out).expect("polls");
        }
        assert!(out.is_empty(), "nobody has taken it: {out:?}");
        let inbox = lab.buffer(4096);
        let mut receives = RecvList::new();
        receives.push(1, &[inbox.mr().sge(0, 64)]);
        b.post_recv(&mut receives).expect("takes a receive");
        gather_ok(&right, 1);
        gather_ok(&left, 1);
        assert_eq!(content(&inbox, 0, 5), b"early");
    });
}

/// Connections that share receives get their own messages, and the completion names the connection.
#[test]
fn shared_receives_serve_all_connections() {
    each(|lab| {
        let (left, right) = (lab.cq(64), lab.cq(64));
        let srq = Srq::new(&lab.pd, 16, 1).expect("a shared receive queue");
        let inbox = lab.buffer(12 * 64);
        let mut receives = RecvList::new();
        for slot in 0..12 {
            receives.push(slot as u64, &[inbox.mr().sge(slot * 64, 64)]);
        }
        srq.post_recv(&mut receives).expect("takes receives");
        let make = |cq| QpConfig { max_inline_bytes: 64, ..QpConfig::new(cq, 16, 16) };
        let pairs: Vec<_> = (0..3)
            .map(|_| {
                let a = lab.qp(make(&left));
                let b = lab.qp(QpConfig { srq: Some(srq.clone()), ..make(&right) });
                lab.join(&a, &b, &lab.attributes);
                (a, b)
            })
            .collect();
        for (index, (a, _)) in pairs.iter().enumerate() {
            let mut list = SendList::new();
            for turn in 0..4u8 {
                list.push(0, Operation::Send(Payload::Inline(&[index as u8, turn])), Flags::SIGNALED);
            }
            a.post_send(&mut list).expect("takes SENDs");
        }
        let received = gather_ok(&right, 12);
        gather_ok(&left, 12);
        for (index, (_, b)) in pairs.iter().enumerate() {
            let own: Vec<Vec<u8>> = received
                .iter()
                .filter(|completion| completion.qp_number == b.number())
                .map(|completion| content(&inbox, completion.id as usize * 64, 2))
                .collect();
            assert_eq!(own, (0..4).map(|turn| vec![index as u8, turn]).collect::<Vec<_>>());
        }
    });
}
