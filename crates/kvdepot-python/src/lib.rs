//! The Python module `kvdepot._native`. It is thin, and every call releases the interpreter lock before it waits or
//! copies.
#![allow(missing_docs, reason = "docstrings stand in _native.pyi, which stubtest holds against this module")]

mod claim;
mod convert;
mod depot;
mod device;
mod errors;
mod fleet;
mod follower;
mod level;
mod medium;
mod meter;
mod namespace;
mod recorder;
mod serve;
mod spent;
mod store;
mod task;
mod trace;

use pyo3::prelude::*;

#[pymodule(gil_used = false, name = "_native")]
mod native {
    use super::PyModule;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::claim::Claim;
    #[pymodule_export]
    use super::convert::{block_hash, crc64nvme, decode_block, inspect_medium, namespace_id, tier_table};
    #[pymodule_export]
    use super::depot::Depot;
    #[pymodule_export]
    use super::device::{bench_copies, describe_devices};
    #[pymodule_export]
    use super::follower::Follower;
    #[pymodule_export]
    use super::medium::{MediumCheck, MediumReader};
    #[pymodule_export]
    use super::meter::Meter;
    #[pymodule_export]
    use super::namespace::Namespace;
    #[pymodule_export]
    use super::recorder::Recorder;
    #[pymodule_export]
    use super::serve::{init_logging, keep_pool, serve};
    #[pymodule_export]
    use super::store::Store;
    #[pymodule_export]
    use super::task::Task;
    #[pymodule_export]
    use super::trace::Trace;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        kvdepot_io::fork::watch();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("PROTOCOL_VERSION", kvdepot_depot::message::PROTOCOL_VERSION)?;
        super::errors::register(module)
    }
}
