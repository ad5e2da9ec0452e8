//! The protocols that an Object tier speaks, and how they differ where the tier depends on it.

use object_store::UpdateVersion;

use kvdepot_core::limits::OBJECT_DELETES_MAX;

/// Protocol of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cloud {
    /// Amazon S3, and stores with its protocol.
    Aws,
    /// Google Cloud Storage, by its XML protocol.
    Google,
    /// Azure Blob Storage.
    Azure,
}

/// Schemes of S3.
pub(super) const AWS_SCHEMES: &[&str] = &["s3"];
/// Schemes of Azure, whose URLs may name the account: `abfss://container@account.dfs.core.windows.net`.
pub(super) const AZURE_SCHEMES: &[&str] = &["az", "azure", "abfs", "abfss"];
/// All schemes.
pub(super) const SCHEMES: &[&str] = &["s3", "gs", "az", "azure", "abfs", "abfss"];

impl Cloud {
    /// Returns the protocol for a URL's scheme.
    pub(super) fn of_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "gs" => Some(Self::Google),
            scheme if AWS_SCHEMES.contains(&scheme) => Some(Self::Aws),
            scheme if AZURE_SCHEMES.contains(&scheme) => Some(Self::Azure),
            _ => None,
        }
    }

    /// Returns the provider's word for a bucket.
    pub(super) const fn bucket(self) -> &'static str {
        match self {
            Self::Aws | Self::Google => "bucket",
            Self::Azure => "container",
        }
    }

    /// Returns the names of the conditions on which epochs are written.
    pub(super) const fn conditions(self) -> &'static str {
        match self {
            Self::Aws | Self::Azure => "If-None-Match, If-Match",
            Self::Google => "x-goog-if-generation-match",
        }
    }

    /// Returns a version that no object has. Google compares generations, which are times in microseconds; the others
    /// compare ETags.
    pub(super) fn no_version() -> UpdateVersion {
        UpdateVersion { e_tag: Some("\"0x1\"".to_owned()), version: Some("1".to_owned()) }
    }

    /// Returns how many objects are deleted in one turn: by one request, or at Google by one for each object, ten at a
    /// time.
    pub(super) const fn deletes_max(self) -> usize {
        match self {
            Self::Aws => OBJECT_DELETES_MAX,
            Self::Google => 100,
            Self::Azure => 256,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_select_the_protocol() {
        assert_eq!(Cloud::of_scheme("s3"), Some(Cloud::Aws));
        assert_eq!(Cloud::of_scheme("gs"), Some(Cloud::Google));
        assert!(AZURE_SCHEMES.iter().all(|scheme| Cloud::of_scheme(scheme) == Some(Cloud::Azure)));
        assert!(SCHEMES.iter().all(|scheme| Cloud::of_scheme(scheme).is_some()));
        assert_eq!(Cloud::of_scheme("https"), None);
    }
}
