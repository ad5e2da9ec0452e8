//! The choice of the adapter, and the errors when something is missing.

use std::fs::create_dir_all;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use kvdepot_core::ErrorKind;
use kvdepot_verbs::Verbs;
use tempfile::TempDir;

use crate::cuda::bench::{self, BenchConfig};
use crate::cuda::tests::whole::bench_config;
use crate::gdr::attach::engine_for;
use crate::gdr::choice::nearest;
use crate::gdr::config::{GdrConfig, UseGdr, parse_nics};
use crate::gdr::engine::GdrEngine;
use crate::gdr::mutation::Mutation;
use crate::gdr::tests::rig::Lab;
use crate::{CopyEngine, HostEngine};

/// A machine with two roots: a GPU and one adapter behind a switch of the first, one adapter beside the switch, and one
/// on the second root.
fn sysfs(gpu: &str) -> TempDir {
    let root = TempDir::new().unwrap();
    let functions = [
        (format!("pci0000:00/0000:00:01.0/0000:01:00.0/{gpu}"), "bus/pci/devices", gpu.to_owned()),
        ("pci0000:80/0000:80:01.0/0000:81:00.0".into(), "class/infiniband", "standin0".into()),
        ("pci0000:00/0000:00:02.0/0000:05:00.0".into(), "class/infiniband", "standin1".into()),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:09:00.0".into(), "class/infiniband", "standin2".into()),
    ];
    for (place, class, name) in functions {
        let place = root.path().join("devices").join(place);
        create_dir_all(&place).unwrap();
        let entry = root.path().join(class).join(&name);
        if class == "class/infiniband" {
            create_dir_all(&entry).unwrap();
            symlink(&place, entry.join("device")).unwrap();
        } else {
            create_dir_all(entry.parent().unwrap()).unwrap();
            symlink(&place, entry).unwrap();
        }
    }
    root
}

fn lab_of_three(root: &Path) -> Lab {
    let lab = Lab::new();
    lab.standin.set("devices", 3);
    lab.standin.set_sysfs(&root.join("class/infiniband"));
    lab
}

#[test]
fn the_nearest_adapter_on_the_bus_is_taken() {
    let root = sysfs("0000:0a:00.0");
    let lab = lab_of_three(root.path());
    let nics = nearest(&lab.verbs.devices().unwrap(), root.path(), "0000:0A:00.0");
    let order: Vec<_> = nics.iter().map(|nic| (nic.name.as_str(), nic.bus_steps)).collect();
    assert_eq!(order, [("standin2", Some(2)), ("standin1", Some(5)), ("standin0", None)]);
}

#[test]
fn an_engine_takes_the_nearest_or_the_one_that_is_named() {
    let lab = Lab::new();
    let root = sysfs(&format!("0000:{:02x}:00.0", lab.rig.device + 1));
    lab.standin.set("devices", 3);
    lab.standin.set_sysfs(&root.path().join("class/infiniband"));
    let session = lab.rig.session(1);
    let config = GdrConfig { sysfs: root.path().to_owned(), ..lab.config() };
    let engine = GdrEngine::attach(lab.rig.driver, &lab.verbs, &config).unwrap();
    assert_eq!(engine.nic(), "standin2");
    drop(engine);
    // Without a cable it leads nowhere.
    lab.standin.set("ports_down", 1 << 2);
    let engine = GdrEngine::attach(lab.rig.driver, &lab.verbs, &config).unwrap();
    assert_eq!(engine.nic(), "standin1");
    drop(engine);
    lab.standin.set("ports_down", 0);
    let mut nics = vec!["standin0".to_owned(); lab.rig.device as usize];
    nics.push("standin1".into());
    let named = GdrConfig { nics: nics.clone(), ..config.clone() };
    assert_eq!(GdrEngine::attach(lab.rig.driver, &lab.verbs, &named).unwrap().nic(), "standin1");
    nics.pop();
    if !nics.is_empty() {
        let short = GdrConfig { nics, ..config };
        let text = GdrEngine::attach(lab.rig.driver, &lab.verbs, &short).unwrap_err().to_string();
        assert!(text.contains("DEVICE_GDR_NICS"), "{text}");
    }
    lab.end(session).unwrap();
}

