//! Connections between two processes over the stand-in, like those of a server and its clients. The second process is
//! this test binary again, which runs one of its tests; they exchange their endpoints through pipes.
#![allow(missing_docs, reason = "a test")]

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvdepot_standin_verbs::{StandIn, library_path};
use kvdepot_verbs::{
    Access, Buffer, Completion, Context, Cq, Endpoint, Flags, Operation, Payload, Pd, Port, PortChoice, Qp,
    QpConfig, RcAttributes, RecvList, Remote, SendList, Verbs, WcStatus,
};

const ROLE: &str = "KVDEPOT_TEST_PEER";
const LEN: usize = 100_000;
const PSN: u32 = 0x0051_0ead;

struct End {
    port: Port,
    cq: Cq,
    qp: Qp,
    memory: Buffer,
}

impl End {
    fn new(verbs: &Verbs) -> Self {
        let (context, port): (Context, Port) = PortChoice::default().open(verbs).expect("a port");
        let pd = Pd::new(&context).expect("a domain");
        let cq = Cq::new(&context, 64).expect("a queue");
        let config = QpConfig { max_inline_bytes: 64, ..QpConfig::new(&cq, 16, 16) };
        let qp = Qp::new(&pd, config).expect("a queue pair");
        let memory = Buffer::new(&pd, LEN, Access::ALL).expect("memory");
        Self { port, cq, qp, memory }
    }

    /// Returns the parameters for the other side in one line.
    fn introduce(&self) -> String {
        let remote = self.memory.mr().remote(0);
        format!("end {} {} {}\n", self.qp.number(), remote.address, remote.rkey)
    }

    fn connect(&self, line: &str) -> Remote {
        let numbers: Vec<u64> =
            line.split_whitespace().skip(1).map(|word| word.parse().expect("a number")).collect();
        let own = Endpoint::new(&self.qp, &self.port, PSN);
        let peer = Endpoint { qp_number: numbers[0] as u32, ..own };
        self.qp.connect(&self.port, Access::ALL, &own, &peer, &RcAttributes::default()).expect("connects");
        Remote { address: numbers[1], rkey: numbers[2] as u32 }
    }

    fn next(&self) -> Completion {
        let (mut out, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while out.is_empty() {
            self.cq.poll(&mut out).expect("polls");
            assert!(Instant::now() < until, "no completion came");
            std::thread::yield_now();
        }
        assert_eq!(out.len(), 1, "{out:?}");
        out[0]
    }
}

fn bytes(seed: usize) -> Vec<u8> {
    (0..LEN).map(|i| (i * seed + i / 255) as u8).collect()
}

/// The other process's part. It does nothing when run as a test.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // Loaded by its own name, as by a program that links it: the environment configures it.
    let verbs = Verbs::load_from(&library_path()).expect("the stand-in loads");
    let end = End::new(&verbs);
    end.memory.write(0, &bytes(3));
    let mut receives = RecvList::new();
    receives.push(1, &[]);
    end.qp.init(&end.port, Access::ALL).expect("to Init");
    end.qp.post_recv(&mut receives).expect("takes a receive");
    print!("{}", end.introduce());
    std::io::stdout().flush().expect("writes");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("reads");
    let own = Endpoint::new(&end.qp, &end.port, PSN);
    let number = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number");
    let attributes = RcAttributes::default();
    end.qp
        .ready_to_receive(&end.port, &Endpoint { qp_number: number, ..own }, &attributes)
        .expect("receives");
    end.qp.ready_to_send(PSN, &attributes).expect("sends");
    if role == "dies" {
        // Its parent kills it while it waits here.
        std::io::stdin().read_line(&mut line).expect("reads");
        return;
    }
    let told = end.next();
    assert_eq!((told.status, told.imm), (WcStatus::SUCCESS, Some([7, 0, 0, 0])));
    let mut found = vec![0; LEN];
    end.memory.read(0, &mut found);
    assert!(found == bytes(5), "what the other side wrote is here when it says so");
    let mut list = SendList::new();
    list.push(2, Operation::SendImm(Payload::Inline(b"thanks"), [9, 9, 9, 9]), Flags::SIGNALED);
    end.qp.post_send(&mut list).expect("takes it");
    assert_eq!(end.next().status, WcStatus::SUCCESS);
}

