//! Credentials reach the store as the provider's own tools find them, and nobody else.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::bucket_server::{Act, BUCKET, BucketServer, Dialect, Request, Speaking};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{ObjectConfig, ObjectTier, Tier};
use parking_lot::Mutex;

const SERVICE_ACCOUNT_KEY: &str = include_str!("bucket_server/test_key.pem");
const TOKEN: &str = r#"{"access_token": "of-the-machine", "expires_in": 3600, "expires_on": "9999999999"}"#;

type Seen = Arc<Mutex<Vec<Request>>>;

/// Records all requests to the bucket.
fn record(server: &BucketServer) -> Seen {
    let seen = Seen::default();
    let into = Arc::clone(&seen);
    server.plan(move |request| {
        if request.is_block() {
            into.lock().push(Request { body: Vec::new(), ..request.clone() });
        }
        Act::Serve
    });
    seen
}

/// Writes and reads a block in a process whose only variables are these, and returns the requests for it.
fn requests(server: &BucketServer, url: &str, variables: &[(&str, &str)]) -> Vec<Request> {
    let seen = record(server);
    let home = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "credentials::with_variables", "--ignored"])
        .env_clear()
        .env("HOME", home.path())
        .env("KVDEPOT_TEST_URL", url)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    let seen = seen.lock().clone();
    assert!(seen.len() >= 2, "a write and a read: {seen:?}");
    seen
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn with_variables() {
    let mut config = ObjectConfig::new(&std::env::var("KVDEPOT_TEST_URL").unwrap()).unwrap();
    config.endpoint = std::env::var("KVDEPOT_TEST_ENDPOINT").ok();
    config.timeout = Duration::from_secs(30);
    let bench = Bench::new(Arc::new(ObjectTier::open(config).unwrap()));
    bench.write_all(1);
    assert!(bench.read_is_right(0));
    bench.remove(0).unwrap();
    let requests = |name| bench.tier.figures().into_iter().find(|(known, _)| *known == name).unwrap().1;
    // The trial of conditions, the namespace's epoch, and the block. Requests for tokens are not billed.
    assert_eq!((requests("put_requests"), requests("get_requests"), requests("delete_requests")), (4, 2, 2));
}

/// Returns the token that requests were authorised by. It must be the same for all; empty for none.
fn token(requests: &[Request]) -> String {
    let of = |request: &Request| {
        let said = request.headers.get("authorization").map_or("", String::as_str);
        said.strip_prefix("Bearer").unwrap_or(said).trim().to_owned()
    };
    let first = of(&requests[0]);
    assert!(requests.iter().all(|request| of(request) == first), "{requests:?}");
    first
}

fn google(variables: &[(&str, &str)]) -> String {
    let _speaking = Speaking::set(Dialect::Google);
    let server = BucketServer::start();
    let path = "/computeMetadata/v1/instance/service-accounts/default/token";
    server.with(|bucket| bucket.tokens.insert(path.into(), TOKEN.into()));
    let address = server.address().to_string();
    let variables: Vec<(&str, &str)> = variables
        .iter()
        .map(|(name, value)| (*name, if *value == "ADDRESS" { address.as_str() } else { value }))
        .chain([("STORAGE_EMULATOR_HOST", address.as_str())])
        .collect();
    token(&requests(&server, &format!("gs://{BUCKET}/kv"), &variables))
}

fn service_account(at: &Path) {
    let key = serde_json::json!({
        "type": "service_account", "private_key": SERVICE_ACCOUNT_KEY, "private_key_id": "1",
        "client_email": "test@example.org",
    });
    std::fs::write(at, key.to_string()).unwrap();
}

#[test]
fn google_s_metadata_server_has_a_token() {
    assert_eq!(google(&[("GCE_METADATA_HOST", "ADDRESS")]), "of-the-machine");
}

#[test]
fn google_s_service_accounts_sign_tokens() {
    let key = tempfile::NamedTempFile::new().unwrap();
    service_account(key.path());
    let token = google(&[("GOOGLE_APPLICATION_CREDENTIALS", key.path().to_str().unwrap())]);
    let parts: Vec<&str> = token.split('.').collect();
    // A signature of 2048 bits in base64.
    assert_eq!((parts.len(), parts[2].len()), (3, 342), "{token}");
}

#[test]
fn google_s_emulators_get_no_token() {
    assert_eq!(google(&[]), "");
}

/// Runs with variables in which `ADDRESS` is the server's.
fn azure(url: &str, variables: &[(&str, &str)]) -> Vec<Request> {
    let _speaking = Speaking::set(Dialect::Azure);
    let server = BucketServer::start();
    for path in ["/msi", "/tenant/oauth2/v2.0/token"] {
        server.with(|bucket| bucket.tokens.insert(path.into(), TOKEN.into()));
    }
    let address = server.address().to_string();
    let variables: Vec<(&str, String)> =
        variables.iter().map(|(name, value)| (*name, value.replace("ADDRESS", &address))).collect();
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    requests(&server, url, &variables)
}

const IN_CONTAINER: &str = "az://bucket/kv";
const IN_ACCOUNT: &str = "abfss://bucket@account.dfs.core.windows.net/kv";
const ENDPOINT: (&str, &str) = ("KVDEPOT_TEST_ENDPOINT", "http://ADDRESS/account");

