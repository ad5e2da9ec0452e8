//! Connection strings of Azure Storage: `AccountName=…;AccountKey=…;EndpointSuffix=core.windows.net`.
//!
//! They are never printed: the type has no `Debug`.

/// What a connection string says.
#[derive(Default)]
pub(super) struct ConnectionString {
    pub(super) account: Option<String>,
    pub(super) key: Option<String>,
    /// Shared access signature.
    pub(super) sas: Option<String>,
    /// URL of the blob service.
    pub(super) endpoint: Option<String>,
}

impl ConnectionString {
    /// Parses one. The error says what is wrong and holds no value.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let mut found = Self::default();
        let (mut protocol, mut suffix) = (None, None);
        for part in text.trim().split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return Err("a part is not name=value");
            };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim().to_ascii_lowercase().as_str() {
                "accountname" => found.account = value,
                "accountkey" => found.key = value,
                "sharedaccesssignature" => found.sas = value,
                "blobendpoint" => found.endpoint = value,
                "endpointsuffix" => suffix = value,
                "defaultendpointsprotocol" => protocol = value,
                "usedevelopmentstorage" => {
                    return Err(
                        "UseDevelopmentStorage is not supported: write the emulator's AccountName, AccountKey and \
                                BlobEndpoint",
                    );
                }
                // Other services, and versions.
                _ => {}
            }
        }
        if found.account.is_none() {
            found.account = found.endpoint.as_deref().and_then(account_of);
        }
        let Some(account) = &found.account else {
            return Err("it has no AccountName");
        };
        if found.key.is_none() && found.sas.is_none() {
            return Err("it has neither an AccountKey nor a SharedAccessSignature");
        }
        if found.endpoint.is_none() && (suffix.is_some() || protocol.as_deref() == Some("http")) {
            let protocol = protocol.as_deref().unwrap_or("https");
            let suffix = suffix.as_deref().unwrap_or("core.windows.net");
            found.endpoint = Some(format!("{protocol}://{account}.blob.{suffix}"));
        }
        Ok(found)
    }
}

/// Returns the account that the host of a blob service begins with.
fn account_of(endpoint: &str) -> Option<String> {
    let host = endpoint.split_once("://")?.1;
    Some(host.split_once(".blob.")?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Parts = (Option<String>, Option<String>, Option<String>, Option<String>);

    fn parts(text: &str) -> Result<Parts, &'static str> {
        ConnectionString::parse(text).map(|found| (found.account, found.key, found.sas, found.endpoint))
    }

    #[test]
    fn all_forms_are_read() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            parts(
                "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;EndpointSuffix=core.windows.net\n"
            ),
            Ok((some("a"), some("k=="), None, some("https://a.blob.core.windows.net")))
        );
        assert_eq!(
            parts(
                "BlobEndpoint=http://127.0.0.1:10000/a;AccountName=a;AccountKey=k;QueueEndpoint=http://q/a;"
            ),
            Ok((some("a"), some("k"), None, some("http://127.0.0.1:10000/a")))
        );
        assert_eq!(
            parts("BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=x%3D"),
            Ok((some("a"), None, some("sv=1&sig=x%3D"), some("https://a.blob.core.windows.net/")))
        );
        assert_eq!(parts("AccountName=a;AccountKey=k"), Ok((some("a"), some("k"), None, None)));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, told) in [
            ("", "AccountName"),
            ("AccountName=a", "neither"),
            ("AccountKey=k", "AccountName"),
            ("AccountName=a;AccountKey=k;half", "name=value"),
            ("UseDevelopmentStorage=true", "BlobEndpoint"),
        ] {
            let error = parts(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}
