//! Runs seeds, and shrinks the first failing one.

use std::process::ExitCode;

use kvdepot_sim::{Mistake, Plan, Report, run, shrink};

const USAGE: &str = "usage: kvdepot-sim [--seeds N] [--start N] [--mistake NAME] [--trace] [--no-shrink]";

struct Args {
    seeds: u64,
    start: u64,
    mistake: Option<Mistake>,
    trace: bool,
    shrink: bool,
}

fn parse() -> Result<Args, String> {
    let mut args = Args { seeds: 1_000, start: 0, mistake: None, trace: false, shrink: true };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let mut value = || given.next().ok_or_else(|| format!("{name} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is not a number"));
        match name.as_str() {
            "--seeds" => args.seeds = number(value()?)?,
            "--start" => args.start = number(value()?)?,
            "--mistake" => {
                let text = value()?;
                let known = Mistake::ALL.map(|mistake| format!("{mistake:?}")).join(", ");
                args.mistake =
                    Some(Mistake::by_name(&text).ok_or_else(|| format!("{text} is none of {known}"))?);
            }
            "--trace" => args.trace = true,
            "--no-shrink" => args.shrink = false,
            _ => return Err(format!("unknown argument {name}\n{USAGE}")),
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match parse() {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    // A panic is a failure like any other: it is reported with the seed.
    std::panic::set_hook(Box::new(|_| {}));
    let mut steps = 0;
    let mut failed = None;
    let mut done = 0;
    let mut fingerprint = 0u64;
    for seed in args.start..args.start.saturating_add(args.seeds) {
        let plan = Plan::new(seed);
        let report = run(&plan, args.mistake, args.trace);
        report.trace.iter().for_each(|line| println!("{line}"));
        steps += report.steps;
        fingerprint = fingerprint.rotate_left(1) ^ report.fingerprint;
        done += 1;
        if report.fail.is_some() {
            failed = Some((plan, report));
            break;
        }
        if done % 1_000 == 0 {
            eprintln!("{done} of {} seeds, {steps} steps", args.seeds);
        }
    }
    let seed = failed.as_ref().map(|(plan, _)| plan.seed);
    if let Some((plan, report)) = &failed {
        explain(plan, report, &args);
    }
    let summary = serde_json::json!({
        "seeds": done,
        "start": args.start,
        "steps": steps,
        "failed_seed": seed,
        "fingerprint": format!("{fingerprint:016x}"),
    });
    println!("{summary}");
    if failed.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn explain(plan: &Plan, report: &Report, args: &Args) {
    let Some(fail) = &report.fail else { return };
    println!("seed {} failed: {fail}", plan.seed);
    let mistake = args.mistake.map(|mistake| format!(" --mistake {mistake:?}")).unwrap_or_default();
    println!("again: cargo run -p kvdepot-sim --release -- --start {} --seeds 1{mistake}", plan.seed);
    if !args.shrink {
        return;
    }
    let small = shrink::shrink(plan, args.mistake, fail.rule);
    let report = run(&small, args.mistake, true);
    println!("shrunk from {} to {} operations", plan.ops.len(), small.ops.len());
    println!("features: {}", small.features.names().join(" "));
    println!("{:?}", small.shape);
    report.trace.iter().for_each(|line| println!("{line}"));
    if let Some(fail) = report.fail {
        println!("{fail}");
    }
}