#[test]
fn the_environment_lists_adapters() {
    assert_eq!(parse_nics(" mlx5_0, mlx5_3 ,"), ["mlx5_0", "mlx5_3"]);
    assert!(parse_nics("").is_empty());
}

fn without() -> kvdepot_core::Result<Arc<dyn CopyEngine>> {
    Ok(Arc::new(HostEngine::new(1)?))
}

/// The four cases of the switch: with or without an adapter, requested or not.
#[test]
fn the_switch_does_what_it_says() {
    let lab = Lab::new();
    let session = lab.session(1);
    let with = || GdrEngine::attach(lab.rig.driver, &lab.verbs, &lab.config());
    let missing = || {
        let verbs = Verbs::load_from(Path::new("/nowhere/libibverbs.so.1"))?;
        GdrEngine::attach(lab.rig.driver, &verbs, &lab.config())
    };
    assert_eq!(engine_for(UseGdr::No, missing, without).unwrap().name(), "host");
    let error = engine_for(UseGdr::Yes, missing, without).unwrap_err();
    assert!(
        error.to_string().contains("libibverbs was not found") && error.to_string().contains("use_gdr=true")
    );
    assert_eq!(engine_for(UseGdr::No, with, without).unwrap().name(), "host");
    assert_eq!(engine_for(UseGdr::Yes, with, without).unwrap().name(), "gdr");
    assert_eq!(engine_for(UseGdr::Auto, missing, without).unwrap().name(), "host");
    assert_eq!(engine_for(UseGdr::Auto, with, without).unwrap().name(), "gdr");
    lab.end(session).unwrap();
}

/// Each missing thing has its own error.
#[test]
fn what_is_missing_is_named() {
    type Break = fn(&Lab);
    let cases: [(Break, ErrorKind, &str); 4] = [
        (|lab| lab.standin.set("devices", 0), ErrorKind::Unavailable, "there is no RDMA device"),
        (|lab| lab.standin.set("port_state", 1), ErrorKind::Unavailable, "no port of the RDMA device is up"),
        (|lab| lab.standin.set("peer_offset", 0), ErrorKind::Unsupported, "peer memory support is missing"),
        (
            |lab| lab.standin.fail("ibv_get_device_list", 0, 1, libc::ENOSYS),
            ErrorKind::Unavailable,
            "the kernel has no RDMA support",
        ),
    ];
    for (spoil, kind, words) in cases {
        let lab = Lab::new();
        // An even seed: no dma-buf, so peer memory decides.
        let session = lab.session(2);
        spoil(&lab);
        let error = GdrEngine::attach_with(lab.rig.driver, &lab.verbs, &lab.config(), Mutation::default())
            .unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        lab.end(session).unwrap();
    }
}

/// The benchmark measures this engine like the others if it can be opened.
#[test]
fn the_bench_has_rows_for_an_adapter() {
    let lab = Lab::new();
    let session = lab.session(1);
    let config = BenchConfig {
        verbs_library: Some(lab.standin.path().to_owned()),
        gdr: lab.config(),
        ..bench_config(&session)
    };
    let result = bench::run(lab.rig.driver, &config, |_| ()).unwrap();
    assert!(result.missing.is_empty(), "{:?}", result.missing);
    let rows: Vec<_> = result.rows.iter().filter(|row| row.engine == "gdr").collect();
    assert_eq!(rows.iter().map(|row| row.op_bytes).collect::<Vec<_>>(), config.op_bytes);
    for row in rows {
        let rates = [row.load_gb_per_s, row.dump_gb_per_s, row.both_gb_per_s];
        assert!(rates.iter().all(|&rate| rate > 0.0), "{row:?}");
        // Measured beside the decoding kernel, whatever the stand-in makes of that.
        assert!(
            row.decode_slowdown_by_load.is_finite() && row.decode_slowdown_by_dump.is_finite(),
            "{row:?}"
        );
    }
    lab.end(session).unwrap();
}
