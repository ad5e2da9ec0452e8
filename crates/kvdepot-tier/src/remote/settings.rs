//! What a Remote tier can be told, and the keys of a user's configuration that say it.

use kvdepot_core::limits::{REMOTE_CONNECTIONS_MAX, REMOTE_SERVERS_MAX};

use crate::settings::{Key, Kind, Preset, Rule, Setting};

/// Longest silence that can be configured.
pub(super) const TIMEOUT_MS_MAX: u64 = 3_600_000;

/// All of them, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 7] = [
    Setting {
        name: "servers",
        kind: Kind::Servers { max: REMOTE_SERVERS_MAX },
        key: Some(Key {
            name: "remote_servers",
            meaning: "Pool servers of the `Remote` tier, each `host:port`, as a list or separated by `,`: `kvdepot serve` \
                      with its wire door open, or InfiniStore. Each block lives at one of them, so all nodes must spell \
                      them alike; the order does not matter.",
            by_default: "none; a pipeline with `Remote` needs at least one",
            required: "its Remote tier needs servers: add remote_servers with host:port of each",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "token_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "remote_token_file",
            meaning: "File with the secret that the pool servers want. With it only servers that prove the same secret are \
                      used.",
            by_default: "no secret",
            rule: Some(Rule::Not {
                key: "remote_protocol",
                value: "infinistore",
                text: "InfiniStore's protocol knows no secret: remove it, or write auto there",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "tls_ca_file",
        kind: Kind::Path,
        key: Some(Key {
            name: "remote_tls_ca_file",
            meaning: "PEM file of the certificates that pool servers are trusted by: their own, or their authority's. With \
                      it they must speak TLS.",
            by_default: "no TLS",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "tls_server_name",
        kind: Kind::Text,
        key: Some(Key {
            name: "remote_tls_server_name",
            meaning: "Name that the certificates of all pool servers are for.",
            by_default: "the host of each in `remote_servers`",
            rule: Some(Rule::Needs {
                key: "remote_tls_ca_file",
                text: "has no use without TLS: add remote_tls_ca_file",
            }),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "timeout_ms",
        kind: Kind::Whole { min: 1, max: TIMEOUT_MS_MAX },
        key: Some(Key {
            name: "remote_timeout_ms",
            meaning: "Longest silence of a pool server that owes an answer; then its blocks are misses until it is there \
                      again.",
            unit: "ms",
            default: Preset::Whole(2_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "connections",
        kind: Kind::Whole { min: 1, max: REMOTE_CONNECTIONS_MAX as u64 },
        key: Some(Key {
            name: "remote_connections",
            meaning: "Connections to each pool server.",
            unit: "connections",
            default: Preset::Whole(4),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "protocol",
        kind: Kind::Choice { of: &["auto", "kvdepot", "infinistore"] },
        key: Some(Key {
            name: "remote_protocol",
            meaning: "What the pool servers speak. `auto` finds out; InfiniStore's protocol knows no secret.",
            default: Preset::Word("auto"),
            ..Key::BLANK
        }),
    },
];
