//! The client of a store, by its protocol.

use std::sync::Arc;

use kvdepot_core::Result;
use object_store::ObjectStore;

use super::cloud::Cloud;
use super::config::ObjectConfig;
use super::meter::Meter;
use super::{aws, azure, google};

/// Makes the client, without sending a request.
pub(super) fn open(config: &ObjectConfig, meter: &Arc<Meter>) -> Result<Arc<dyn ObjectStore>> {
    // The process may already have a provider, which is fine, too.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match config.cloud {
        Cloud::Aws => aws::open(config, meter),
        Cloud::Google => google::open(config, meter),
        Cloud::Azure => azure::open(config, meter),
    }
}
