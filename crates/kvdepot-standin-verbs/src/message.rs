//! Messages between two processes about their queue pairs: one datagram per request, and one per answer. They never
//! carry payload: the answering side moves the bytes between the two processes' memory.

use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, recv,
    sendto, socket_with,
};

/// Maximum number of pieces of local memory in a request.
pub(crate) const PIECES_MAX: usize = 16;
const WORDS: usize = 12 + 2 * PIECES_MAX;

/// A request, or the answer to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ask,
    Answer,
}

#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) pid: i32,
    pub(crate) psn: u32,
    pub(crate) opcode: u32,
    /// Status of an answer.
    pub(crate) status: u32,
    pub(crate) imm: u32,
    pub(crate) solicited: bool,
    pub(crate) remote_address: u64,
    pub(crate) rkey: u32,
    /// The requester's memory.
    pub(crate) pieces: Vec<(u64, u64)>,
}

/// A request from another process that could not be carried out immediately.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) message: Message,
    /// Remaining checks of the receive queue.
    pub(crate) attempts_left: u32,
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let kind = match self.kind {
            Kind::Ask => 0,
            Kind::Answer => 1,
        };
        let mut words = vec![
            kind,
            self.from.into(),
            self.to.into(),
            u64::from(self.pid.cast_unsigned()),
            self.psn.into(),
            self.opcode.into(),
            self.status.into(),
            self.imm.into(),
            self.solicited.into(),
            self.remote_address,
            self.rkey.into(),
            self.pieces.len() as u64,
        ];
        words.extend(self.pieces.iter().flat_map(|&(address, len)| [address, len]));
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let number = |index: usize| words.get(index).and_then(|&word| u32::try_from(word).ok());
        let pieces =
            words.get(12..)?.as_chunks::<2>().0.iter().map(|&[address, len]| (address, len)).collect();
        Some(Self {
            kind: match number(0)? {
                0 => Kind::Ask,
                1 => Kind::Answer,
                _ => return None,
            },
            from: number(1)?,
            to: number(2)?,
            pid: number(3)?.cast_signed(),
            psn: number(4)?,
            opcode: number(5)?,
            status: number(6)?,
            imm: number(7)?,
            solicited: number(8)? != 0,
            remote_address: *words.get(9)?,
            rkey: number(10)?,
            pieces,
        })
    }

    /// Sends the message from `socket` to its queue pair. [`is_full`] detects a temporary error.
    pub(crate) fn send(&self, socket: &OwnedFd) -> rustix::io::Result<()> {
        sendto(
            socket.as_fd(),
            &self.encode(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            &address(self.to)?,
        )?;
        Ok(())
    }

    pub(crate) fn receive(socket: &OwnedFd) -> Option<Self> {
        let mut bytes = [0u8; WORDS * 8];
        let (len, _) = recv(socket.as_fd(), &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        Self::decode(&bytes[..len])
    }
}

/// Returns whether a message was not sent because the receiver's queue is full: the kernel keeps few datagrams
/// (`net.unix.max_dgram_qlen`), and a receiver that does not run takes none.
pub(crate) fn is_full(errno: rustix::io::Errno) -> bool {
    matches!(errno, rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS)
}

/// Returns whether a process has queue pair `number`. It sends nothing, so that the queue stays free for requests and
/// answers.
pub(crate) fn exists(number: u32) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(probe) = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None) else { return true };
    address(number).and_then(|address| connect(probe.as_fd(), &address)).is_ok()
}

fn address(number: u32) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(format!("kvdepot-standin-verbs/{number}").as_bytes())
}

/// Returns the socket of queue pair `number`; `None` if another process has that number.
pub(crate) fn socket_of(number: u32) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).ok()?;
    bind(socket.as_fd(), &address(number).ok()?).ok()?;
    Some(socket)
}
