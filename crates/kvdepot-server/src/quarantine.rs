//! The quarantine: sessions whose connection ended without a goodbye. Their process may have been killed, and then its
//! devices may still copy into and out of the slots that it had leased: a copy engine is not a thread, and stops only
//! when the driver's `release` has run. So the session, and with it every lease, is kept until the kernel reports the
//! process's exit (P1).
//!
//! One thread waits for all of these processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{QUARANTINED_CONNECTIONS_MAX, SILENT_CLOSE_WAIT_MS, UNWATCHED_EXIT_WAIT_MS};
use kvdepot_core::{Error, Result};
use kvdepot_depot::Session;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::peer::{Activity, Peer};

/// Pause after a failed poll.
const POLL_PAUSE: Duration = Duration::from_millis(100);

/// How long sessions are kept if their process is not seen to exit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    /// If its exit cannot be watched.
    pub(crate) unwatched: Duration,
    /// If it keeps running.
    pub(crate) running: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            unwatched: Duration::from_millis(UNWATCHED_EXIT_WAIT_MS),
            running: Duration::from_millis(SILENT_CLOSE_WAIT_MS),
        }
    }
}

/// The sessions, and the thread that ends them. Dropping it ends all that are left, so drop it when no slots can be
/// reserved any more.
#[derive(Debug)]
pub(crate) struct Quarantine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    waits: Waits,
    state: Mutex<State>,
    room: Condvar,
    /// Readable when the thread has to check something besides the processes.
    wake: rustix::fd::OwnedFd,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    entered: Vec<Held>,
    /// Number of sessions that have not been ended: `entered`, and those of the thread.
    count: usize,
    is_closing: bool,
}

/// A session, and the process for whose copies it waits.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) session: Session,
    pub(crate) peer: Box<dyn Peer>,
    /// When to decide without an exit.
    due: Instant,
}

