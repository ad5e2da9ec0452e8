//! P1: a process killed with -9 at any moment leaves on its medium everything that was acknowledged and no half-written
//! block.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_io::mapped::Access;
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{DaxConfig, DaxTier, Tier};

const CHILD: &str = "KVDEPOT_TEST_DAX_CRASH";
const MAPPED: &str = "KVDEPOT_TEST_DAX_CRASH_MAPPED";
/// Fewer than fit on the medium: nothing is evicted.
const BLOCKS: u64 = 4000;
const HANG: Duration = Duration::from_secs(60);

fn open(path: &Path, access: Access) -> Arc<DaxTier> {
    // Without flushes: the system does not die with the process.
    let config =
        DaxConfig { access, async_put: true, open_wait: HANG, lock_wait: HANG, ..DaxConfig::new(path) };
    Arc::new(DaxTier::open(config).unwrap())
}

/// Not a test itself: the process that the test below kills. It writes and reports its progress.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let access = if std::env::var(MAPPED).is_ok() { Access::Mapped } else { Access::Auto };
    let tier = open(path.as_ref(), access);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let first = tier.usage().blocks;
    for first in (first..BLOCKS).step_by(8) {
        let writes: Vec<_> =
            (first..first + 8).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
        for write in &writes {
            Bench::answer(write).unwrap();
        }
        println!("written {}", first + 8);
    }
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[test]
fn killed_while_writing() {
    for access in [Access::Auto, Access::Mapped] {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().set_len(64 << 20).unwrap();
        let mut acknowledged = 0;
        for round in 1..=4 {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["child", "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, file.path());
            if access == Access::Mapped {
                command.env(MAPPED, "1");
            }
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut written =
                lines.filter_map(|line| line.unwrap().strip_prefix("written ")?.parse::<u64>().ok());
            // Each round is killed a little later, always in the middle of further writes.
            acknowledged = written.by_ref().find(|&count| count >= acknowledged + 8 * round).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            let tier = open(file.path(), access);
            let bench = Bench::new(Arc::clone(&tier) as _);
            let listed = tier.keys(bench.spec.id(bench.epoch)).len() as u64;
            assert!(listed >= acknowledged, "{access:?}, round {round}: {listed} of {acknowledged}");
            assert!((0..acknowledged).all(|n| bench.read_is_right(n)), "{access:?}, round {round}");
            let right = (0..BLOCKS + 8).filter(|n| bench.read_is_right(*n)).count() as u64;
            assert_eq!(right, listed, "{access:?}, round {round}: every listed block reads right");
            // The kill may have left a gap among the last blocks: the child continues after what is listed.
            assert!((0..listed.next_multiple_of(8)).all(|n| bench.write(n).is_ok()));
            acknowledged = listed.next_multiple_of(8);
            drop((bench, tier));
        }
    }
}
