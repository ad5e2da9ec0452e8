//! The client of Azure Blob Storage, made from the settings and from the variables of Azure's own tools.

use std::fs;
use std::io::Read;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use object_store::azure::{
    AzureAccessKey, AzureConfigKey, AzureCredential, MicrosoftAzureBuilder, split_sas,
};
use object_store::{ObjectStore, StaticCredentialProvider};

use super::address::Account;
use super::bill::Bill;
use super::config::ObjectConfig;
use super::connection_string::ConnectionString;
use super::meter::Meter;
use super::transport::{Transport, unusable};

/// Maximum size of a file with a connection string.
const FILE_BYTES_MAX: u64 = 64 << 10;

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::Config, what.to_owned()).with("tier", "Object")
}

/// Makes the client, without sending a request.
pub(super) fn open(config: &ObjectConfig, meter: &Arc<Meter>) -> Result<Arc<dyn ObjectStore>> {
    let (builder, said, is_signed) = match connection_string(config)? {
        // All from one source: the environment's other variables are ignored.
        Some(found) => {
            let credential = credential(&found).map_err(unusable)?;
            let credential = Arc::new(StaticCredentialProvider::new(credential));
            let builder = MicrosoftAzureBuilder::new().with_credentials(credential);
            (builder, (found.account, found.endpoint), found.key.is_some())
        }
        None => of_environment(),
    };
    let account = account(config, said)?;
    let endpoint = config.endpoint.as_deref().unwrap_or(&account.endpoint).trim_end_matches('/');
    let transport = Transport::new(config, Some(endpoint), meter)?;
    if transport.is_exposed(endpoint) && !is_signed {
        return Err(bad(
            "tokens and signatures in URLs are not sent over http://: use https://, or an account key",
        )
        .with("endpoint", endpoint));
    }
    let builder = builder
        .with_account(&account.name)
        .with_container_name(&config.bucket)
        .with_endpoint(endpoint.to_owned())
        .with_use_emulator(false)
        .with_client_options(transport.options.clone())
        .with_retry(transport.retry.clone())
        .with_http_connector(transport.metered(Bill::of_azure(endpoint, &config.bucket)));
    Ok(Arc::new(builder.build().map_err(unusable)?))
}

/// Name and endpoint of an account, as far as they are known.
type Said = (Option<String>, Option<String>);

/// Reads Azure's variables. The last value tells whether requests are signed with an account key.
fn of_environment() -> (MicrosoftAzureBuilder, Said, bool) {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut builder = MicrosoftAzureBuilder::from_env();
    let get = |builder: &MicrosoftAzureBuilder, key| builder.get_config_value(&key);
    // Names of the command line tool.
    if get(&builder, AzureConfigKey::AccessKey).is_none()
        && let Some(key) = env("AZURE_STORAGE_KEY")
    {
        builder = builder.with_access_key(key);
    }
    let account = get(&builder, AzureConfigKey::AccountName).or_else(|| env("AZURE_STORAGE_ACCOUNT"));
    let is_signed =
        get(&builder, AzureConfigKey::AccessKey).is_some() && get(&builder, AzureConfigKey::Token).is_none();
    let endpoint = get(&builder, AzureConfigKey::Endpoint);
    (builder, (account, endpoint), is_signed)
}

/// Returns the account that the URL names, or the one that the credentials are for.
fn account(config: &ObjectConfig, (name, endpoint): Said) -> Result<Account> {
    match (&config.account, name) {
        (Some(account), Some(name)) if account.name != name => {
            Err(bad("object_url names another storage account than the credentials")
                .with("account", &account.name)
                .with("of_credentials", name))
        }
        (Some(account), _) => {
            let endpoint = endpoint.unwrap_or_else(|| account.endpoint.clone());
            Ok(Account { name: account.name.clone(), endpoint })
        }
        (None, Some(name)) => {
            let endpoint = endpoint.unwrap_or_else(|| format!("https://{name}.blob.core.windows.net"));
            Ok(Account { name, endpoint })
        }
        (None, None) => {
            let what = "the storage account of a container is not known: write \
                        abfss://container@account.dfs.core.windows.net/prefix, or set AZURE_STORAGE_ACCOUNT";
            Err(bad(what).with("container", &config.bucket))
        }
    }
}

fn credential(found: &ConnectionString) -> object_store::Result<AzureCredential> {
    match &found.key {
        Some(key) => Ok(AzureCredential::AccessKey(AzureAccessKey::try_new(key)?)),
        None => Ok(AzureCredential::SASToken(split_sas(found.sas.as_deref().unwrap_or_default())?)),
    }
}

/// Returns the connection string of the configured file, or the environment's.
fn connection_string(config: &ObjectConfig) -> Result<Option<ConnectionString>> {
    let name = "AZURE_STORAGE_CONNECTION_STRING";
    let (text, place) = match &config.credentials_file {
        Some(path) => {
            let mut text = String::new();
            fs::File::open(path)
                .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
                .map_err(|error| {
                    bad("cannot read the file with a connection string")
                        .with("path", path.display())
                        .with_source(error)
                })?;
            (text, path.display().to_string())
        }
        None => match std::env::var(name) {
            Ok(text) if !text.is_empty() => (text, name.to_owned()),
            _ => return Ok(None),
        },
    };
    let found = ConnectionString::parse(&text);
    let found = found.map_err(|what| {
        bad(&format!("not a connection string of Azure Storage: {what}")).with("place", place)
    })?;
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNT: &str = "abfss://c@one.dfs.core.windows.net/kv";

    fn of(url: &str, name: Option<&str>, endpoint: Option<&str>) -> Result<Account> {
        account(&ObjectConfig::new(url).unwrap(), (name.map(str::to_owned), endpoint.map(str::to_owned)))
    }

    #[test]
    fn the_account_is_the_url_s_or_that_of_the_credentials() {
        let endpoint = |url, name, endpoint| of(url, name, endpoint).unwrap().endpoint;
        assert_eq!(endpoint(ACCOUNT, None, None), "https://one.blob.core.windows.net");
        assert_eq!(endpoint(ACCOUNT, Some("one"), Some("http://h/one")), "http://h/one");
        assert_eq!(endpoint("az://c", Some("two"), None), "https://two.blob.core.windows.net");
        let error = of(ACCOUNT, Some("two"), None).unwrap_err().to_string();
        assert!(error.contains("account=one") && error.contains("of_credentials=two"), "{error}");
        let error = of("az://c", None, None).unwrap_err().to_string();
        assert!(error.contains("AZURE_STORAGE_ACCOUNT") && error.contains("container=c"), "{error}");
    }

    #[test]
    fn a_file_without_a_connection_string_is_named_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = ObjectConfig::new(ACCOUNT).unwrap();
        config.credentials_file = Some(dir.path().join("azure"));
        let error = |config: &ObjectConfig| connection_string(config).map(|_| ()).unwrap_err().to_string();
        assert!(error(&config).contains("cannot read"));
        fs::write(dir.path().join("azure"), "AccountKey=geheim").unwrap();
        let told = error(&config);
        assert!(told.contains("AccountName") && told.contains("azure") && !told.contains("geheim"), "{told}");
    }
}
