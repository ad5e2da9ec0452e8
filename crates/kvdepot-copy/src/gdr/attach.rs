//! `use_gdr`: asked for and missing is an error that says what; `auto` goes without, and says so once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::{Error, Result};
use kvdepot_verbs::Verbs;

use crate::CopyEngine;
use crate::cuda::Driver;
use crate::gdr::config::{GdrConfig, UseGdr};
use crate::gdr::engine::GdrEngine;
use crate::gdr::fallback::Fallback;

/// Attaches with the machine's own driver and RDMA library; an error names the first thing that is missing: the CUDA
/// driver, libibverbs, an adapter, a port that is up, or peer memory.
pub fn require(config: &GdrConfig) -> Result<GdrEngine> {
    GdrEngine::attach(Driver::load()?, &Verbs::load()?, config)
}

/// The engine that `use_gdr` asks for: `gdr`, or what is used without it. With `auto` that is used, too, once the adapter
/// cannot reach the engine's memory.
pub fn engine_for(
    use_gdr: UseGdr,
    gdr: impl FnOnce() -> Result<GdrEngine>,
    without: impl FnOnce() -> Result<Arc<dyn CopyEngine>> + Send + 'static,
) -> Result<Arc<dyn CopyEngine>> {
    match use_gdr {
        UseGdr::No => without(),
        UseGdr::Yes => gdr().map(|engine| Arc::new(engine) as _).map_err(asked_for),
        UseGdr::Auto => match gdr() {
            Ok(engine) => Ok(Arc::new(Fallback::new(engine, Box::new(without)))),
            Err(error) => {
                say_unused(&error);
                without()
            }
        },
    }
}

/// Says once why there is no GPUDirect RDMA.
pub(crate) fn say_unused(error: &Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::info!("GPUDirect RDMA is not used: {error}");
    }
}

/// The error of somebody who asked for it.
pub(crate) fn asked_for(error: Error) -> Error {
    error.with("use_gdr", true)
}
