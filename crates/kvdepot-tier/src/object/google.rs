//! The client of Google Cloud Storage, made from the settings and from the variables and files of Google's own tools.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::{ObjectStore, StaticCredentialProvider};
use serde::Deserialize;

use super::bill::Bill;
use super::config::ObjectConfig;
use super::meter::Meter;
use super::transport::{Transport, unusable};

/// Address of the store itself.
const ENDPOINT: &str = "https://storage.googleapis.com";
/// Maximum size of a file with credentials.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Variables that ask for credentials.
const ASKING: [&str; 6] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "GCE_METADATA_HOST",
];

/// What decides how a file with credentials is used. The rest of it is secret and is not kept here.
#[derive(Deserialize)]
struct File {
    #[serde(rename = "type")]
    kind: Option<String>,
    gcs_base_url: Option<String>,
    #[serde(default)]
    disable_oauth: bool,
}

/// Makes the client, without sending a request.
pub(super) fn open(config: &ObjectConfig, meter: &Arc<Meter>) -> Result<Arc<dyn ObjectStore>> {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let path = config.credentials_file.clone();
    let path = path.or_else(|| env("GOOGLE_APPLICATION_CREDENTIALS").map(PathBuf::from));
    let file = path.as_deref().map(read).transpose()?;
    let of_emulator = || env("STORAGE_EMULATOR_HOST").map(with_scheme);
    let endpoint = config.endpoint.clone().or_else(of_emulator);
    let endpoint = endpoint.or_else(|| file.as_ref().and_then(|file| file.gcs_base_url.clone()));
    let endpoint = endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
    let transport = Transport::new(config, Some(endpoint), meter)?;
    let has_no_token = file.as_ref().is_some_and(|file| file.disable_oauth);
    let is_asked = path.is_some() || ASKING.iter().any(|name| env(name).is_some());
    let builder = match &config.credentials_file {
        // An emulator.
        _ if has_no_token || transport.is_plain && !is_asked => anonymous(),
        _ if transport.is_exposed(endpoint) => {
            return Err(Error::new(
                ErrorKind::Config,
                "a token is not sent over http://: use https:// in object_endpoint",
            )
            .with("tier", "Object")
            .with("endpoint", endpoint));
        }
        // All of them from one source: the environment's are ignored.
        Some(path) => match file.as_ref().and_then(|file| file.kind.as_deref()) {
            Some("authorized_user") => {
                GoogleCloudStorageBuilder::new().with_application_credentials(path.to_string_lossy())
            }
            _ => GoogleCloudStorageBuilder::new().with_service_account_path(path.to_string_lossy()),
        },
        None => GoogleCloudStorageBuilder::from_env(),
    };
    let builder = builder
        .with_bucket_name(&config.bucket)
        .with_base_url(endpoint)
        .with_client_options(transport.options.clone())
        .with_retry(transport.retry.clone())
        .with_http_connector(transport.metered(Bill::of_google(endpoint, &config.bucket)));
    Ok(Arc::new(builder.build().map_err(unusable)?))
}

fn anonymous() -> GoogleCloudStorageBuilder {
    let nobody = GcpCredential { bearer: String::new() };
    GoogleCloudStorageBuilder::new().with_credentials(Arc::new(StaticCredentialProvider::new(nobody)))
}

/// The variable may be `host:port` alone.
fn with_scheme(host: String) -> String {
    if host.contains("://") { host } else { format!("http://{host}") }
}

/// Reads what decides how a file is used, and rejects the kinds that the client does not know.
fn read(path: &Path) -> Result<File> {
    let bad = |what: &str| {
        Error::new(ErrorKind::Config, what.to_owned()).with("tier", "Object").with("path", path.display())
    };
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
        .map_err(|error| bad("cannot read the file with Google credentials").with_source(error))?;
    // The parser's error is not kept: it may quote a value.
    let file: File = serde_json::from_str(&text).map_err(|_| {
        bad("the file with Google credentials is not JSON: it must be the key of a service account")
    })?;
    match file.kind.as_deref() {
        None | Some("service_account" | "authorized_user") => Ok(file),
        Some(kind) => {
            let what = "Google credentials of this type are not supported: use the key of a service account, or none on a \
                        machine whose metadata server has a token (Compute Engine, workload identity of GKE)";
            Err(bad(what).with("type", kind))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_kinds_are_refused_without_their_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.json");
        let error = |text: &str| {
            fs::write(&path, text).unwrap();
            read(&path).map(|_| ()).unwrap_err().to_string()
        };
        let told = error(r#"{"type": "external_account", "private_key": "geheim"}"#);
        assert!(told.contains("type=external_account") && !told.contains("geheim"), "{told}");
        let told = error(r#"{"type": {"private_key": "geheim"}}"#);
        assert!(told.contains("not JSON") && told.contains("key.json") && !told.contains("geheim"), "{told}");
        fs::remove_file(&path).unwrap();
        let told = read(&path).map(|_| ()).unwrap_err().to_string();
        assert!(told.contains("cannot read"), "{told}");
    }

    #[test]
    fn an_emulator_s_host_may_lack_its_scheme() {
        assert_eq!(with_scheme("h:1".into()), "http://h:1");
        assert_eq!(with_scheme("https://h".into()), "https://h");
    }
}
