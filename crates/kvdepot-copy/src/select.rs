//! Selects a copy engine by the configuration.

use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::cuda::{CudaConfig, CudaEngine, DeviceSelector, Driver, Method, Mode};
use crate::gdr::{self, GdrConfig, UseGdr};
use crate::limit::{ATTACH_WAIT, within};
use crate::{Bounded, CopyEngine, HostEngine};

/// Engine names in a configuration.
pub const ENGINE_NAMES: [&str; 6] = ["auto", "host", "memcpy", "batch", "kernel", "gdr"];

/// Engines that a configuration may forbid. Plain calls cannot be forbidden: they are the only way for memory that is
/// not registered.
pub const FORBIDDABLE: [&str; 3] = ["batch", "kernel", "gdr"];

/// The choice of an engine, read from a JSON object. Missing keys have their defaults.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineSpec {
    /// Number of the CUDA device that holds the engine's memory; `None` for host memory.
    pub cuda_device: Option<u32>,
    /// One of `ENGINE_NAMES`.
    pub copy_engine: String,
    /// Engines that must not be used: some of `FORBIDDABLE`.
    pub copy_engines_forbidden: Vec<String>,
    /// Number of threads that copy between host memories; 0 = chosen for the machine.
    pub copy_threads: usize,
    /// Whether to copy through an RDMA adapter.
    pub use_gdr: UseGdr,
    /// Adapters by the number of the device. If empty, the environment decides, else the nearest is used.
    pub gdr_nics: Vec<String>,
    /// Directory of measurements, which are kept between processes.
    pub cache_dir: Option<PathBuf>,
}

impl Default for EngineSpec {
    fn default() -> Self {
        Self {
            cuda_device: None,
            copy_engine: "auto".to_owned(),
            copy_engines_forbidden: Vec::new(),
            copy_threads: 0,
            use_gdr: UseGdr::No,
            gdr_nics: Vec::new(),
            cache_dir: None,
        }
    }
}

