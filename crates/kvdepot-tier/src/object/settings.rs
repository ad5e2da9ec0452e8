//! The settings of an Object tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::OBJECT_REQUESTS_MAX;

use super::cloud::{AWS_SCHEMES, AZURE_SCHEMES, SCHEMES};
use crate::compression;
use crate::settings::{Key, Kind, Preset, Rule, Setting};

/// Largest timeout that can be configured.
const TIMEOUT_MS_MAX: u64 = 3_600_000;
/// Largest time to live of a cached answer.
const TTL_MS_MAX: u64 = 86_400_000;

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 14] = [
    Setting {
        name: "url",
        kind: Kind::Url { of: SCHEMES, with_name: AZURE_SCHEMES },
        key: Some(Key {
            name: "object_url",
            meaning: "Bucket of the `Object` tier and the prefix of its object names: `s3://bucket/prefix`, \
                      `gs://bucket/prefix` (Google Cloud Storage), `az://container/prefix` or \
                      `abfss://container@account.dfs.core.windows.net/prefix` (Azure Blob Storage). Several depots \
                      may share it. Credentials come from the provider's usual variables and files, never from \
                      this URL.",
            by_default: "none; a pipeline with `Object` needs one",
            required: "its Object tier needs a bucket: add object_url with s3://bucket/prefix, gs://bucket/prefix or \
                       az://container/prefix",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "endpoint",
        kind: Kind::Url { of: &["https", "http"], with_name: &[] },
        key: Some(Key {
            name: "object_endpoint",
            meaning: "Address of the store if it is not the provider's own, or an emulator: `https://host:port`. With \
                      `s3://` the bucket is then part of the path (path-style requests). With `az://` it is the \
                      address of the account's blob service.",
            by_default: "`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST` (`gs://`) or `AZURE_STORAGE_ENDPOINT`, else the \
                         provider's",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "region",
        kind: Kind::Text,
        key: Some(Key {
            name: "object_region",
            meaning: "Region of a bucket at `s3://`.",
            by_default: "`AWS_REGION`, `AWS_DEFAULT_REGION`, else `us-east-1`",
            rule: Some(Rule::Scheme {
                key: "object_url",
                of: AWS_SCHEMES,
                text: "has no use unless object_url begins with s3://: remove it",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "credentials_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "object_credentials_file",
            meaning: "File with credentials: access keys in the format of `~/.aws/credentials` (`s3://`), the JSON key \
                      of a service account (`gs://`), or a connection string (`az://`). It is read once, when the \
                      depot starts.",
            by_default: "the provider's variables (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, \
                         `AZURE_STORAGE_CONNECTION_STRING` …) and files, then the machine's identity",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "profile",
        kind: Kind::Text,
        key: Some(Key {
            name: "object_profile",
            meaning: "Profile (section) in the file with access keys of `s3://`.",
            by_default: "`AWS_PROFILE`, else `default`",
            rule: Some(Rule::Scheme {
                key: "object_url",
                of: AWS_SCHEMES,
                text: "has no use unless object_url begins with s3://: remove it",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "tls_ca_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "object_tls_ca_file",
            meaning: "PEM file with certificates to trust the store by, in addition to those of the system.",
            by_default: "only those of the system",
            rule: Some(Rule::Needs {
                key: "object_endpoint",
                text: "has no use with the provider's own address: add object_endpoint",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "timeout_ms",
        kind: Kind::Whole { min: 1, max: TIMEOUT_MS_MAX },
        key: Some(Key {
            name: "object_timeout_ms",
            meaning: "How long the store may stay silent while it owes an answer, and how long the upload of \
                      an object or of a part may take. The request is retried while it has time left.",
            unit: "ms",
            default: Preset::Whole(5_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "requests",
        kind: Kind::Whole { min: 4, max: OBJECT_REQUESTS_MAX as u64 },
        key: Some(Key {
            name: "object_requests",
            meaning: "Maximum number of concurrent requests that read or write blocks: three quarters for reads, a \
                      quarter for writes. A few requests for removals and resets are not counted.",
            unit: "requests",
            default: Preset::Whole(64),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "part_mb",
        kind: Kind::Whole { min: 5, max: 4_096 },
        key: Some(Key {
            name: "object_part_mb",
            meaning: "Part size of multipart uploads. Blocks that are larger are written in parts.",
            unit: "MiB",
            default: Preset::Whole(16),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "pack_mb",
        kind: Kind::Whole { min: 0, max: 64 },
        key: Some(Key {
            name: "object_pack_mb",
            meaning: "Size of packs: objects that hold several small blocks each, so that hits and dumps cost fewer \
                      requests. Blocks of up to a quarter of it are packed. Other depots find a pack within about ten \
                      seconds. `0` gives each block an object of its own, and leaves existing packs unread.",
            unit: "MiB",
            default: Preset::Whole(8),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "present_ttl_ms",
        kind: Kind::Whole { min: 0, max: TTL_MS_MAX },
        key: Some(Key {
            name: "object_present_ttl_ms",
            meaning: "How long the tier assumes that a block is still in the bucket before it asks again. A \
                      block that was deleted in the meantime is a miss.",
            unit: "ms",
            default: Preset::Whole(600_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "absent_ttl_ms",
        kind: Kind::Whole { min: 0, max: TTL_MS_MAX },
        key: Some(Key {
            name: "object_absent_ttl_ms",
            meaning: "How long the tier assumes that a block is not in the bucket before it asks again. New \
                      blocks of other depots may stay unseen for that long.",
            unit: "ms",
            default: Preset::Whole(5_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "compression",
        kind: Kind::Switch,
        key: Some(Key {
            name: "object_compression",
            meaning: compression::MEANING,
            default: Preset::Bool(false),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting {
        name: "sweep",
        kind: Kind::Bool,
        key: Some(Key {
            name: "object_sweep",
            meaning: "Delete blocks from before a reset, at most 1,000 per second. `false` leaves them to a \
                      lifecycle rule of the bucket. They are never read again in either case.",
            default: Preset::Bool(true),
            ..Key::BLANK
        }),
    },
];
