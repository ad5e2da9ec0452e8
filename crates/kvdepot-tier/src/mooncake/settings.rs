//! The settings of a Mooncake tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::MOONCAKE_CALLS_MAX;

use crate::settings::{ByMachine, Key, Kind, Preset, Setting};

/// Largest timeout that can be configured. A call that hangs is ended before Mooncake gives its transfer up.
pub(super) const TIMEOUT_MS_MAX: u64 = 45_000;
/// Largest time to live of a cached answer.
const TTL_MS_MAX: u64 = 86_400_000;

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 9] = [
    Setting {
        name: "config_path",
        kind: Kind::Path,
        key: Some(Key {
            name: "mooncake_config_path",
            meaning: "Mooncake's own JSON configuration of a client: `local_hostname`, `metadata_server`, \
                      `master_server_address`, `protocol`, `device_name`, `global_segment_size`, `local_buffer_size`.",
            by_default: "`MOONCAKE_CONFIG_PATH`, else `MOONCAKE_MASTER` and Mooncake's other variables",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "python",
        kind: Kind::Path,
        key: Some(Key {
            name: "mooncake_python",
            meaning: "Python interpreter that has Mooncake's package (`mooncake-transfer-engine` or \
                      `mooncake-transfer-engine-non-cuda`). A process of it holds Mooncake's client; kvdepot need not be \
                      installed there.",
            by_default: "the interpreter that starts the depot",
            by_machine: Some(ByMachine::Interpreter),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "prefix",
        kind: Kind::Text,
        key: Some(Key {
            name: "mooncake_prefix",
            meaning: "Beginning of the names of all that kvdepot stores in Mooncake: letters, digits, `-`, `_`, `.`. Depots \
                      with the same prefix share blocks.",
            by_default: "`kvdepot`",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "replicas",
        kind: Kind::Whole { min: 1, max: 16 },
        key: Some(Key {
            name: "mooncake_replicas",
            meaning: "Number of replicas of each block (`replica_num`).",
            unit: "replicas",
            default: Preset::Whole(1),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "timeout_ms",
        kind: Kind::Whole { min: 1, max: TIMEOUT_MS_MAX },
        key: Some(Key {
            name: "mooncake_timeout_ms",
            meaning: "Timeout of a Mooncake call. If a call still hangs 10 s after its timeout, the depot kills and \
                      restarts the helper process.",
            unit: "ms",
            default: Preset::Whole(5_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "calls",
        kind: Kind::Whole { min: 1, max: MOONCAKE_CALLS_MAX as u64 },
        key: Some(Key {
            name: "mooncake_calls",
            meaning: "Maximum number of concurrent calls of Mooncake for reads and lookups, and of those for writes.",
            unit: "calls",
            default: Preset::Whole(4),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "staging_mb",
        kind: Kind::Whole { min: 1, max: 65_536 },
        key: Some(Key {
            name: "mooncake_staging_mb",
            meaning: "Memory through which blocks pass between the pool and Mooncake, in addition to the pool. A block \
                      must fit into it.",
            unit: "MiB",
            default: Preset::Whole(256),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "present_ttl_ms",
        kind: Kind::Whole { min: 0, max: TTL_MS_MAX },
        key: Some(Key {
            name: "mooncake_present_ttl_ms",
            meaning: "How long the tier assumes that a block is still in Mooncake before it asks again. A block that was \
                      evicted in the meantime is a miss.",
            unit: "ms",
            default: Preset::Whole(60_000),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "absent_ttl_ms",
        kind: Kind::Whole { min: 0, max: TTL_MS_MAX },
        key: Some(Key {
            name: "mooncake_absent_ttl_ms",
            meaning: "How long the tier assumes that a block is not in Mooncake before it asks again. New blocks of other \
                      nodes may stay unseen for that long.",
            unit: "ms",
            default: Preset::Whole(100),
            ..Key::BLANK
        }),
    },
];
