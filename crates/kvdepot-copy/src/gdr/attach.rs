//! Handles `use_gdr`. If GPUDirect RDMA is requested and something is missing, the error names it; `auto` does without
//! and logs that once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::{Error, Result};
use kvdepot_verbs::Verbs;

use crate::CopyEngine;
use crate::cuda::Driver;
use crate::gdr::config::{GdrConfig, UseGdr};
use crate::gdr::engine::GdrEngine;
use crate::gdr::fallback::Fallback;

/// Attaches with the machine's own driver and RDMA library. An error names the first missing thing: the CUDA driver,
/// libibverbs, an adapter, a port that is up, or peer memory.
pub fn require(config: &GdrConfig) -> Result<GdrEngine> {
    GdrEngine::attach(Driver::load()?, &Verbs::load()?, config)
}

/// Returns the engine for a value of `use_gdr`: `gdr`, or the one that is used without it. With `auto` the latter also
/// takes over when the adapter turns out not to reach the engine's memory.
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

/// Logs once why GPUDirect RDMA is not used.
fn say_unused(error: &Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::info!("GPUDirect RDMA is not used: {error}");
    }
}

/// Marks an error of an engine that was requested explicitly.
pub(crate) fn asked_for(error: Error) -> Error {
    error.with("use_gdr", true)
}
