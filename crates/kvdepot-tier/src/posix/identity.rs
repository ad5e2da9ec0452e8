//! Names for temporary files that tell anyone whether their writer is still alive (P4).

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A process as temporary names spell it: `<host>-<pid>-<start time>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Host name, boot and pid namespace: containers that share a host name do not share process ids.
    pub(super) host: String,
    pub(super) pid: u32,
    /// Clock ticks from boot to the start of the process: they differ if a pid is reused.
    pub(super) start_time: u64,
}

/// Prefix of every temporary name.
pub(super) const TEMPORARY_PREFIX: &str = ".tmp-";

/// Returns a name for a temporary file that nothing else in this process uses. Several of its tiers may share a directory,
/// and whose file a name is decides which of them has written the next version of the ledger.
pub(super) fn temporary_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: only uniqueness counts.
    Identity::own().temporary_name(NEXT.fetch_add(1, Ordering::Relaxed))
}

thread_local! {
    /// The process that this thread last belonged to: a fork moves its copy of the thread to another one. Not a lock, which
    /// could be held by another thread while the process forks.
    static OWN: RefCell<Option<Arc<Identity>>> = const { RefCell::new(None) };
}

impl Identity {
    /// This process. A forked child is another one than its parent.
    pub(super) fn own() -> Arc<Self> {
        let pid = std::process::id();
        OWN.with_borrow_mut(|own| {
            if let Some(own) = own.as_ref().filter(|own| own.pid == pid) {
                return Arc::clone(own);
            }
            let new = Arc::new(Self { host: own_host(), pid, start_time: start_time(pid).unwrap_or(0) });
            Arc::clone(own.insert(new))
        })
    }

    /// The name of this process's `n`-th temporary file.
    fn temporary_name(&self, n: u64) -> String {
        format!("{TEMPORARY_PREFIX}{}-{}-{}-{n}", self.host, self.pid, self.start_time)
    }

    /// The writer named by a temporary name; `None` if it is not such a name.
    pub(super) fn of_temporary(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix(TEMPORARY_PREFIX)?.rsplitn(4, '-');
        let _n: u64 = parts.next()?.parse().ok()?;
        let start_time = parts.next()?.parse().ok()?;
        let pid = parts.next()?.parse().ok()?;
        Some(Self { host: parts.next()?.to_owned(), pid, start_time })
    }

    /// Returns whether the process is alive; `None` if it cannot be seen from here.
    pub(super) fn is_alive(&self) -> Option<bool> {
        if self.host != Self::own().host {
            return None;
        }
        Some(start_time(self.pid) == Some(self.start_time))
    }
}

/// The short host name that people know.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

fn own_host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
    let keep = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
    let host: String = host_name().chars().take(64).map(keep).collect();
    format!("{host}.{boot}.{digits}")
}

/// Field 22 of `/proc/<pid>/stat`; the command in field 2 may contain anything, so count from its last parenthesis.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after = &stat[stat.rfind(')')? + 1..];
    let mut fields = after.split_ascii_whitespace();
    // A zombie has ended and writes no more, once its last thread has: one may wait for a disk.
    if matches!(fields.next()?, "Z" | "X")
        && std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count) < 2
    {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_their_writer() {
        let own = Identity::own();
        assert!(own.start_time > 0);
        let name = own.temporary_name(7);
        assert_eq!(Identity::of_temporary(&name).as_ref(), Some(&*own));
        assert_eq!(own.is_alive(), Some(true));
        let other = Identity { start_time: own.start_time + 1, ..(*own).clone() };
        assert_eq!(other.is_alive(), Some(false));
        let foreign = Identity { host: "elsewhere".to_owned(), ..(*own).clone() };
        assert_eq!(foreign.is_alive(), None);
        for name in ["", ".tmp-", ".tmp-a-b-c-d", "x.kvb", ".tmp-1-2-3"] {
            assert_eq!(Identity::of_temporary(name), None, "{name}");
        }
    }
}
