//! The Mooncake tier over Mooncake itself: its master and holders of memory, as processes, over TCP.
//!
//! `KVDEPOT_TEST_MOONCAKE` names an environment with Mooncake's package (`make test-mooncake` makes one).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::Cell;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{self, Bench, Waiting};
use kvdepot_tier::{Guarded, MooncakeConfig, MooncakeTier, Tier};

/// A process that holds memory of the store.
const HOLDER: &str = "import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
while store.setup('127.0.0.1', 'P2PHANDSHAKE', 256 << 20, 16 << 20, 'tcp', '', sys.argv[1]) != 0:
    time.sleep(0.2)
print('up', flush=True)
sys.stdin.read()";

struct Cluster {
    environment: PathBuf,
    directory: tempfile::TempDir,
    address: SocketAddr,
    metrics_port: u16,
    master: Child,
    holders: Vec<Child>,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

impl Cluster {
    fn start(holders: usize) -> Self {
        let environment =
            std::env::var_os("KVDEPOT_TEST_MOONCAKE").expect("KVDEPOT_TEST_MOONCAKE names an environment");
        let environment = PathBuf::from(environment);
        let directory = tempfile::tempdir().unwrap();
        // Another process may take a port between the question and the start: then others are tried.
        let started = (0..20).find_map(|_| {
            let (address, metrics_port) = (SocketAddr::from(([127, 0, 0, 1], free_port())), free_port());
            Some((address, metrics_port, Self::start_master(&environment, address, metrics_port)?))
        });
        let (address, metrics_port, master) = started.expect("a master starts");
        let config = serde_json::json!({
            "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": "",
            "master_server_address": address.to_string(), "global_segment_size": 0, "local_buffer_size": "16mb",
        });
        fs::write(directory.path().join("mooncake.json"), config.to_string()).unwrap();
        let mut cluster = Self { environment, directory, address, metrics_port, master, holders: Vec::new() };
        (0..holders).for_each(|_| cluster.add_holder());
        cluster
    }

