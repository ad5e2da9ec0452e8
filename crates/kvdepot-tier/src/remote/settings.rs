//! The settings of a Remote tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::{REMOTE_CONNECTIONS_MAX, REMOTE_SERVERS_MAX};

use crate::settings::{Key, Kind, Preset, Rule, Setting};

/// Largest timeout that can be configured.
pub(super) const TIMEOUT_MS_MAX: u64 = 3_600_000;

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 7] = [
    Setting {
        name: "servers",
        kind: Kind::Servers { max: REMOTE_SERVERS_MAX },
        key: Some(Key {
            name: "remote_servers",
            meaning: "Pool servers of the `Remote` tier, each `host:port`, as a list or separated by `,`: \
                      `kvdepot serve` with its network listener, or InfiniStore. Each block is stored on one \
                      of them, chosen by its key, so all nodes must spell the servers alike. Their order \
                      does not matter.",
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
            meaning: "File with the secret of the pool servers. If it is set, only servers that prove the \
                      same secret are used.",
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
            meaning: "PEM file with the certificates to trust pool servers by: their own, or those of their \
                      certificate authority. If it is set, the servers must use TLS.",
            by_default: "no TLS",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "tls_server_name",
        kind: Kind::Text,
        key: Some(Key {
            name: "remote_tls_server_name",
            meaning: "Server name in the certificates of all pool servers.",
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
            meaning: "How long a pool server may send nothing while a request is pending. After that its blocks \
                      are misses until it responds again.",
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
            meaning: "Number of connections to each pool server.",
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
            meaning: "Protocol of the pool servers. `auto` detects it. InfiniStore's protocol has no secret.",
            default: Preset::Word("auto"),
            ..Key::BLANK
        }),
    },
];
