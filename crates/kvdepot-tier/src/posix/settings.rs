//! The settings of a Posix tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::{IO_QUEUE_MAX, IO_THREADS_MAX, TIER_DIRECTORIES_MAX};

use super::config::{CAPACITY_PERCENT_DEFAULT, FREE_FLOOR_PERCENT_DEFAULT};
use crate::settings::{ByMachine, Key, Kind, MEMORY_OUTLIVES, Preset, Setting};

/// Largest cap: an exbibyte.
const CAPACITY_BYTES_MAX: u64 = 1 << 60;
/// Share of a disk's free space that a tier takes in the user's cache directory if nobody configured a directory.
const FREE_PERCENT: u64 = 10;

const PERCENT: Kind = Kind::Whole { min: 0, max: 100 };
const THREADS: Kind = Kind::Whole { min: 1, max: IO_THREADS_MAX as u64 };

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 15] = [
    Setting {
        name: "directories",
        kind: Kind::Paths { max: TIER_DIRECTORIES_MAX },
        key: Some(Key {
            name: "directories",
            meaning: "Directories of the `Posix` tier, absolute, as a list or separated by `:`; local disks or mounts.",
            by_default: "`kvdepot` in the user's cache directory",
            by_machine: Some(ByMachine::CacheDirectory { tell: "create" }),
            example: r#"["/mnt/nvme0/kvdepot", "/mnt/nvme1/kvdepot"]"#,
            seeds: &["storage_backends"],
            ..Key::BLANK
        }),
    },
    Setting { name: "create", kind: Kind::Bool, key: None },
    Setting {
        name: "capacity_bytes",
        kind: Kind::Bytes { max: CAPACITY_BYTES_MAX },
        key: Some(Key {
            name: "posix_capacity_gb",
            meaning: "Cap of the `Posix` tier over all its directories; blocks long unused make room. 0 = no cap.",
            unit: "GiB",
            by_default: "80 % of the disks' size; in the default directory a tenth of the disk's free space",
            by_machine: Some(ByMachine::DiskShare {
                percent: CAPACITY_PERCENT_DEFAULT,
                free_percent: FREE_PERCENT,
            }),
            example: "1024",
            seeds: &["posix_capacity_gb"],
            ..Key::BLANK
        }),
    },
    Setting { name: "capacity_percent", kind: PERCENT, key: None },
    Setting {
        name: "free_floor_percent",
        kind: PERCENT,
        key: Some(Key {
            name: "posix_free_floor_percent",
            meaning: "Share of each disk that stays free, whoever fills it. Below it the `Posix` tier evicts blocks, and \
                      stores no more when it has none left on that disk. 0 = fill the disk.",
            unit: "%",
            default: Preset::Whole(FREE_FLOOR_PERCENT_DEFAULT),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "io_direct",
        kind: Kind::Switch,
        key: Some(Key {
            name: "io_direct",
            meaning: "Read and write block files past the page cache (O_DIRECT). With `auto` only reads of files that the \
                      page cache does not hold go past it.",
            default: Preset::Word("auto"),
            seeds: &["io_direct"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "engine",
        kind: Kind::Choice { of: &["psync", "aio", "io_uring", "auto"] },
        key: Some(Key {
            name: "io_engine",
            meaning: "How block files are read and written: by plain calls, or by queues of the kernel, for what goes past the page \
                      cache (`io_direct`). An engine that the system lacks or forbids is replaced by the next one; \
                      `pool_keep_s` replaces io_uring. `auto` measures for a moment in each directory.",
            default: Preset::Word("psync"),
            seeds: &["posix_io_engine"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "read_threads",
        kind: THREADS,
        key: Some(Key {
            name: "io_read_threads",
            meaning: "Threads that read block files. With `aio` and `io_uring` each reads several at a time.",
            unit: "threads",
            default: Preset::Whole(8),
            seeds: &["stream_number"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "write_threads",
        kind: THREADS,
        key: Some(Key {
            name: "io_write_threads",
            meaning: "Threads that write block files. In files with `ucm_connectors`: half of `stream_number`, rounded up.",
            unit: "threads",
            default: Preset::Whole(4),
            half_of_seed: "stream_number",
            ..Key::BLANK
        }),
    },
    Setting { name: "queue_depth", kind: Kind::Whole { min: 1, max: IO_QUEUE_MAX as u64 }, key: None },
    Setting {
        name: "shard_directories",
        kind: Kind::Bool,
        key: Some(Key {
            name: "shard_directories",
            meaning: "Spread block files over subdirectories; false keeps a namespace's in one.",
            default: Preset::Bool(true),
            seeds: &["shard_data_dir"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "durable",
        kind: Kind::Bool,
        key: Some(Key {
            name: "durable",
            meaning: "Flush every block file to the medium before it counts as written.",
            default: Preset::Bool(false),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "shared",
        kind: Kind::Bool,
        key: Some(Key {
            name: "directories_shared",
            meaning: "Other nodes may write to the same directories, so a block that is not known may still be there.",
            default: Preset::Bool(true),
            ..Key::BLANK
        }),
    },
    Setting { name: MEMORY_OUTLIVES, kind: Kind::Bool, key: None },
    Setting { name: "faults", kind: Kind::Text, key: None },
];