fn spawn(role: &str) -> (Child, ChildStdin, BufReader<ChildStdout>) {
    let own = std::env::current_exe().expect("a program knows its own path");
    let mut child = Command::new(own)
        .args(["--exact", "peer", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    (child, input, BufReader::new(output))
}

fn introduction(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    // The test harness prints its own output first, perhaps on the same line.
    while !line.contains("end ") {
        line.clear();
        assert_ne!(output.read_line(&mut line).expect("reads"), 0, "the other process ended early");
    }
    line[line.find("end ").expect("found above")..].to_owned()
}

#[test]
fn a_server_reads_writes_and_tells_a_client_in_another_process() {
    let standin = StandIn::new(11);
    let end = End::new(&Verbs::load_from(standin.path()).expect("the stand-in loads"));
    let (mut child, mut input, mut output) = spawn("works");
    let remote = end.connect(&introduction(&mut output));
    input.write_all(end.introduce().as_bytes()).expect("writes");
    let mut list = SendList::new();
    let whole = [end.memory.mr().sge(0, LEN as u32)];
    list.push(1, Operation::Read(&whole, remote), Flags::SIGNALED);
    end.qp.post_send(&mut list).expect("takes it");
    assert_eq!(end.next().status, WcStatus::SUCCESS);
    let mut found = vec![0; LEN];
    end.memory.read(0, &mut found);
    assert!(found == bytes(3), "the client's bytes");
    end.memory.write(0, &bytes(5));
    list.clear();
    list.push(2, Operation::Write(Payload::Sges(&whole), remote), Flags::SILENT);
    list.push(3, Operation::SendImm(Payload::Sges(&[]), [7, 0, 0, 0]), Flags::SIGNALED);
    let inbox = [end.memory.mr().sge(0, 64)];
    let mut receives = RecvList::new();
    receives.push(4, &inbox);
    end.qp.post_send(&mut list).expect("takes both");
    let sent = end.next();
    assert_eq!((sent.id, sent.status), (3, WcStatus::SUCCESS));
    end.qp.post_recv(&mut receives).expect("takes a receive");
    let told = end.next();
    assert_eq!((told.id, told.imm, told.len_bytes), (4, Some([9, 9, 9, 9]), 6));
    assert!(child.wait().expect("ends").success());
}

/// A wrong key is refused by the other process.
#[test]
fn a_wrong_key_is_refused_by_the_other_process() {
    let standin = StandIn::new(12);
    let end = End::new(&Verbs::load_from(standin.path()).expect("the stand-in loads"));
    let (mut child, mut input, mut output) = spawn("dies");
    let remote = end.connect(&introduction(&mut output));
    input.write_all(end.introduce().as_bytes()).expect("writes");
    let mut list = SendList::new();
    let bad = Remote { rkey: remote.rkey ^ 0x5500, ..remote };
    list.push(1, Operation::Read(&[end.memory.mr().sge(0, 64)], bad), Flags::SIGNALED);
    end.qp.post_send(&mut list).expect("takes it");
    assert_eq!(end.next().status, WcStatus::REMOTE_ACCESS);
    child.kill().expect("can be killed");
    child.wait().expect("ends");
}

/// A peer that was killed is an unanswered request, in bounded time (P2).
#[test]
fn a_killed_peer_does_not_answer() {
    let standin = StandIn::new(13);
    let end = End::new(&Verbs::load_from(standin.path()).expect("the stand-in loads"));
    let (mut child, mut input, mut output) = spawn("dies");
    let remote = end.connect(&introduction(&mut output));
    input.write_all(end.introduce().as_bytes()).expect("writes");
    child.kill().expect("can be killed");
    child.wait().expect("ends");
    let mut list = SendList::new();
    list.push(1, Operation::Read(&[end.memory.mr().sge(0, 64)], remote), Flags::SILENT);
    end.qp.post_send(&mut list).expect("takes it");
    assert_eq!(end.next().status, WcStatus::RETRIES_EXCEEDED);
}

/// A receiver that does not run lets its message queue fill up. An answer that finds the queue full is sent when there
/// is space again; if it were dropped, the request would never complete.
#[test]
fn an_answer_that_finds_its_askers_queue_full_is_sent_later() {
    let (asking, answering) = (StandIn::new(14), StandIn::new(15));
    let ends = [&asking, &answering].map(|standin| {
        let end = End::new(&Verbs::load_from(standin.path()).expect("the stand-in loads"));
        end.memory.write(0, &bytes(3));
        end
    });
    let remote = ends[0].connect(&ends[1].introduce());
    ends[1].connect(&ends[0].introduce());
    ends[0].memory.write(0, &[0; 64]);
    answering.set("hung", 1);
    let mut list = SendList::new();
    list.push(1, Operation::Read(&[ends[0].memory.mr().sge(0, 64)], remote), Flags::SIGNALED);
    // Read before: posting wakes the stand-in, which may take its only step immediately. That step sends the request.
    let before = asking.get("steps");
    ends[0].qp.post_send(&mut list).expect("takes it");
    let until = Instant::now() + Duration::from_secs(60);
    while asking.get("steps") == before {
        assert!(Instant::now() < until, "the request did not leave");
        std::thread::yield_now();
    }
    asking.set("hung", 1);
    fill_queue(ends[0].qp.number());
    answering.set("hung", 0);
    let mut found = [0; 64];
    while found != bytes(3)[..64] {
        assert!(Instant::now() < until, "the request was not carried out");
        ends[0].memory.read(0, &mut found);
    }
    // Each step of the device is one hold of its lock, so the first attempt to answer is over after this.
    answering.get("steps");
    asking.set("hung", 0);
    assert_eq!(ends[0].next().status, WcStatus::SUCCESS);
}

/// Sends invalid messages to a queue pair until the kernel accepts no more.
fn fill_queue(number: u32) {
    let socket = UnixDatagram::unbound().expect("a socket");
    socket.set_nonblocking(true).expect("a socket that does not block");
    let name = format!("kvdepot-standin-verbs/{number}");
    let address = SocketAddr::from_abstract_name(name).expect("an address");
    while socket.send_to_addr(b"no message", &address).is_ok() {}
}
