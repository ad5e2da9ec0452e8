//! A process that writes blocks until it is killed, and its parent.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use kvdepot_tier::conformance::Bench;

/// Blocks that are written at once.
const BATCH: u64 = 8;

/// Writes blocks in batches and reports each one. `acknowledged` is told of it before, with the number of blocks.
pub(crate) fn write(bench: &Bench, blocks: std::ops::Range<u64>, acknowledged: impl Fn(u64)) {
    for first in blocks.step_by(BATCH as usize) {
        let writes: Vec<_> =
            (first..first + BATCH).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
        for write in &writes {
            Bench::answer(write).unwrap();
        }
        acknowledged(first + BATCH);
        println!("written {}", first + BATCH);
    }
}

/// Runs a test of this program with these variables, and kills it when it has reported more than `before` blocks: each round
/// a little later, always in the middle of further writes. Returns what it had reported.
pub(crate) fn kill(test: &str, variables: &[(&str, &OsStr)], before: u64, round: u64) -> u64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut written = lines.filter_map(|line| line.unwrap().strip_prefix("written ")?.parse::<u64>().ok());
    let reported = written.by_ref().find(|&count| count >= before + BATCH * round).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    reported
}
