//! The operations for users: choosing, describing, measuring.

use std::time::Duration;

use crate::conformance::StreamDevice;
use crate::cuda::bench::{self, BenchConfig};
use crate::cuda::calibration::{self, Calibration};
use crate::cuda::context::Context;
use crate::cuda::describe::describe_with;
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::kernel::CopyKernel;
use crate::cuda::mutation::Mutation;
use crate::cuda::submit::{Method, Submitter};
use crate::cuda::tests::rig::{Rig, Session};
use crate::cuda::{DeviceSelector, device, measure};
use crate::{CopyEngine, Direction};

/// Small sizes, and no RDMA library.
pub(crate) fn bench_config(session: &Session) -> BenchConfig {
    BenchConfig {
        verbs_library: Some("/nowhere/libibverbs.so.1".into()),
        engine: session.config(Mode::Auto),
        op_bytes: vec![4 << 10, 64 << 10],
        transfer_bytes: 256 << 10,
        runs: 2,
        decode_bytes: 4096,
        decode_time: Duration::from_micros(10),
        ..BenchConfig::new(DeviceSelector::Ordinal(session.device))
    }
}

#[test]
fn the_bench_runs_to_its_end_and_says_what_its_figures_are_worth() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    let mut heard = 0;
    let result = bench::run(session.driver, &bench_config(&session), |_| heard += 1).unwrap();
    let engines: Vec<&str> = result.rows.iter().map(|row| row.engine.as_str()).collect();
    assert_eq!(engines, ["memcpy", "memcpy", "batch", "batch", "kernel", "kernel", "auto", "auto"]);
    assert_eq!(heard, 8);
    assert!(result.rows.iter().all(|row| row.load_gb_per_s > 0.0 && row.both_gb_per_s > 0.0));
    assert!(result.note.as_deref().is_some_and(|note| note.contains("say nothing")), "{:?}", result.note);
    let json = serde_json::to_value(&result).unwrap();
    assert_eq!(json["rows"][7]["engine"], "auto");
    assert!(result.to_string().contains("both GB/s"));
    // An engine that cannot start reports the reason that a store requesting it would get.
    let reason = &result.missing[0].reason;
    assert!(reason.contains("libibverbs was not found") && reason.contains("use_gdr=true"), "{reason}");
    assert_eq!(json["missing"][0]["engine"], "gdr");
    assert!(result.to_string().contains(&format!("gdr      not measured: {reason}")), "{result}");
    session.end().unwrap();
}

#[test]
fn the_bench_refuses_what_it_cannot_measure() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    for config in [
        BenchConfig { op_bytes: vec![3], ..bench_config(&session) },
        BenchConfig { runs: 0, ..bench_config(&session) },
        BenchConfig { transfer_bytes: 100, ..bench_config(&session) },
    ] {
        assert!(bench::run(session.driver, &config, |_| ()).is_err(), "{config:?}");
    }
    session.end().unwrap();
}

#[test]
fn the_bench_runs_on_a_device() {
    if let Some(rig) = Rig::real() {
        let config = BenchConfig::new(DeviceSelector::Ordinal(rig.device));
        println!("{}", bench::run(rig.driver, &config, |_| ()).unwrap());
    }
}

#[test]
fn measurements_are_kept_for_the_next_process() {
    let rig = Rig::standin(13_000);
    let dir = tempfile::tempdir().unwrap();
    let session = rig.session(1);
    let config = CudaConfig { cache_dir: Some(dir.path().join("cache")), ..session.config(Mode::Auto) };
    let engine = CudaEngine::attach(session.driver, &config).unwrap();
    let measured = engine.calibration().unwrap().clone();
    assert_eq!(measured.methods, [Method::Memcpy, Method::Batch, Method::Kernel]);
    assert!(measured.problem.is_none() && !measured.points.is_empty(), "{measured:?}");
    let kept =
        calibration::read(&calibration::file(&dir.path().join("cache"), &engine.device().uuid)).unwrap();
    assert_eq!(kept, measured);
    assert!(measured.to_string().contains("load  256 x     4 KiB: memcpy "), "{measured}");
    assert!(measured.measured_unix_s > 1_700_000_000, "{}", measured.measured_unix_s);
    // The description shows the choices of `auto`.
    let report = describe_with(rig.driver, Some(&dir.path().join("cache"))).unwrap();
    let choices = &report.devices[rig.device as usize].choices;
    assert_eq!(choices, &measured.choices());
    let first = &choices[0];
    assert!(first.to_device && first.gb_per_s.len() == 3, "{first:?}");
    assert_eq!(first.auto, measured.choose(Direction::ToDevice, first.op_bytes, first.ops, false));
    let large = choices.iter().filter(|choice| choice.op_bytes >= 28 << 10);
    assert!(large.into_iter().all(|choice| choice.auto_decoding != Method::Kernel), "{choices:?}");
    drop(engine);
    // The next engine of this process has them without the file.
    std::fs::remove_dir_all(dir.path().join("cache")).unwrap();
    let again = CudaEngine::attach(session.driver, &config).unwrap();
    assert_eq!(again.calibration(), Some(&measured));
    assert!(!dir.path().join("cache").exists());
    drop(again);
    session.end().unwrap();
}

