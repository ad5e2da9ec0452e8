//! The settings of a Slab tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::IO_THREADS_MAX;

use crate::compression;
use crate::settings::{Key, Kind, Preset, Setting};

const THREADS: Kind = Kind::Whole { min: 1, max: IO_THREADS_MAX as u64 };
/// Smallest and largest segment that can be configured, in MiB.
pub(super) const SEGMENT_MB: (u64, u64) = (1, 4096);

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 8] = [
    Setting {
        name: "path",
        kind: Kind::Path,
        key: Some(Key {
            name: "slab_path",
            meaning: "File or block device of the `Slab` tier, as an absolute path. A missing file is \
                      created and allocated; its directory must exist. Only one depot can use it at a time.",
            by_default: "none; a pipeline with `Slab` needs it",
            required: "its Slab tier needs a file or a block device: add slab_path",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "capacity_bytes",
        kind: Kind::Bytes { max: 1 << 60 },
        key: Some(Key {
            name: "slab_capacity_gb",
            meaning: "Size of the `Slab` tier's file. A new file is allocated at this size. An existing file \
                      keeps its size, and it is an error to set a different one.",
            unit: "GiB",
            by_default: "the size of the device or of the existing file; required for a new file",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "segment_mb",
        kind: Kind::Whole { min: SEGMENT_MB.0, max: SEGMENT_MB.1 },
        key: Some(Key {
            name: "slab_segment_mb",
            meaning: "Size of the segments of a new file or device of the `Slab` tier. The tier evicts \
                      entire segments, and a block must fit into one.",
            unit: "MiB",
            default: Preset::Whole(256),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "compression",
        kind: Kind::Switch,
        key: Some(Key {
            name: "slab_compression",
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
            name: "slab_durable",
            meaning: "Flush blocks of the `Slab` tier to the medium before they count as written. One flush \
                      covers many blocks.",
            default: Preset::Bool(true),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "read_threads",
        kind: THREADS,
        key: Some(Key {
            name: "slab_read_threads",
            meaning: "Threads that read blocks of the `Slab` tier.",
            unit: "threads",
            default: Preset::Whole(8),
            ..Key::BLANK
        }),
    },
    Setting {
        name: "write_threads",
        kind: THREADS,
        key: Some(Key {
            name: "slab_write_threads",
            meaning: "Threads that compute checksums of blocks for the `Slab` tier, and compress them. One more thread writes \
                      the blocks.",
            unit: "threads",
            default: Preset::Whole(2),
            ..Key::BLANK
        }),
    },
    Setting { name: "faults", kind: Kind::Text, key: None },
];
