//! The settings of a Posix tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::{IO_QUEUE_MAX, IO_THREADS_MAX, TIER_DIRECTORIES_MAX};

use crate::compression;
use crate::settings::{ByMachine, Key, Kind, MEMORY_OUTLIVES, Preset, Setting};

/// Share of the file systems that a tier may take if no cap is configured.
pub(super) const CAPACITY_PERCENT_DEFAULT: u64 = 80;
/// Share of a file system that stays free if nothing else is configured.
pub(super) const FREE_FLOOR_PERCENT_DEFAULT: u64 = 2;
/// Largest cap: an exbibyte.
const CAPACITY_BYTES_MAX: u64 = 1 << 60;
/// Share of a disk's free space that a tier takes in the user's cache directory if nobody configured a directory.
const FREE_PERCENT: u64 = 10;

const PERCENT: Kind = Kind::Whole { min: 0, max: 100 };
const THREADS: Kind = Kind::Whole { min: 1, max: IO_THREADS_MAX as u64 };

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 17] = [
    Setting {
        name: "directories",
        kind: Kind::Paths { max: TIER_DIRECTORIES_MAX },
        key: Some(Key {
            name: "directories",
            meaning: "Directories of the `Posix` tier on local disks or mounts: absolute paths, as a list or \
                      separated by `:`.",
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
            meaning: "Maximum size of the `Posix` tier, over all its directories. When it is full, the tier \
                      evicts the blocks that were not used for the longest time. 0 = no limit.",
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
            meaning: "Share of each disk that the tier leaves free, no matter what fills the disk. Below it the \
                      `Posix` tier evicts blocks; if it has none left on that disk, it stores no more. 0 = \
                      fill the disk.",
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
            meaning: "Bypass the page cache when reading and writing block files (O_DIRECT). With `auto` \
                      only reads of files that are not in the page cache bypass it.",
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
            meaning: "I/O engine for block files: plain system calls (`psync`) or one of the kernel's \
                      queues, which are used for I/O that bypasses the page cache (`io_direct`). An engine \
                      that the system lacks or forbids is replaced by the next one. `pool_keep_s` replaces \
                      `io_uring`. `auto` runs a short measurement in each directory.",
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
            meaning: "Threads that read block files. With `aio` and `io_uring` each thread has several reads \
                      in flight.",
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
            meaning: "Threads that write block files. In files with `ucm_connectors` it is half of \
                      `stream_number`, rounded up.",
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
            meaning: "Distribute block files over subdirectories. `false` keeps all files of a namespace in \
                      one directory.",
            default: Preset::Bool(true),
            seeds: &["shard_data_dir"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "compression",
        kind: Kind::Switch,
        key: Some(Key {
            name: "posix_compression",
            meaning: compression::MEANING,
            default: Preset::Bool(false),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting {
        name: "durable",
        kind: Kind::Bool,
        key: Some(Key {
            name: "durable",
            meaning: "Flush every block file to the medium before its block counts as written.",
            default: Preset::Bool(false),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "shared",
        kind: Kind::Bool,
        key: Some(Key {
            name: "directories_shared",
            meaning: "Whether other nodes may write to the same directories. If so, a block that this depot \
                      does not know may still be in them.",
            default: Preset::Bool(true),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "capacity_shared",
        kind: Kind::Bool,
        key: Some(Key {
            name: "posix_capacity_shared",
            meaning: "Whether `posix_capacity_gb` limits what all depots that share the directories write \
                      together, instead of what each of them knows. All of them must set it. Needs \
                      `directories_shared`, and a `posix_capacity_gb` that is not 0.",
            default: Preset::Bool(false),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting { name: MEMORY_OUTLIVES, kind: Kind::Bool, key: None },
    Setting { name: "faults", kind: Kind::Text, key: None },
];