impl EngineSpec {
    /// Parses the JSON object.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|e| {
            Error::new(ErrorKind::Config, "the choice of a copy engine cannot be read")
                .with("copy_json", text)
                .with_source(e)
        })
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// `Config` for an engine that does not fit the memory; `Unavailable` or `Unsupported` if the machine lacks
    /// something that it needs, which the error names.
    pub fn open(&self) -> Result<Arc<dyn CopyEngine>> {
        self.check_forbidden()?;
        let unfit =
            |help: &str| Err(Error::new(ErrorKind::Config, help).with("copy_engine", &self.copy_engine));
        let Some(ordinal) = self.cuda_device else {
            return match self.copy_engine.as_str() {
                "auto" | "host" if self.use_gdr == UseGdr::Yes => Err(Error::new(
                    ErrorKind::Config,
                    "use_gdr copies between a CUDA device and the pool, and the KV cache is in host memory: write false",
                )
                .with("use_gdr", true)),
                "auto" | "host" => Ok(Arc::new(HostEngine::new(self.copy_threads)?)),
                _ => unfit(
                    "this copy engine is for a CUDA device, and the KV cache is in host memory: write auto",
                ),
            };
        };
        let mode = match self.copy_engine.as_str() {
            "auto" | "gdr" => Mode::Auto,
            "memcpy" => Mode::Fixed(Method::Memcpy),
            "batch" => Mode::Fixed(Method::Batch),
            "kernel" => Mode::Fixed(Method::Kernel),
            "host" => {
                return unfit(
                    "this copy engine is for host memory, and the KV cache is on a device: write auto",
                );
            }
            _ => {
                return Err(Error::new(ErrorKind::Config, "unknown copy engine")
                    .with("copy_engine", &self.copy_engine)
                    .with("known", ENGINE_NAMES.join(", ")));
            }
        };
        let this = self.clone();
        let attached =
            within("attaching to a device", ATTACH_WAIT, move || this.attach(ordinal, mode)).flatten();
        Ok(Arc::new(Bounded::new(attached?)?))
    }

    fn forbids(&self, name: &str) -> bool {
        self.copy_engines_forbidden.iter().any(|forbidden| forbidden == name)
    }

    fn check_forbidden(&self) -> Result<()> {
        let unknown = |name: &&String| !FORBIDDABLE.contains(&name.as_str());
        if let Some(name) = self.copy_engines_forbidden.iter().find(unknown) {
            return Err(Error::new(ErrorKind::Config, "no copy engine of this name can be forbidden")
                .with("copy_engines_forbidden", name)
                .with("known", FORBIDDABLE.join(", ")));
        }
        if self.forbids(&self.copy_engine) || self.use_gdr == UseGdr::Yes && self.forbids("gdr") {
            return Err(Error::new(
                ErrorKind::Config,
                "this copy engine is both requested and forbidden: write auto, or allow it",
            )
            .with("copy_engine", if self.use_gdr == UseGdr::Yes { "gdr" } else { &self.copy_engine }));
        }
        Ok(())
    }

    /// Attaches to the device, which may take as long as the driver likes.
    fn attach(&self, ordinal: u32, mode: Mode) -> Result<Arc<dyn CopyEngine>> {
        let use_gdr = match self.use_gdr {
            _ if self.copy_engine == "gdr" => UseGdr::Yes,
            UseGdr::Auto if self.forbids("gdr") => UseGdr::No,
            as_said => as_said,
        };
        let device = DeviceSelector::Ordinal(ordinal);
        let mut by_nic = GdrConfig::new(device.clone());
        if !self.gdr_nics.is_empty() {
            by_nic.nics.clone_from(&self.gdr_nics);
        }
        let methods = [Method::Batch, Method::Kernel];
        let forbidden = methods.into_iter().filter(|method| self.forbids(method.as_str())).collect();
        let config =
            CudaConfig { forbidden, cache_dir: self.cache_dir.clone(), ..CudaConfig::new(device, mode) };
        gdr::engine_for(
            use_gdr,
            || gdr::require(&by_nic),
            move || Ok(Arc::new(CudaEngine::attach(Driver::load()?, &config)?)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(cuda_device: Option<u32>, engine: &str) -> EngineSpec {
        let device = cuda_device.map_or("null".to_owned(), |ordinal| ordinal.to_string());
        EngineSpec::from_json(&format!(r#"{{"cuda_device": {device}, "copy_engine": "{engine}"}}"#)).unwrap()
    }

    #[test]
    fn engines_for_the_other_kind_of_memory_are_refused_by_name() {
        assert_eq!(spec(None, "auto").open().unwrap().name(), "host");
        for (device, engine) in [(None, "kernel"), (None, "gdr"), (Some(0), "host"), (Some(0), "warp")] {
            let error = spec(device, engine).open().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains(engine), "{error}");
        }
        for (text, named) in [
            (r#"{"copy_engine": "batch", "cuda_device": 0, "copy_engines_forbidden": ["batch"]}"#, "batch"),
            (r#"{"use_gdr": "yes", "cuda_device": 0, "copy_engines_forbidden": ["kernel", "gdr"]}"#, "gdr"),
            (r#"{"copy_engines_forbidden": ["memcpy"]}"#, "memcpy"),
        ] {
            let error = EngineSpec::from_json(text).unwrap().open().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
        // Requested on a machine that lacks the hardware.
        for text in [r#"{"use_gdr": "yes"}"#, r#"{"use_gdr": "yes", "cuda_device": 0}"#] {
            let error = EngineSpec::from_json(text).unwrap().open().unwrap_err();
            assert!(error.to_string().contains("use_gdr"), "{error}");
        }
        assert_eq!(EngineSpec::from_json(r#"{"threads": 1}"#).unwrap_err().kind(), ErrorKind::Config);
    }
}