#[test]
fn short_of_time_every_way_is_measured_or_none() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    let config = session.config(Mode::Auto);
    let context = Context::retain(session.driver, config.device.find(session.driver).unwrap()).unwrap();
    let kernel = CopyKernel::load(&context, config.kernel_blocks_max).ok();
    let submitter = Submitter { context, kernel, mutation: Mutation::default() };
    for (time_max, cells) in [(Duration::ZERO, 1), (Duration::from_millis(1), 1), (Duration::MAX / 4, 22)] {
        let measured = measure::all(&submitter, Calibration::empty(&submitter, &[]), time_max);
        let choices = measured.choices();
        assert!(choices.len() >= cells && measured.problem.is_none(), "{time_max:?}: {measured}");
        assert!(choices.iter().all(|choice| choice.gb_per_s.len() == 3), "{time_max:?}: {measured}");
        assert!(time_max != Duration::ZERO || choices.len() == 1, "{measured}");
    }
    drop(submitter);
    session.end().unwrap();
}

/// Neither a method that copies wrong bytes, however fast, nor a forbidden one is chosen.
#[test]
fn only_ways_that_were_tested_and_are_allowed_are_chosen() {
    let rig = Rig::standin(13_000);
    for (call, wrong) in [("cuMemcpyBatchAsync", Method::Batch), ("cuLaunchKernel", Method::Kernel)] {
        let session = rig.session(1);
        session.control.unwrap().corrupt(session.device, call);
        // Another number of blocks makes another calibration.
        let blocks = 3 + wrong as u32;
        let config = CudaConfig { kernel_blocks_max: blocks, ..session.config(Mode::Auto) };
        let engine = CudaEngine::attach(session.driver, &config).unwrap();
        let calibration = engine.calibration().unwrap();
        let distrusted: Vec<Method> = calibration.distrusted.iter().map(|one| one.method).collect();
        assert_eq!(distrusted, [wrong]);
        assert!(calibration.distrusted[0].reason.contains("wrong bytes"), "{calibration}");
        assert!(!calibration.methods.contains(&wrong) && calibration.methods.len() == 2);
        assert!(
            calibration.points.iter().all(|point| point.method != wrong) && !calibration.points.is_empty()
        );
        assert!(calibration.to_string().contains(&format!("{} is not used: ", wrong.as_str())));
        drop(engine);
        session.end().unwrap();
    }
    let session = rig.session(2);
    let forbidden = vec![Method::Batch, Method::Kernel];
    let config = CudaConfig { forbidden, ..session.config(Mode::Auto) };
    let engine = CudaEngine::attach(session.driver, &config).unwrap();
    assert_eq!(engine.calibration().unwrap().methods, [Method::Memcpy]);
    let control = session.control.unwrap();
    assert_eq!(control.calls(session.device, "cuModuleLoadData"), 1, "the rig's own, none of the engine's");
    drop(engine);
    let config = CudaConfig { mode: Mode::Fixed(Method::Kernel), ..config };
    let error = CudaEngine::attach(session.driver, &config).unwrap_err();
    assert!(error.to_string().contains("requested and forbidden"), "{error}");
    session.end().unwrap();
    // A device whose plain copies are wrong is of no use at all.
    let session = rig.session(3);
    session.control.unwrap().corrupt(session.device, "cuMemcpyAsync");
    let config = CudaConfig { kernel_blocks_max: 7, ..session.config(Mode::Auto) };
    let error = CudaEngine::attach(session.driver, &config).unwrap_err();
    assert!(error.to_string().contains("copies wrong bytes"), "{error}");
    session.end().unwrap();
}

#[test]
fn without_room_to_measure_a_rule_of_thumb_chooses_and_without_room_to_test_plain_copies_do() {
    const OUT_OF_MEMORY: i32 = 2;
    let rig = Rig::standin(13_000);
    for (allocations, small) in [(0, Method::Memcpy), (1, Method::Batch)] {
        let session = rig.session(1 + allocations);
        session.fail("cuMemAlloc_v2", allocations, 1, OUT_OF_MEMORY);
        let engine = session.engine(Mode::Auto, Mutation::default());
        let calibration = engine.calibration().unwrap();
        assert!(
            calibration.problem.as_deref().is_some_and(|problem| problem.starts_with("cuMemAlloc_v2 failed"))
        );
        assert_eq!(calibration.choose(Direction::ToDevice, 4096, 100, false), small);
        assert_eq!(calibration.choose(Direction::ToDevice, 1 << 20, 100, false), Method::Memcpy);
        drop(engine);
        session.end().unwrap();
    }
}

