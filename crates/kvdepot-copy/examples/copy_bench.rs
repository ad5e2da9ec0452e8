//! Measures the CUDA copy engines: `cargo run --release -p kvdepot-copy --example copy_bench -- [--json] [DEVICE]`.

use kvdepot_copy::cuda::bench::{self, BenchConfig};
use kvdepot_copy::cuda::{DeviceSelector, Driver};
use kvdepot_core::Result;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.iter().any(|argument| argument == "--json");
    let device = arguments.iter().find(|argument| *argument != "--json");
    let device = device.map_or(Ok(DeviceSelector::Ordinal(0)), |text| text.parse())?;
    let result = bench::run(Driver::load()?, &BenchConfig::new(device), |row| {
        eprintln!("{} {} KiB: {:.2} GB/s", row.engine, row.op_bytes >> 10, row.load_gb_per_s);
    })?;
    if json {
        println!("{}", serde_json::to_string_pretty(&result).unwrap_or_default());
    } else {
        print!("{result}");
    }
    Ok(())
}