    /// Returns `None` if a port was taken.
    fn start_master(environment: &std::path::Path, address: SocketAddr, metrics_port: u16) -> Option<Child> {
        let mut master = Command::new(environment.join("bin/mooncake_master"))
            .arg(format!("--rpc_port={}", address.port()))
            .arg(format!("--metrics_port={metrics_port}"))
            // With leases of the default, 10 s, a removal would be busy for so long. A shorter one ends amid a slow read.
            .args(["--rpc_address=127.0.0.1", "--default_kv_lease_ttl=500"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the environment has Mooncake's master");
        let end = Bench::soon();
        while TcpStream::connect(address).is_err() {
            if master.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(Instant::now() < end, "the master listens");
            std::thread::sleep(Duration::from_millis(50));
        }
        // It ends when another one answered at the port.
        std::thread::sleep(Duration::from_millis(200));
        master.try_wait().unwrap().is_none().then_some(master)
    }

    fn add_holder(&mut self) {
        let mut holder = Command::new(self.environment.join("bin/python"))
            .args(["-c", HOLDER, &self.address.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut up).expect("a holder comes up");
        self.holders.push(holder);
    }

    fn kill_holder(&mut self) {
        kill(self.holders.remove(0));
    }

    fn restart_master(&mut self) {
        let end = Bench::soon();
        self.master = loop {
            if let Some(master) = Self::start_master(&self.environment, self.address, self.metrics_port) {
                break master;
            }
            assert!(Instant::now() < end, "the master starts again");
        };
    }

    fn config(&self, prefix: &str) -> MooncakeConfig {
        let hour = Duration::from_secs(3600);
        MooncakeConfig {
            config_path: Some(self.directory.path().join("mooncake.json").to_str().unwrap().to_owned()),
            python: self.environment.join("bin/python").to_str().unwrap().to_owned(),
            prefix: prefix.to_owned(),
            timeout: Duration::from_secs(30),
            staging_bytes: 64 << 20,
            present_ttl: hour,
            absent_ttl: hour,
            ..MooncakeConfig::default()
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.holders.iter_mut().chain([&mut self.master]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
#[ignore = "needs Mooncake: make test-mooncake"]
fn the_suite_of_all_tiers() {
    let (cluster, count) = (Cluster::start(1), Cell::new(0));
    conformance::check(&|| {
        count.set(count.get() + 1);
        let config = cluster.config(&format!("kv{}", count.get()));
        Arc::new(MooncakeTier::open(config).unwrap()) as Arc<dyn Tier>
    });
    conformance::check_persistent(&|| Arc::new(MooncakeTier::open(cluster.config("kept")).unwrap()));
}

/// Two depots write and read while a holder of half of the blocks and then the master are killed and started again.
#[test]
#[ignore = "needs Mooncake: make test-mooncake"]
fn two_depots_survive_the_death_of_holders_and_of_the_master() {
    let mut cluster = Cluster::start(2);
    let layout = BlockLayout::new(vec![vec![300_000]]).unwrap();
    let depot = || {
        let short = Duration::from_millis(50);
        let config = MooncakeConfig {
            timeout: Duration::from_secs(5),
            present_ttl: short,
            absent_ttl: short,
            ..cluster.config("shared")
        };
        let tier = Guarded::new(MooncakeTier::open(config).unwrap(), kvdepot_tier::GuardConfig::default());
        Bench::with(Arc::new(tier), conformance::spec("shared", layout.clone()))
    };
    let depots = [depot(), depot()];
    depots[0].write_all(20);
    assert!((0..20).all(|n| depots[1].read_is_right(n)), "what one depot stored, the other one finds");
    let (is_over, next, hits) = (AtomicBool::new(false), AtomicU64::new(20), AtomicU64::new(0));
    // Whether a block written by one depot from now on can be read by the other one.
    let works = || {
        let n = next.fetch_add(1, Ordering::Relaxed);
        depots[0].write(n).is_ok() && depots[1].read_is_right(n)
    };
    let until_it_works = |what: &str| {
        let end = Instant::now() + Duration::from_secs(180);
        while !works() {
            assert!(Instant::now() < end, "no block comes through: {what}");
            // Looks at the namespace's epoch, as a depot does now and then.
            for depot in &depots {
                let _ = depot.tier.open_and_wait(&depot.spec, 0);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    std::thread::scope(|scope| {
        for depot in &depots {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let last = next.fetch_add(1, Ordering::Relaxed);
                    // Ends in any case (P2), and with the right bytes if with any (P1).
                    let _ = depot.write(last);
                    for n in [last, last / 2, last % 20] {
                        hits.fetch_add(depot.read_is_right(n).into(), Ordering::Relaxed);
                    }
                }
            });
        }
        until_it_works("at first");
        // Slow threads may have read nothing yet.
        let end = Bench::soon();
        while hits.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < end, "the traffic has hits before anything is killed");
            std::thread::sleep(Duration::from_millis(50));
        }
        cluster.kill_holder();
        until_it_works("with one of two holders");
        cluster.add_holder();
        until_it_works("with another holder");
        cluster.master.kill().unwrap();
        cluster.master.wait().unwrap();
        for n in 0..3 {
            let _ = depots[0].write(1_000_000 + n);
        }
        cluster.restart_master();
        until_it_works("with another master");
        is_over.store(true, Ordering::Relaxed);
    });
}

/// `mooncake_replicas: 2`: each block is on both holders, so the death of one loses none.
#[test]
#[ignore = "needs Mooncake: make test-mooncake"]
fn replicas_survive_the_death_of_a_holder() {
    const BLOCKS: u64 = 40;
    let mut cluster = Cluster::start(2);
    let layout = BlockLayout::new(vec![vec![300_000]]).unwrap();
    let depot = |cluster: &Cluster, prefix: &str, replicas| {
        let config = MooncakeConfig { replicas, ..cluster.config(prefix) };
        let tier = MooncakeTier::open(config).unwrap();
        Bench::with(Arc::new(tier), conformance::spec("replicas", layout.clone()))
    };
    let (once, twice) = (depot(&cluster, "once", 1), depot(&cluster, "twice", 2));
    once.write_all(BLOCKS);
    twice.write_all(BLOCKS);
    cluster.kill_holder();
    let count = |bench: &Bench| (0..BLOCKS).filter(|n| bench.read_is_right(*n)).count() as u64;
    // Until the master notices that the holder is gone, it sends readers there, too.
    let end = Instant::now() + Duration::from_secs(180);
    while count(&twice) < BLOCKS {
        assert!(Instant::now() < end, "{} of {BLOCKS} blocks with two replicas are left", count(&twice));
    }
    let left = count(&once);
    assert!(left > 0 && left < BLOCKS, "{left} of {BLOCKS} blocks with one replica are left");
    // A depot that starts now finds them, too: the record of the epoch has replicas of its own.
    assert_eq!(count(&depot(&cluster, "twice", 2)), BLOCKS);
}

#[test]
#[ignore = "needs Mooncake: make test-mooncake"]
fn a_setup_that_fails_is_told_and_tried_again() {
    let mut cluster = Cluster::start(1);
    cluster.master.kill().unwrap();
    cluster.master.wait().unwrap();
    let tier: Arc<dyn Tier> = Arc::new(MooncakeTier::open(cluster.config("late")).unwrap());
    let end = Bench::soon();
    let reason = loop {
        if let Some(reason) = tier.servers()[0].last_error.clone() {
            break reason;
        }
        assert!(Instant::now() < end, "the helper reports that there is no master");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(reason.contains(&cluster.address.to_string()), "{reason}");
    cluster.restart_master();
    let end = Bench::soon();
    while !tier.servers()[0].up {
        assert!(Instant::now() < end, "the helper connects");
        std::thread::sleep(Duration::from_millis(50));
    }
    let spec = || conformance::spec("late", BlockLayout::new(vec![vec![5000]]).unwrap());
    let end = Instant::now() + Duration::from_secs(120);
    while tier.open_and_wait(&spec(), 0).is_err() {
        // The store has no memory before the holder has mounted its own again.
        assert!(Instant::now() < end, "a namespace opens after the master has come up");
        std::thread::sleep(Duration::from_millis(50));
    }
    let bench = Bench::with(tier, spec());
    while bench.write(0).is_err() {
        // The holder mounts its memory again by itself.
        assert!(Instant::now() < end, "it works after the master has come up");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(bench.read_is_right(0));
}

#[test]
#[ignore = "needs Mooncake: make test-mooncake"]
fn an_interpreter_without_mooncake_is_told() {
    let mut config = MooncakeConfig { python: "/usr/bin/env".to_owned(), ..MooncakeConfig::default() };
    let tier = MooncakeTier::open(config.clone()).unwrap();
    let failed = |tier: &MooncakeTier| {
        let end = Bench::soon();
        while tier.servers()[0].failures == 0 {
            assert!(Instant::now() < end, "a helper that cannot start is counted");
            std::thread::sleep(Duration::from_millis(20));
        }
        let bench = conformance::spec("none", BlockLayout::new(vec![vec![5000]]).unwrap());
        let (send, receive) = std::sync::mpsc::channel();
        let soon = Instant::now() + Duration::from_millis(10);
        tier.open_namespace(&Arc::new(bench), 0, soon, Box::new(move |outcome| drop(send.send(outcome))));
        receive.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err()
    };
    assert!(matches!(failed(&tier).kind(), ErrorKind::Unavailable | ErrorKind::Timeout));
    config.python = "/no/such/python".to_owned();
    let tier = MooncakeTier::open(config).unwrap();
    failed(&tier);
    let reason = tier.servers()[0].last_error.clone().unwrap();
    assert!(reason.contains("mooncake_python") && reason.contains("/no/such/python"), "{reason}");
}
