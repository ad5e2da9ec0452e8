//! The settings of a DAX tier, and the keys of a user's configuration for them.

use kvdepot_core::limits::IO_THREADS_MAX;

use crate::settings::{Key, Kind, Preset, Setting};

/// Maximum number of threads that copy blocks out, unless more are asked for.
pub(super) const WORKERS_MAX: usize = 4;
/// Bytes of a wave.
pub(super) const SLAB_BYTES_DEFAULT: u64 = 256 << 20;
/// The fewest bytes of a wave.
pub(super) const SLAB_BYTES_MIN: u64 = 1 << 20;
/// Whether a put returns without waiting for the flush.
pub(super) const ASYNC_PUT_DEFAULT: bool = false;
/// Words of `verify`.
pub(super) const EVERY_READ: &str = "every_read";
pub(super) const FIRST_READ: &str = "first_read";
/// Words of `access`.
pub(super) const AUTO: &str = "auto";
pub(super) const PREAD: &str = "pread";
pub(super) const MAPPED: &str = "mapped";
/// Largest medium: an exbibyte.
const BYTES_MAX: u64 = 1 << 60;
const THREADS: Kind = Kind::Whole { min: 1, max: IO_THREADS_MAX as u64 };

/// All settings, in the order of the documentation.
pub(super) const SETTINGS: [Setting; 11] = [
    Setting {
        name: "device_path",
        kind: Kind::Path,
        key: Some(Key {
            name: "dax_device_path",
            meaning: "Medium of the `Dax` tier: a DAX device (`/dev/dax0.0`) or an existing plain file. It \
                      belongs to one depot, which formats it if it is empty.",
            by_default: "none; a pipeline with `Dax` needs one",
            seeds: &["dax.device_path"],
            required: "its Dax tier needs a medium: add dax_device_path with the path of a DAX device or of a file",
            ..Key::BLANK
        }),
    },
    Setting {
        name: "max_bytes",
        kind: Kind::Bytes { max: BYTES_MAX },
        key: Some(Key {
            name: "dax_max_size_gb",
            meaning: "How much of its medium the `Dax` tier uses, from the start of the medium. It is fixed \
                      when the medium is formatted. 0 = all of it.",
            unit: "GiB",
            default: Preset::Whole(0),
            seeds: &["dax.max_dax_size"],
            ..Key::BLANK
        }),
    },
    Setting { name: "capacity_bytes", kind: Kind::Bytes { max: BYTES_MAX }, key: None },
    Setting {
        name: "async_put",
        kind: Kind::Bool,
        key: Some(Key {
            name: "dax_async_put",
            meaning: "Count a block as written before a plain file is flushed. The block may then be missing \
                      after a power loss, but not after the process was killed. A DAX device is always \
                      flushed.",
            default: Preset::Bool(ASYNC_PUT_DEFAULT),
            seeds: &["dax.async_put"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "restore_workers",
        kind: Kind::Whole { min: 0, max: IO_THREADS_MAX as u64 },
        key: Some(Key {
            name: "dax_restore_workers",
            meaning: "Threads that copy blocks out of the `Dax` tier. 0 = one for each processor, 4 at most.",
            unit: "threads",
            default: Preset::Whole(0),
            seeds: &["dax.restore_workers"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "restore_max_regions",
        kind: Kind::Whole { min: 0, max: IO_THREADS_MAX as u64 },
        key: Some(Key {
            name: "dax_restore_max_regions",
            meaning: "Maximum number of pieces of one restore that are copied in parallel. 0 = `dax_restore_workers`.",
            unit: "regions",
            default: Preset::Whole(0),
            seeds: &["dax.restore_max_regions"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "retrieve_staging_slab_bytes",
        kind: Kind::Whole { min: SLAB_BYTES_MIN, max: BYTES_MAX },
        key: Some(Key {
            name: "dax_retrieve_staging_slab_bytes",
            meaning: "Maximum number of bytes that one restore copies before it is another restore's turn. \
                      The pool is the staging memory, so no other memory is allocated.",
            unit: "bytes",
            default: Preset::Whole(SLAB_BYTES_DEFAULT),
            seeds: &["dax.retrieve_staging_slab_bytes"],
            ..Key::BLANK
        }),
    },
    Setting {
        name: "lease_in_place",
        kind: Kind::Switch,
        key: Some(Key {
            name: "dax_lease_in_place",
            meaning: "Let engines copy blocks straight from the medium of the `Dax` tier, which they map to \
                      read it, instead of through the pool. `auto` does so for a DAX device; `true` for a \
                      plain file, too. Engines whose device is not the processor, and other machines, get \
                      blocks through the pool.",
            default: Preset::Word("auto"),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting {
        name: "verify",
        kind: Kind::Choice { of: &[EVERY_READ, FIRST_READ] },
        key: Some(Key {
            name: "dax_verify",
            meaning: "When the `Dax` tier verifies a block's checksum. `first_read`: only on the first read after this \
                      depot wrote or found the block; later reads trust the medium and cost only a copy. Use it for \
                      ECC memory that only this depot uses; a file must lie on a file system in memory (tmpfs).",
            default: Preset::Word(EVERY_READ),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting {
        name: "access",
        kind: Kind::Choice { of: &[AUTO, PREAD, MAPPED] },
        key: Some(Key {
            name: "dax_access",
            meaning: "How blocks are read from the medium of the `Dax` tier: with system calls (`pread`), or copied from \
                      memory that is mapped, which is faster (`mapped`). `auto` maps a DAX device, a file on a file system in \
                      memory (tmpfs) and one on persistent memory (mounted with `dax`), and reads a file on a disk with \
                      calls: a bad sector is then an error of one block, while in a mapping it ends the use of the medium. \
                      A DAX device is always mapped.",
            default: Preset::Word(AUTO),
            came_later: true,
            ..Key::BLANK
        }),
    },
    Setting { name: "put_workers", kind: THREADS, key: None },
];