#[test]
fn azure_s_account_keys_sign_requests() {
    let string = "AccountName=account;AccountKey=c2VjcmV0;BlobEndpoint=http://ADDRESS/account";
    let ways: [(&str, &[(&str, &str)]); 3] = [
        (IN_CONTAINER, &[("AZURE_STORAGE_CONNECTION_STRING", string)]),
        (IN_CONTAINER, &[ENDPOINT, ("AZURE_STORAGE_ACCOUNT", "account"), ("AZURE_STORAGE_KEY", "c2VjcmV0")]),
        (IN_ACCOUNT, &[ENDPOINT, ("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")]),
    ];
    for (url, variables) in ways {
        for request in azure(url, variables) {
            assert!(request.headers["authorization"].starts_with("SharedKey account:"), "{request:?}");
        }
    }
}

#[test]
fn azure_s_signatures_are_in_the_url() {
    let sas = "?sv=2024-01-01&sig=geheim%3D";
    let string =
        format!("BlobEndpoint=http://ADDRESS/account;AccountName=account;SharedAccessSignature={sas}");
    let ways: [(&str, &[(&str, &str)]); 2] = [
        (IN_CONTAINER, &[("AZURE_STORAGE_CONNECTION_STRING", &string)]),
        (IN_ACCOUNT, &[ENDPOINT, ("AZURE_STORAGE_SAS_TOKEN", sas)]),
    ];
    for (url, variables) in ways {
        for request in azure(url, variables) {
            assert_eq!(request.query["sig"], "geheim=", "{request:?}");
            assert!(!request.headers.contains_key("authorization"));
        }
    }
}

#[test]
fn azure_s_managed_identity_has_a_token() {
    let endpoint = ("IDENTITY_ENDPOINT", "http://ADDRESS/msi");
    let seen = azure(IN_ACCOUNT, &[ENDPOINT, endpoint, ("IDENTITY_HEADER", "x")]);
    assert_eq!(token(&seen), "of-the-machine");
}

#[test]
fn azure_s_workload_identity_has_a_token() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "of-kubernetes").unwrap();
    let seen = azure(
        IN_ACCOUNT,
        &[
            ENDPOINT,
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_FEDERATED_TOKEN_FILE", file.path().to_str().unwrap()),
            ("AZURE_AUTHORITY_HOST", "http://ADDRESS"),
        ],
    );
    assert_eq!(token(&seen), "of-the-machine");
}

#[test]
fn tokens_and_signatures_are_not_sent_where_others_can_read_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = |url: &str, endpoint: &str| {
        let credentials_file = Some(file.path().to_owned());
        let endpoint = Some(endpoint.to_owned());
        ObjectTier::open(ObjectConfig { endpoint, credentials_file, ..ObjectConfig::new(url).unwrap() })
    };
    let exposed = |url: &str| {
        let error = open(url, "http://store.example:80/account").map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("endpoint=http://store.example"), "{error}");
        for endpoint in ["https://store.example/account", "http://localhost:1/account"] {
            open(url, endpoint).unwrap();
        }
    };
    service_account(file.path());
    exposed("gs://bucket/kv");
    std::fs::write(file.path(), "AccountName=account;SharedAccessSignature=sv=1&sig=geheim").unwrap();
    exposed("az://bucket/kv");
    // A signature of each request tells nothing that can be used again.
    std::fs::write(file.path(), "AccountName=account;AccountKey=c2VjcmV0").unwrap();
    open("az://bucket/kv", "http://store.example:80/account").unwrap();
}

/// The environment's addresses are not checked with the settings.
#[test]
fn a_user_in_an_address_is_refused_and_not_shown() {
    for url in ["s3://bucket/kv", "gs://bucket/kv", IN_ACCOUNT] {
        let endpoint = Some("http://user:geheim@127.0.0.1:1".to_owned());
        let config = ObjectConfig { endpoint, ..ObjectConfig::new(url).unwrap() };
        let error = ObjectTier::open(config).map(|_| ()).unwrap_err();
        let told = format!("{error} {error:?}");
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {told}");
        assert!(told.contains("http://…@127.0.0.1:1") && !told.contains("geheim"), "{url}: {told}");
    }
}

#[test]
fn refused_credentials_are_named_and_not_shown() {
    let _speaking = Speaking::set(Dialect::Azure);
    let server = BucketServer::start();
    let address = server.address().to_string();
    server.plan(|request| if request.path == "/msi" { Act::Refuse(400) } else { Act::Serve });
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "credentials::with_an_identity_that_is_refused", "--ignored"])
        .env_clear()
        .env("KVDEPOT_TEST_ENDPOINT", format!("http://{address}/account"))
        .env("IDENTITY_ENDPOINT", format!("http://{address}/msi"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "a part of refused_credentials_are_named_and_not_shown"]
fn with_an_identity_that_is_refused() {
    let endpoint = std::env::var("KVDEPOT_TEST_ENDPOINT").ok();
    let timeout = Duration::from_secs(30);
    let config = ObjectConfig { endpoint, timeout, ..ObjectConfig::new(IN_ACCOUNT).unwrap() };
    let tier = ObjectTier::open(config).unwrap();
    let error = tier.open_and_wait(&spec("one", BlockLayout::new(vec![vec![100]]).unwrap()), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
    let told = format!("{error} {error:?} {:?}", tier.servers());
    assert!(told.contains("token server") && told.contains("Test400") && !told.contains("secret"), "{told}");
}
