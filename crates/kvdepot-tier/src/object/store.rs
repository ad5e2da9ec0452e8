//! The client of a store, made from the settings and from the variables and files of AWS's own tools.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use object_store::aws::{AmazonS3Builder, AwsCredential, S3ConditionalPut};
use object_store::{
    BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider,
};

use super::meter::{Meter, Metered};
use super::{ObjectConfig, credentials};

/// Time for which an idle connection is kept; stores close idle ones sooner or later.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// Makes the client, without sending a request.
pub(super) fn open(config: &ObjectConfig, meter: &Arc<Meter>) -> Result<Arc<dyn ObjectStore>> {
    // The process may already have a provider, which is fine, too.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let endpoint = config.endpoint.clone().or_else(|| {
        ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].iter().find_map(|name| std::env::var(name).ok())
    });
    let is_plain = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let mut client = ClientOptions::new()
        .with_allow_http(is_plain)
        // Silence and deadlines are enforced here, and a large object may take long.
        .with_timeout_disabled()
        .with_connect_timeout(config.timeout)
        .with_pool_idle_timeout(IDLE_MAX)
        .with_pool_max_idle_per_host(config.requests);
    if let Some(path) = &config.tls_ca_file {
        for certificate in certificates(path)? {
            client = client.with_root_certificate(certificate);
        }
    }
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&config.bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        // Blocks have their own checksums, so over TLS a signature of each byte adds nothing.
        .with_unsigned_payload(!is_plain)
        .with_client_options(client)
        .with_retry(RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: config.timeout,
        })
        .with_http_connector(Metered { meter: Arc::clone(meter), bucket: config.bucket.clone() });
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    match &endpoint {
        Some(endpoint) => builder = builder.with_endpoint(endpoint.trim_end_matches('/')),
        // There is no certificate for a name with dots.
        None => builder = builder.with_virtual_hosted_style_request(!config.bucket.contains('.')),
    }
    if let Some(keys) = credentials::find(config)? {
        // All of them from one source: the environment's token does not belong to the file's keys.
        let keys = AwsCredential { key_id: keys.id, secret_key: keys.secret, token: keys.token };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(keys)));
    }
    let store = builder.build().map_err(|error| {
        Error::new(ErrorKind::Config, "the client of an object store cannot be made from its settings")
            .with("tier", "Object")
            .with_source(error)
    })?;
    Ok(Arc::new(store))
}

fn certificates(path: &FilePath) -> Result<Vec<Certificate>> {
    let bad = |what: &str| {
        Error::new(ErrorKind::Config, what.to_owned()).with("tier", "Object").with("path", path.display())
    };
    let pem = std::fs::read(path)
        .map_err(|error| bad("cannot read the certificates to trust a store by").with_source(error))?;
    let all = Certificate::from_pem_bundle(&pem).map_err(|error| {
        bad("cannot use the certificates to trust a store by: they must be PEM").with_source(error)
    })?;
    if all.is_empty() {
        return Err(bad("there is no certificate in the file to trust a store by: it must be PEM"));
    }
    Ok(all)
}
