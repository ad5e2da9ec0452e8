//! What the clients of all stores have in common: connections, certificates, and the count of their requests.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use object_store::{BackoffConfig, Certificate, ClientOptions, RetryConfig};

use super::bill::Bill;
use super::config::ObjectConfig;
use super::meter::{Meter, Metered};
use crate::settings::without_user;

/// Time for which an idle connection is kept; stores close idle ones sooner or later.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// Options of a client.
pub(super) struct Transport {
    pub(super) options: ClientOptions,
    pub(super) retry: RetryConfig,
    /// Whether the store is at an address of `http://`.
    pub(super) is_plain: bool,
    meter: Arc<Meter>,
}

impl Transport {
    /// Reads the certificates to trust a store by. `endpoint` is the store's address, `None` for the provider's.
    pub(super) fn new(config: &ObjectConfig, endpoint: Option<&str>, meter: &Arc<Meter>) -> Result<Self> {
        // It may come from the environment, where nobody has checked it.
        if let Some(endpoint) = endpoint.filter(|endpoint| endpoint.contains('@')) {
            let what =
                "the address of a store holds no user: remove it, and give credentials in the provider's way";
            return Err(Error::new(ErrorKind::Config, what)
                .with("tier", "Object")
                .with("endpoint", without_user(endpoint)));
        }
        let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        let mut options = ClientOptions::new()
            .with_allow_http(is_plain)
            // Silence and deadlines are enforced by `link`, and a large object may take long.
            .with_timeout_disabled()
            .with_connect_timeout(config.timeout)
            .with_pool_idle_timeout(IDLE_MAX)
            .with_pool_max_idle_per_host(config.requests);
        if let Some(path) = &config.tls_ca_file {
            for certificate in certificates(path)? {
                options = options.with_root_certificate(certificate);
            }
        }
        let retry =
            RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: config.timeout };
        Ok(Self { options, retry, is_plain, meter: Arc::clone(meter) })
    }

    /// Returns whether others could read what is sent: the address is of `http://`, and not on this machine.
    pub(super) fn is_exposed(&self, endpoint: &str) -> bool {
        self.is_plain && !is_here(endpoint)
    }

    /// Returns a maker of connections that counts the requests on this bill.
    pub(super) fn metered(&self, bill: Bill) -> Metered {
        Metered { meter: Arc::clone(&self.meter), bill: Arc::new(bill) }
    }
}

/// Returns whether an `http://` address is on this machine. What stands before an `@` is a user, not a host.
fn is_here(endpoint: &str) -> bool {
    let rest = endpoint.strip_prefix("http://").unwrap_or_default();
    let place = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = ["127.0.0.1", "localhost", "[::1]"].iter().find_map(|here| place.strip_prefix(here));
    !place.contains('@') && host.is_some_and(|port| port.is_empty() || port.starts_with(':'))
}

/// Makes the error of a client that cannot be made.
pub(super) fn unusable(error: object_store::Error) -> Error {
    Error::new(ErrorKind::Config, "the client of an object store cannot be made from its settings")
        .with("tier", "Object")
        .with_source(error)
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

#[cfg(test)]
mod tests {
    use super::is_here;

    #[test]
    fn only_addresses_of_this_machine_are_here() {
        for here in
            ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:1/path", "http://localhost/?x=@"]
        {
            assert!(is_here(here), "{here}");
        }
        for elsewhere in [
            "http://store.example",
            "http://localhost:x@store.example",
            "http://localhost.example",
            "https://localhost",
        ] {
            assert!(!is_here(elsewhere), "{elsewhere}");
        }
    }
}
