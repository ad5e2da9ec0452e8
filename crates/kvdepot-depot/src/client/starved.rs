//! Distinguishes a depot that is slow because it gets no processor from one that hangs.

use std::path::Path;

use rustix::process::Pid;

/// Returns whether one of the process's threads runs or waits for a processor. `false` for a process that hangs, is
/// stopped or has ended, and for one that is not visible from here (in another container).
pub(crate) fn is_runnable(process: Pid) -> bool {
    let tasks = Path::new("/proc").join(process.as_raw_nonzero().to_string()).join("task");
    let Ok(tasks) = std::fs::read_dir(tasks) else { return false };
    tasks.flatten().any(|task| {
        std::fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| state(&stat) == Some('R'))
    })
}

/// Returns the state in a line of `/proc/*/stat`. It follows the name, which can contain anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap()
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !is_so() {
            assert!(std::time::Instant::now() < end, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_name_may_hold_anything() {
        assert_eq!(state("12 (a) S (b) R 1 2"), Some('R'));
        assert_eq!(state("12 (kvdepot) S 1 2"), Some('S'));
        assert_eq!(state("12"), None);
    }

    #[test]
    fn who_computes_is_runnable_and_who_waits_or_is_gone_is_not() {
        let mut busy = shell("while :; do :; done");
        let mut idle = shell("read line");
        let pid = |child: &Child| Pid::from_child(child);
        eventually("busy", || is_runnable(pid(&busy)));
        // Its shell has to start first.
        eventually("idle", || !is_runnable(pid(&idle)));
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(!is_runnable(pid(&busy)));
        idle.kill().unwrap();
        idle.wait().unwrap();
    }
}
