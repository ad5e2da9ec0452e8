//! The client of S3, made from the settings and from the variables and files of AWS's own tools.

use std::sync::Arc;

use kvdepot_core::Result;
use object_store::aws::{AmazonS3Builder, AwsCredential, S3ConditionalPut};
use object_store::{ObjectStore, StaticCredentialProvider};

use super::aws_profile;
use super::bill::Bill;
use super::config::ObjectConfig;
use super::meter::Meter;
use super::transport::{Transport, unusable};

/// Makes the client, without sending a request.
pub(super) fn open(config: &ObjectConfig, meter: &Arc<Meter>) -> Result<Arc<dyn ObjectStore>> {
    let endpoint = config.endpoint.clone().or_else(|| {
        ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].iter().find_map(|name| std::env::var(name).ok())
    });
    let transport = Transport::new(config, endpoint.as_deref(), meter)?;
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&config.bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        // Blocks have their own checksums, so over TLS a signature of each byte adds nothing.
        .with_unsigned_payload(!transport.is_plain)
        .with_client_options(transport.options.clone())
        .with_retry(transport.retry.clone())
        .with_http_connector(transport.metered(Bill::of_aws(&config.bucket)));
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    match &endpoint {
        Some(endpoint) => builder = builder.with_endpoint(endpoint.trim_end_matches('/')),
        // There is no certificate for a name with dots.
        None => builder = builder.with_virtual_hosted_style_request(!config.bucket.contains('.')),
    }
    if let Some(keys) = aws_profile::find(config)? {
        // All of them from one source: the environment's token does not belong to the file's keys.
        let keys = AwsCredential { key_id: keys.id, secret_key: keys.secret, token: keys.token };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(keys)));
    }
    Ok(Arc::new(builder.build().map_err(unusable)?))
}
