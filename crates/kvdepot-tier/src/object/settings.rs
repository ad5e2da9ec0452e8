//! What an Object tier can be told, and the keys of a user's configuration that say it.

use kvdepot_core::limits::OBJECT_REQUESTS_MAX;

use crate::settings::{Key, Kind, Preset, Rule, Setting};

/// Longest silence that can be configured.
const TIMEOUT_MS_MAX: u64 = 3_600_000;
/// Longest time that something is believed.
const TTL_MS_MAX: u64 = 86_400_000;

/// All of them, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 12] = [
    Setting {
        name: "url",
        kind: Kind::Url { of: &["s3"] },
        key: Some(Key {
            name: "object_url",
            meaning: "Bucket of the `Object` tier, and what its objects' names begin with: `s3://bucket/prefix`. Several depots \
                      may share it. Credentials come from the usual variables and files of AWS, never from here.",
            by_default: "none; a pipeline with `Object` needs one",
            required: "its Object tier needs a bucket: add object_url with s3://bucket/prefix",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "endpoint",
        kind: Kind::Url { of: &["https", "http"] },
        key: Some(Key {
            name: "object_endpoint",
            meaning: "Address of the store, for one that is not AWS: `https://host:port`. The bucket is then named in the path.",
            by_default: "`AWS_ENDPOINT_URL`, else AWS in `object_region`",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "region",
        kind: Kind::Text,
        key: Some(Key {
            name: "object_region",
            meaning: "Region of the bucket.",
            by_default: "`AWS_REGION`, `AWS_DEFAULT_REGION`, else `us-east-1`",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "credentials_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "object_credentials_file",
            meaning: "File with access keys, as `~/.aws/credentials` is written. Read once, when the depot starts.",
            by_default: "variables (`AWS_ACCESS_KEY_ID` …), `AWS_SHARED_CREDENTIALS_FILE`, `~/.aws/credentials`, then the \
                         machine's role",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "profile",
        kind: Kind::Text,
        key: Some(Key {
            name: "object_profile",
            meaning: "Section of the file with access keys.",
            by_default: "`AWS_PROFILE`, else `default`",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "tls_ca_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "object_tls_ca_file",
            meaning: "PEM file of certificates that the store is trusted by, beside those of the system.",
            by_default: "those of the system alone",
            rule: Some(Rule::Needs {
                key: "object_endpoint",
                text: "has no use with AWS itself: add object_endpoint",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "timeout_ms",
        kind: Kind::Whole { min: 1, max: TIMEOUT_MS_MAX },
        key: Some(Key {
            name: "object_timeout_ms",
            meaning: "Longest silence of the store while it owes an answer, and longest time to take an object or a part of one \
                      that is written. It is tried again while the request has time.",
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
            meaning: "Most requests to the store at a time; a quarter of them may write.",
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
            meaning: "Blocks that are larger than this are written in parts of it (multipart).",
            unit: "MiB",
            default: Preset::Whole(16),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "present_ttl_ms",
        kind: Kind::Whole { min: 0, max: TTL_MS_MAX },
        key: Some(Key {
            name: "object_present_ttl_ms",
            meaning: "How long a block is taken to be in the bucket without asking again. What is gone by then is a miss.",
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
            meaning: "How long a block is taken not to be in the bucket without asking again: for so long another depot's new \
                      block may stay unseen.",
            unit: "ms",
            default: Preset::Whole(5_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "sweep",
        kind: Kind::Bool,
        key: Some(Key {
            name: "object_sweep",
            meaning: "Delete blocks from before a reset, 1,000 a second at most. `false` leaves them to a lifecycle rule of the \
                      bucket; they are never read again in either case.",
            default: Preset::Bool(true),
            ..Key::BLANK
        }),
    },
];
