//! URLs of buckets: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
//! `abfss://container@account.dfs.core.windows.net/prefix`.

use kvdepot_core::{Error, ErrorKind, Result};

use super::cloud::Cloud;

/// Domains of Azure Storage: the public cloud, and those of China and the US government.
const AZURE_DOMAINS: [&str; 3] = ["core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net"];

/// Storage account of Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// URL of its blob service.
    pub endpoint: String,
}

impl Account {
    /// Takes `account.dfs.core.windows.net` or `account.blob.core.windows.net`, of any of Azure's domains.
    fn of_host(host: &str) -> Option<Self> {
        let (name, rest) = host.split_once('.')?;
        let domain = rest.strip_prefix("dfs.").or_else(|| rest.strip_prefix("blob."))?;
        if name.is_empty() || !is_of(name, "") || !AZURE_DOMAINS.contains(&domain) {
            return None;
        }
        Some(Self { name: name.to_owned(), endpoint: format!("https://{name}.blob.{domain}") })
    }
}

/// A bucket and the prefix of its objects' names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) cloud: Cloud,
    pub(super) bucket: String,
    /// Without slashes at its ends; empty for none.
    pub(super) prefix: String,
    /// Storage account, if the URL names it.
    pub(super) account: Option<Account>,
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let cloud = Cloud::of_scheme(scheme);
        let (place, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (bucket, host) = place.split_once('@').map_or((place, None), |(user, host)| (user, Some(host)));
        // A user part may hold a password, so such a URL is shown only if it is a container's name.
        let is_shown = host.is_none() || cloud == Some(Cloud::Azure) && is_of(bucket, "-$");
        let shown = if is_shown { url } else { "(not shown)" };
        let bad = |what: &str| {
            Error::new(ErrorKind::Config, what.to_owned()).with("tier", "Object").with("url", shown)
        };
        let Some(cloud) = cloud else {
            return Err(bad(
                "the URL of a bucket is s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
            ));
        };
        if cloud != Cloud::Azure && (bucket.is_empty() || host.is_some() || !is_of(bucket, "-._")) {
            return Err(bad("a bucket's name has letters, digits, '-', '.' and '_'"));
        }
        if cloud == Cloud::Azure && (bucket.is_empty() || !is_of(bucket, "-$")) {
            return Err(bad("a container's name has letters, digits and '-'"));
        }
        let account = host.map(|host| {
            Account::of_host(host).ok_or_else(|| {
                bad("an Azure URL with an account is abfss://container@account.dfs.core.windows.net/prefix")
            })
        });
        let account = account.transpose()?;
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_good = |part: &str| !part.is_empty() && part != "." && part != ".." && is_of(part, "-._=+");
        if !prefix.is_empty() && !prefix.split('/').all(is_good) {
            return Err(bad(
                "a prefix has parts of letters, digits, '-', '.', '_', '=' and '+', with one '/' between them",
            ));
        }
        Ok(Self { cloud, bucket: bucket.to_owned(), prefix: prefix.to_owned(), account })
    }
}

fn is_of(text: &str, more: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split() {
        let parts = |url: &str| {
            let Address { cloud, bucket, prefix, account } = Address::parse(url).unwrap();
            (cloud, format!("{bucket} {prefix}"), account)
        };
        assert_eq!(parts("s3://b"), (Cloud::Aws, "b ".into(), None));
        assert_eq!(parts("s3://b/"), (Cloud::Aws, "b ".into(), None));
        assert_eq!(parts("s3://my-b.c/kv/team=1/"), (Cloud::Aws, "my-b.c kv/team=1".into(), None));
        assert_eq!(parts("gs://my_b.c/kv"), (Cloud::Google, "my_b.c kv".into(), None));
        for scheme in ["az", "azure", "abfs", "abfss"] {
            assert_eq!(parts(&format!("{scheme}://c/kv")), (Cloud::Azure, "c kv".into(), None));
        }
        for (host, endpoint) in [
            ("a1.dfs.core.windows.net", "https://a1.blob.core.windows.net"),
            ("a1.blob.core.windows.net", "https://a1.blob.core.windows.net"),
            ("a1.dfs.core.usgovcloudapi.net", "https://a1.blob.core.usgovcloudapi.net"),
        ] {
            let (cloud, rest, account) = parts(&format!("abfss://c@{host}/kv/x"));
            assert_eq!((cloud, rest.as_str()), (Cloud::Azure, "c kv/x"));
            assert_eq!(account, Some(Account { name: "a1".into(), endpoint: endpoint.into() }));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for url in [
            "b/p",
            "ftp://b",
            "s3://",
            "s3:///p",
            "s3://b//p",
            "s3://b/p//q",
            "s3://b/../q",
            "s3://b/a b",
            "gs://",
            "gs://b?x",
            "az://",
            "az://a.b/p",
            "az://c@",
            "abfss://c@a.example.org/p",
            "abfss://c@a/p",
            "abfss://c@.dfs.core.windows.net/p",
        ] {
            let error = Address::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(url), "{error}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        for url in
            ["s3://AKIA:geheim@b/p", "gs://geheim@b", "az://c:geheim@a.dfs.core.windows.net", "x://geheim@b"]
        {
            let error = Address::parse(url).unwrap_err();
            assert!(!error.to_string().contains("geheim"), "{error}");
        }
    }
}
