//! The thread that works while nothing polls: for waiters, for other processes, and in eager mode always.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::state::{self, State};

/// Number of steps between two checks of sockets and other threads.
const STEPS_MAX: usize = 16;
/// Interval for checking peers that are not ready or may have died.
const LOOK_AGAIN_NS: i64 = 1_000_000;

/// Starts the thread, once.
pub(crate) fn start(state: &mut State) {
    if state.engine_started {
        return;
    }
    state.engine_started = true;
    // Detached: it ends with the process, like a device.
    let thread = std::thread::Builder::new().name("standin-verbs".to_owned()).spawn(run);
    thread.expect("a thread can be started");
}

fn run() {
    loop {
        let (busy, waiting, sockets) = turn();
        if busy {
            std::thread::yield_now();
            continue;
        }
        let mut fds = vec![PollFd::new(state::wake_fd(), PollFlags::IN)];
        fds.extend(sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
        let again = Timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN_NS };
        // After a failed poll it only checks too early.
        let _ = poll(&mut fds, waiting.then_some(&again));
        let _ = rustix::io::read(state::wake_fd().as_fd(), &mut [0u8; 8]);
    }
}

/// Works for a while. Returns whether there is more to do now, whether to check again soon, and the descriptors to wait
/// for.
fn turn() -> (bool, bool, Vec<OwnedFd>) {
    let mut state = state::lock();
    if state.config.hung {
        return (false, true, Vec::new());
    }
    let mut busy = state.receive_messages();
    let foreign = state.has_foreign_peers();
    if foreign {
        state.look_for_the_dead();
    }
    for _ in 0..STEPS_MAX {
        let wanted = !state.config.lazy || foreign || state.cqs.values().any(|cq| cq.armed.is_some());
        if !wanted || !state.step() {
            break;
        }
        busy = true;
    }
    let works = !state.config.lazy || foreign || state.cqs.values().any(|cq| cq.armed.is_some());
    let waiting = works
        && state
            .qps
            .values()
            .any(|qp| !qp.requests.is_empty() || !qp.inbound.is_empty() || !qp.answers.is_empty());
    // Duplicates, so that the descriptor of a queue pair destroyed in the meantime is not reused by another object.
    let sockets = if busy {
        Vec::new()
    } else {
        state.qps.values().filter_map(|qp| rustix::io::fcntl_dupfd_cloexec(&qp.socket, 3).ok()).collect()
    };
    (busy, waiting, sockets)
}
