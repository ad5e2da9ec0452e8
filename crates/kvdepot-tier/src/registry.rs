//! temporary
use std::sync::Arc;
use crate::Tier;
/// temporary
pub fn build(_name: &str, _v: &serde_json::Value) -> kvdepot_core::Result<Arc<dyn Tier>> { Err(kvdepot_core::Error::new(kvdepot_core::ErrorKind::Unsupported, "x")) }