impl Quarantine {
    pub(crate) fn start(waits: Waits) -> Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("cannot make an eventfd", e.into()))?;
        let shared = Arc::new(Shared {
            waits,
            state: Mutex::default(),
            room: Condvar::new(),
            wake,
            stopping: AtomicBool::new(false),
        });
        let reaper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvdepot-reaper".to_owned())
            .spawn(move || reaper.run())
            .map_err(|e| Error::io("cannot start a thread", e).with("thread", "kvdepot-reaper"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Keeps a session until its peer has exited. Blocks while `QUARANTINED_CONNECTIONS_MAX` are kept (P7), so the
    /// ended connection counts against the door's limit meanwhile.
    pub(crate) fn hold(&self, session: Session, peer: Box<dyn Peer>) {
        let mut state = self.shared.state.lock();
        while state.count >= QUARANTINED_CONNECTIONS_MAX && !state.is_closing {
            self.shared.room.wait(&mut state);
        }
        self.enter(&mut state, session, peer);
        drop(state);
        self.shared.wake();
    }

    fn enter(&self, state: &mut State, session: Session, peer: Box<dyn Peer>) {
        let wait =
            if peer.exit().is_some() { self.shared.waits.running } else { self.shared.waits.unwatched };
        state.count += 1;
        state.entered.push(Held { session, peer, due: Instant::now() + wait });
    }

    /// Keeps the sessions of another quarantine, however many.
    pub(crate) fn hold_all(&self, sessions: impl IntoIterator<Item = (Session, Box<dyn Peer>)>) {
        let mut state = self.shared.state.lock();
        sessions.into_iter().for_each(|(session, peer)| self.enter(&mut state, session, peer));
        drop(state);
        self.shared.wake();
    }

    /// Rechecks all sessions after a process has said that its copies have ended: sessions that wait for nothing else
    /// are released.
    pub(crate) fn look_again(&self) {
        self.shared.wake();
    }

    /// Ends the thread and takes all its sessions, to be handed over or held again.
    pub(crate) fn take_all(mut self) -> Vec<Held> {
        self.stop();
        std::mem::take(&mut self.shared.state.lock().entered)
    }

    /// Releases threads that wait for capacity, because the door closes.
    pub(crate) fn close(&self) {
        self.shared.state.lock().is_closing = true;
        self.shared.room.notify_all();
    }
}

impl Quarantine {
    fn stop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn wake(&self) {
        // A counter that is full is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_le_bytes());
    }

    fn run(&self) {
        let mut held: Vec<Held> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            held.append(&mut self.state.lock().entered);
            let exited = self.wait(&held);
            let now = Instant::now();
            let mut index = 0;
            let over: Vec<Held> = held
                .extract_if(.., |held| {
                    index += 1;
                    exited[index - 1]
                        || held.peer.copies_ended()
                        || (held.due <= now && self.is_given_up(held, now))
                })
                .collect();
            if !over.is_empty() {
                let count = over.len();
                // This ends their leases.
                drop(over);
                self.state.lock().count -= count;
                self.room.notify_all();
            }
        }
        self.state.lock().entered.append(&mut held);
    }

    /// Waits until a process has exited, a session was added, or one is due. Returns which processes have exited.
    fn wait(&self, held: &[Held]) -> Vec<bool> {
        let due = held.iter().map(|held| held.due).min();
        // If its copies ended before it was added, the wake-up for that has passed already.
        let is_over = held.iter().any(|held| held.peer.copies_ended());
        let left = due
            .map(|due| if is_over { Duration::ZERO } else { due.saturating_duration_since(Instant::now()) });
        let left =
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let watched: Vec<Option<usize>> = held
            .iter()
            .map(|held| {
                polled.push(PollFd::from_borrowed_fd(held.peer.exit()?, PollFlags::IN));
                Some(polled.len() - 1)
            })
            .collect();
        match rustix::event::poll(&mut polled, left.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return vec![false; held.len()],
            Err(error) => {
                tracing::warn!("cannot wait for the exit of clients, trying again: {error}");
                std::thread::sleep(POLL_PAUSE);
                return vec![false; held.len()];
            }
        }
        if !polled[0].revents().is_empty() {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        watched.iter().map(|at| at.is_some_and(|at| !polled[at].revents().is_empty())).collect()
    }

    /// Returns whether to end a session whose process was not seen to exit in time. Otherwise it is checked again
    /// later.
    fn is_given_up(&self, held: &mut Held, now: Instant) -> bool {
        if held.peer.exit().is_none() {
            tracing::warn!(
                "slots of a client are free {} ms after its connection ended: its exit cannot be watched",
                self.waits.unwatched.as_millis()
            );
            return true;
        }
        let activity = held.peer.activity();
        if activity == Activity::Running {
            tracing::warn!(
                "slots of a client are free {} ms after it closed its connection without a goodbye: it still runs ({:?})",
                self.waits.running.as_millis(),
                held.peer
            );
            return true;
        }
        // Its devices may copy until it has exited, however long that takes (P1).
        tracing::warn!(
            "slots of a client whose connection ended are kept until it has exited ({activity:?}, {:?})",
            held.peer
        );
        held.due = now + self.waits.running;
        false
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
    use kvdepot_depot::message::{HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response, decode, encode};
    use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
    use kvdepot_depot::{Depot, DepotConfig};

    use super::*;
    use crate::local::conversation::{converse, said_goodbye};

    /// Detects a hang of the test itself and does not measure speed.
    const HANG: Duration = Duration::from_secs(60);
    const BLOCK: u64 = 64 << 10;

    /// A process that exits when the test says so.
    #[derive(Debug)]
    struct Fake {
        exit: Option<OwnedFd>,
        activity: Activity,
    }

    /// A process that keeps running, and says that its copies have ended.
    #[derive(Debug)]
    struct Through(Arc<AtomicBool>, OwnedFd);

    impl Peer for Through {
        fn exit(&self) -> Option<BorrowedFd<'_>> {
            Some(self.1.as_fd())
        }

        fn activity(&self) -> Activity {
            Activity::Unknown
        }

        fn copies_ended(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }
    }

    impl Peer for Fake {
        fn exit(&self) -> Option<BorrowedFd<'_>> {
            self.exit.as_ref().map(AsFd::as_fd)
        }

        fn activity(&self) -> Activity {
            self.activity
        }
    }

    fn event() -> OwnedFd {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn depot() -> Depot {
        let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 64 * BLOCK, "timeout_ms": 10_000});
        Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap()
    }

    fn filling(depot: &Depot) -> u64 {
        let Response::Stats(text) = depot.session().handle(Request::Stats) else { panic!("no stats") };
        let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
        stats["pool_filling_bytes"].as_u64().unwrap()
    }

    fn pair() -> (SeqPacket, SeqPacket) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pair.sock");
        let listener = SeqPacket::listen(&path, 1).unwrap();
        let client = SeqPacket::connect(&path).unwrap();
        (client, SeqPacket::from_fd(rustix::net::accept(listener.as_fd()).unwrap()))
    }

    fn ask(client: &mut SeqPacket, request: &Request<'_>) -> Response {
        client.send(&encode(1, request).unwrap(), None).unwrap();
        let mut buffer = FrameBuffer::default();
        client.recv(&mut buffer, Some(Instant::now() + HANG)).unwrap();
        decode::<Response>(&buffer).unwrap().1.into_result().unwrap()
    }

    /// Reserves a block on a connection and lets the client do something; returns when the door is done with it.
    fn connection(
        depot: &Depot,
        quarantine: &Quarantine,
        block: u8,
        peer: Fake,
        end: impl FnOnce(SeqPacket),
    ) {
        let (mut client, server) = pair();
        std::thread::scope(|scope| {
            scope.spawn(|| converse(depot, depot.session(), server, peer, quarantine, &|| ()));
            ask(&mut client, &Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: 1 });
            let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
            let spec = NamespaceSpec::new("{\"model\":\"quarantine\"}", layout).unwrap();
            let open = Request::OpenNamespace { canonical: spec.canonical().into() };
            let Response::Namespace { handle, .. } = ask(&mut client, &open) else { panic!("not opened") };
            let hashes = Hashes(vec![block; 16].into());
            ask(&mut client, &Request::Reserve { namespace: handle, hashes, priority: Priority::Normal });
            end(client);
        });
    }

    fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
        let end = Instant::now() + HANG;
        while !holds() {
            assert!(Instant::now() < end, "{what} did not come true");
            std::thread::yield_now();
        }
    }

    fn start(running: Duration, unwatched: Duration) -> Quarantine {
        Quarantine::start(Waits { unwatched, running }).unwrap()
    }

    #[test]
    fn slots_of_killed_clients_are_kept_until_they_have_exited() {
        let (depot, quarantine) = (depot(), start(HANG * 60, Duration::ZERO));
        let exits: Vec<OwnedFd> = (0..20).map(|_| event()).collect();
        for (block, exit) in exits.iter().enumerate() {
            let peer = Fake { exit: Some(exit.try_clone().unwrap()), activity: Activity::Exiting };
            connection(&depot, &quarantine, block as u8, peer, drop);
            assert_eq!(filling(&depot), (block as u64 + 1) * BLOCK, "given away while a device may write it");
        }
        // In any order, each independently.
        for (left, exit) in exits.iter().rev().enumerate().map(|(ended, exit)| (19 - ended as u64, exit)) {
            rustix::io::write(exit, &1u64.to_le_bytes()).unwrap();
            eventually("the slot of a process that has exited is free", || filling(&depot) == left * BLOCK);
        }
    }

    #[test]
    fn slots_of_a_client_that_says_goodbye_are_free_at_once() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        let peer = Fake { exit: Some(event()), activity: Activity::Running };
        connection(&depot, &quarantine, 1, peer, |client| {
            client.send(&encode(2, &Request::Goodbye).unwrap(), None).unwrap();
            // The connection is over although the descriptor is open, as in a forked child.
            let mut client = client;
            assert!(client.recv(&mut FrameBuffer::default(), Some(Instant::now() + HANG)).is_err());
        });
        assert_eq!(filling(&depot), 0);
    }

    /// As after a timeout: the client closes while the door cannot send its answers.
    #[test]
    fn slots_of_a_client_that_gives_up_on_answers_are_free_at_once() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        let peer = Fake { exit: Some(event()), activity: Activity::Running };
        connection(&depot, &quarantine, 1, peer, |client| {
            // More answers than the socket's buffers hold, so one of them is being sent when the client closes.
            for _ in 0..250 {
                client.send(&encode(2, &Request::Stats).unwrap(), None).unwrap();
            }
            client.send(&encode(3, &Request::Goodbye).unwrap(), None).unwrap();
        });
        assert_eq!(filling(&depot), 0);
    }

    #[test]
    fn a_goodbye_behind_an_answer_that_nobody_took_is_found() {
        let stats = encode(1, &Request::Stats).unwrap();
        let goodbye = encode(2, &Request::Goodbye).unwrap();
        for (frames, expected) in [(vec![&stats, &goodbye], true), (vec![&stats], false), (vec![], false)] {
            for answers in [0, 1] {
                let (client, mut server) = pair();
                // A client that closes with unread answers resets the connection.
                (0..answers).for_each(|_| server.send(b"answer", None).unwrap());
                frames.iter().for_each(|frame| client.send(frame, None).unwrap());
                drop(client);
                assert_eq!(said_goodbye(&mut server), expected, "{} frames", frames.len());
            }
        }
    }

    #[test]
    fn slots_are_free_after_a_while_when_the_exit_cannot_be_watched() {
        let (depot, quarantine) = (depot(), start(HANG * 60, Duration::from_millis(1)));
        connection(&depot, &quarantine, 1, Fake { exit: None, activity: Activity::Unknown }, drop);
        eventually("the slot is free", || filling(&depot) == 0);
        let late = start(HANG * 60, HANG * 60);
        connection(&depot, &late, 2, Fake { exit: None, activity: Activity::Unknown }, drop);
        assert_eq!(filling(&depot), BLOCK, "not before");
        drop(late);
        assert_eq!(filling(&depot), 0);
    }

    #[test]
    fn only_a_process_that_goes_on_running_is_not_waited_for() {
        let quarantine = start(HANG, HANG);
        for (activity, given_up) in
            [(Activity::Running, true), (Activity::Exiting, false), (Activity::Unknown, false)]
        {
            let now = Instant::now();
            let peer = Box::new(Fake { exit: Some(event()), activity });
            let mut held = Held { session: depot().session(), peer, due: now };
            assert_eq!(quarantine.shared.is_given_up(&mut held, now), given_up, "{activity:?}");
            assert_eq!(held.due > now, !given_up, "{activity:?} is looked at again");
        }
        let (depot, quarantine) = (depot(), start(Duration::from_millis(1), HANG * 60));
        let peer = Fake { exit: Some(event()), activity: Activity::Running };
        connection(&depot, &quarantine, 1, peer, drop);
        eventually("the slot is free", || filling(&depot) == 0);
    }

    #[test]
    fn a_session_without_leases_is_not_kept() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        let (client, server) = pair();
        drop(client);
        converse(
            &depot,
            depot.session(),
            server,
            Fake { exit: Some(event()), activity: Activity::Running },
            &quarantine,
            &|| (),
        );
        assert_eq!(quarantine.shared.state.lock().count, 0);
    }

    /// A client of a crashed depot continues with the next one.
    #[test]
    fn who_says_that_its_copies_have_ended_does_not_count_any_more() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        let said = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let peers = said.iter().map(|said| Box::new(Through(Arc::clone(said), event())) as Box<dyn Peer>);
        quarantine.hold_all(peers.map(|peer| (depot.session(), peer)));
        let count = || quarantine.shared.state.lock().count;
        assert_eq!(count(), 2);
        said[1].store(true, Ordering::Release);
        quarantine.look_again();
        eventually("one is let go", || count() == 1);
        said[0].store(true, Ordering::Release);
        quarantine.look_again();
        eventually("the other is let go", || count() == 0);
    }

    /// The message arrived before the thread had the session, and its wake-up was lost.
    #[test]
    fn who_has_said_so_before_it_is_held_is_let_go() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        let said = Arc::new(AtomicBool::new(true));
        quarantine.hold(depot.session(), Box::new(Through(said, event())));
        eventually("it is let go", || quarantine.shared.state.lock().count == 0);
    }

    #[test]
    fn a_full_quarantine_makes_connections_wait_until_the_door_closes() {
        let (depot, quarantine) = (depot(), start(HANG * 60, HANG * 60));
        quarantine.shared.state.lock().count = QUARANTINED_CONNECTIONS_MAX;
        std::thread::scope(|scope| {
            let peer = Box::new(Fake { exit: Some(event()), activity: Activity::Running });
            let waiting = scope.spawn(|| quarantine.hold(depot.session(), peer));
            assert!(!waiting.is_finished());
            quarantine.close();
        });
        assert_eq!(quarantine.shared.state.lock().count, QUARANTINED_CONNECTIONS_MAX + 1);
    }
}