#[test]
fn while_decoding_auto_launches_a_kernel_for_small_copies_only() {
    let rig = Rig::standin(12_000);
    for (seed, len, decoding) in
        [(1, 4096, false), (2, 4096, true), (3, 64 << 10, false), (4, 64 << 10, true)]
    {
        let session = rig.session(seed);
        // Tested, but not measured and without batches: the rule of thumb takes the kernel for small copies.
        session.fail("cuMemAlloc_v2", 1, 1, 2);
        // One piece, so that the copy is not cut.
        let config = CudaConfig { registration_piece_bytes: 64 << 10, ..session.config(Mode::Auto) };
        let config = CudaConfig { dump_bytes_in_flight_max: 1 << 20, ..config };
        let engine = CudaEngine::attach(session.driver, &config).unwrap();
        assert_eq!(engine.name(), "auto");
        let control = session.control.unwrap();
        let before = control.calls(session.device, "cuLaunchKernel");
        crate::cuda::tests::registration::dump_registered(&session, &engine, len, decoding);
        let launched = control.calls(session.device, "cuLaunchKernel") - before;
        assert_eq!(
            launched > 0,
            !decoding || len == 4096,
            "{launched} kernels, {len} bytes, decoding: {decoding}"
        );
        drop(engine);
        session.end().unwrap();
    }
}

/// Blocks of 1,024 threads would wait for an almost empty multiprocessor; during decoding there are few blocks.
#[test]
fn kernels_have_small_blocks_and_few_of_them_beside_decoding() {
    const LEN: usize = 32 << 20;
    let rig = Rig::standin(13_000);
    for (decoding, blocks_max) in [(false, 64), (true, 8)] {
        let session = rig.session(1);
        let config = CudaConfig::new(DeviceSelector::Ordinal(session.device), Mode::Fixed(Method::Kernel));
        let engine = CudaEngine::attach(session.driver, &config).unwrap();
        crate::cuda::tests::registration::dump_registered(&session, &engine, LEN, decoding);
        assert_eq!(session.control.unwrap().largest_launch(session.device), [blocks_max, 256]);
        drop(engine);
        session.end().unwrap();
    }
}

#[test]
fn devices_are_found_by_number_uuid_and_bus_id() {
    let rig = Rig::standin(13_000);
    let second = device::device(rig.driver, 2).unwrap();
    for text in ["2", second.uuid.as_str(), "0000:03:00.0", "00000000:03:00.0"] {
        let selector: DeviceSelector = text.parse().unwrap();
        assert_eq!(selector.find(rig.driver).unwrap().ordinal, 2, "{text}");
    }
    assert!("a name".parse::<DeviceSelector>().is_err());
    let none: DeviceSelector = "GPU-00000000-0000-0000-0000-000000000000".parse().unwrap();
    assert!(none.find(rig.driver).is_err());
    assert!(DeviceSelector::Ordinal(100_000).find(rig.driver).is_err());
}

#[test]
fn a_description_names_driver_devices_and_engines_without_a_context() {
    for (version, engines) in
        [(12_000, vec!["memcpy", "kernel", "auto"]), (13_000, vec!["memcpy", "batch", "kernel", "auto"])]
    {
        let rig = Rig::standin(version);
        let report = describe_with(rig.driver, None).unwrap();
        let found = &report.devices[rig.device as usize];
        assert_eq!(found.engines, engines);
        assert_eq!(found.device.capability, (9, 0));
        assert!(report.to_string().contains("sm_90, 132 multiprocessors, GPU-"), "{report}");
        assert_eq!(serde_json::to_value(&report).unwrap()["driver"], rig.driver.version_text());
        assert_eq!(rig.control.unwrap().calls(rig.device, "cuDevicePrimaryCtxRetain"), 0);
    }
}

#[test]
fn a_batch_engine_needs_a_driver_that_copies_batches() {
    let rig = Rig::standin(12_000);
    let session = rig.session(1);
    let error = CudaEngine::attach(session.driver, &session.config(Mode::Fixed(Method::Batch))).unwrap_err();
    assert!(error.to_string().contains("CUDA 12.8"), "{error}");
    session.settle();
    session.end().unwrap();
}
