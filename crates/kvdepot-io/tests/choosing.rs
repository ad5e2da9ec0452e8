//! P10 of the choice among I/O engines: an engine that the system lacks or forbids is replaced by an available one, and
//! one line says so.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;

use std::process::{Command, Stdio};
use std::sync::Arc;

use common::{Kind, Place, read_now, write_now};
use kvdepot_io::faults::Faults;
use kvdepot_io::kernel::{AioQueue, UringQueue};
use kvdepot_io::{Device, DirDevice, DirectUse, EngineKind, PsyncConfig, open_engine};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The system calls that the child of a test forbids itself.
const FORBID: &str = "KVDEPOT_TEST_FORBID";
/// The engine that the child requests.
const ASK: &str = "KVDEPOT_TEST_ENGINE";

/// Whether the child's memory outlives it.
const KEPT: &str = "KVDEPOT_TEST_KEPT";

/// Makes some system calls fail with EPERM in this thread and those that it starts, as in a container.
fn forbid(calls: &[libc::c_long]) {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The number of the system call is the first word of a filter's input.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (i, call) in calls.iter().enumerate() {
        let to_refusal = u8::try_from(calls.len() - i).unwrap();
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter.push(libc::sock_filter { code: equal as u16, jt: to_refusal, jf: 0, k: *call as u32 });
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    let program = libc::sock_fprog { len: u16::try_from(filter.len()).unwrap(), filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program during the call, which affects this thread only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Runs in a separate process, started by the tests below.
#[test]
#[ignore = "the child of other tests"]
fn child() {
    let Ok(forbidden) = std::env::var(FORBID) else { return };
    tracing_subscriber::fmt().with_writer(std::io::stdout).with_ansi(false).init();
    let number = |name: &str| {
        Some(match name {
            "io_uring" => libc::SYS_io_uring_setup,
            "aio" => libc::SYS_io_setup,
            "io_uring_enter" => libc::SYS_io_uring_enter,
            "descriptors" => return None,
            other => panic!("{other}"),
        })
    };
    let calls: Vec<libc::c_long> = forbidden.split_terminator(',').filter_map(number).collect();
    forbid(&calls);
    let refused = |error: std::io::Error| error.raw_os_error() == Some(libc::EPERM);
    let forbids = |name: &str| forbidden.split(',').any(|one| one == name);
    assert_eq!(UringQueue::new(8).is_err_and(refused), forbids("io_uring"));
    assert_eq!(AioQueue::new(8).is_err_and(refused), forbids("aio"));
    let asked = EngineKind::named(&std::env::var(ASK).unwrap()).unwrap();
    let place = Place::new(Kind::Psync, DirectUse::Always);
    let memory_outlives = std::env::var(KEPT).is_ok();
    let config = PsyncConfig { read_threads: 1, write_threads: 1, memory_outlives, ..PsyncConfig::default() };
    let device: Arc<dyn Device> = Arc::new(DirDevice::open(place.dir.path(), DirectUse::Always).unwrap());
    let limit = getrlimit(Resource::Nofile);
    if forbids("descriptors") {
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    }
    let engine = open_engine(asked, &config, &[device], None).unwrap();
    setrlimit(Resource::Nofile, limit).unwrap();
    write_now(&place, &*engine, 1, 300_000).unwrap();
    read_now(&place, &*engine, 1, 300_000).unwrap();
    println!("used {}", engine.name());
}

/// Returns the child's output for a requested engine when some are forbidden.
fn ask(engine: &str, forbidden: &str) -> Vec<String> {
    ask_from(&mut Command::new(std::env::current_exe().unwrap()), engine, forbidden)
}

fn ask_from(child: &mut Command, engine: &str, forbidden: &str) -> Vec<String> {
    let output = child
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(FORBID, forbidden)
        .env(ASK, engine)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    text.lines().map(str::to_owned).collect()
}

fn count(lines: &[String], part: &str) -> usize {
    lines.iter().filter(|line| line.contains(part)).count()
}

const FELL_BACK: &str = "the configured I/O engine cannot be used";

/// P4: reads of a killed process that are still in flight must not land in another process's blocks.
#[test]
fn memory_that_outlives_its_process_rules_io_uring_out_and_one_line_says_so() {
    let kept =
        |engine: &str| ask_from(Command::new(std::env::current_exe().unwrap()).env(KEPT, "1"), engine, "");
    let lines = kept("io_uring");
    assert_eq!((count(&lines, "used io_uring"), count(&lines, FELL_BACK)), (0, 1), "{lines:?}");
    assert_eq!(count(&lines, "io_uring is not used for a pool that outlives"), 1, "{lines:?}");
    assert_eq!(count(&lines, " WARN ") + count(&lines, "ERROR"), 1, "{lines:?}");
    if AioQueue::new(8).is_ok() {
        assert_eq!(count(&lines, "used aio"), 1, "{lines:?}");
    }
    let lines = kept("auto");
    assert_eq!(count(&lines, "used io_uring"), 0, "{lines:?}");
    let chosen: Vec<&String> = lines.iter().filter(|line| line.contains("I/O engine chosen")).collect();
    assert_eq!(chosen.len(), 1, "{lines:?}");
    assert!(
        !chosen[0].contains("by measurement") || chosen[0].contains("io_uring (pool_keep_s)"),
        "{chosen:?}"
    );
}

/// Otherwise a queue that can be made but not used would break at its first request, and so would its replacement.
#[test]
fn a_queue_that_cannot_be_used_is_found_out_at_the_start() {
    if UringQueue::new(8).is_err() || AioQueue::new(8).is_err() {
        return eprintln!("not tested: no io_uring or no aio here");
    }
    let lines = ask("io_uring", "io_uring_enter");
    assert_eq!((count(&lines, "used aio"), count(&lines, FELL_BACK)), (1, 1), "{lines:?}");
    assert_eq!(count(&lines, " WARN ") + count(&lines, "ERROR"), 1, "{lines:?}");
}

#[test]
fn without_room_for_descriptors_plain_calls_are_used() {
    for asked in ["io_uring", "aio"] {
        let lines = ask(asked, "descriptors");
        assert_eq!((count(&lines, "used psync"), count(&lines, FELL_BACK)), (1, 1), "{lines:?}");
    }
}

#[test]
fn forbidden_io_uring_is_replaced_by_aio_and_one_line_says_so() {
    if AioQueue::new(8).is_err() {
        return eprintln!("not tested: no aio here");
    }
    let lines = ask("io_uring", "io_uring");
    assert_eq!((count(&lines, "used aio"), count(&lines, FELL_BACK)), (1, 1), "{lines:?}");
    let line = lines.iter().find(|line| line.contains(FELL_BACK)).unwrap();
    let said = ["WARN", "asked=\"io_uring\"", "instead=\"aio\"", "Operation not permitted"];
    assert!(said.iter().all(|part| line.contains(part)), "{line}");
    assert_eq!(count(&lines, " WARN ") + count(&lines, "ERROR"), 1, "{lines:?}");
}

#[test]
fn where_both_are_forbidden_plain_calls_are_used_and_one_line_says_so() {
    for asked in ["io_uring", "aio"] {
        let lines = ask(asked, "io_uring,aio");
        assert_eq!((count(&lines, "used psync"), count(&lines, FELL_BACK)), (1, 1), "{lines:?}");
        assert_eq!(count(&lines, " WARN ") + count(&lines, "ERROR"), 1, "{lines:?}");
    }
}

#[test]
fn auto_measures_what_is_allowed_and_one_line_says_so() {
    let lines = ask("auto", "io_uring,aio");
    let chosen: Vec<&String> = lines.iter().filter(|line| line.contains("I/O engine chosen")).collect();
    assert_eq!((count(&lines, "used psync"), chosen.len()), (1, 1), "{lines:?}");
    if chosen[0].contains("by measurement") {
        assert!(chosen[0].contains("psync ") && chosen[0].contains("aio, io_uring"), "{chosen:?}");
    }
    let lines = ask("auto", "");
    assert_eq!((count(&lines, "I/O engine chosen"), count(&lines, "used ")), (1, 1), "{lines:?}");
}

#[test]
fn auto_leaves_nothing_behind_and_measures_nothing_without_o_direct() {
    let config = PsyncConfig { read_threads: 1, write_threads: 1, ..PsyncConfig::default() };
    for direct in [DirectUse::Never, DirectUse::Always] {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let device: Arc<dyn Device> = Arc::new(DirDevice::open(dir.path(), direct).unwrap());
        let faults = Faults::default();
        let engine = open_engine(EngineKind::Auto, &config, &[device], Some(&faults)).unwrap();
        assert!(direct == DirectUse::Always || engine.name() == "psync");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
