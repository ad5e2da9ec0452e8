//! P7: everything has a limit, and every limit is here.

/// Alignment of slots in the pool and of payloads in files: a page, and what O_DIRECT asks for.
pub const BLOCK_ALIGN_BYTES: u64 = 4096;
/// Largest block that a layout may describe.
pub const BLOCK_BYTES_MAX: u64 = 1 << 30;
/// Most shards of a block.
pub const SHARDS_MAX: usize = 4096;
/// Most tensors of a block, over all shards.
pub const TENSORS_MAX: usize = 65_536;
/// Most pieces of the engine's memory that a block of registered pages is copied from and to.
pub const PAGE_PIECES_MAX: usize = 262_144;
/// Longest engine hash that a block hash is made from.
pub const ENGINE_HASH_BYTES_MAX: usize = 64;
/// Longest canonical namespace description.
pub const NAMESPACE_SPEC_BYTES_MAX: usize = 64 << 10;
/// Most namespaces that one depot knows at a time; one client may use half of them.
pub const NAMESPACES_MAX: usize = 4096;
/// Most namespaces whose blocks one Posix tier keeps, those among them that its depot does not know now.
pub const NAMESPACES_STORED_MAX: usize = 32_768;
/// Most contiguous runs that a slot may be made of.
pub const SLOT_RUNS_MAX: usize = 64;
/// Slots that may not go which an eviction passes over without touching their order; see `EvictionPolicy::victim`.
pub const EVICTION_PASSED_OVER_MAX: usize = 128;
/// Most leases of one connection.
pub const LEASES_PER_OWNER_MAX: usize = 1 << 20;
/// Longest spelling of a pipeline.
pub const PIPELINE_TEXT_BYTES_MAX: usize = 256;
/// Size of the pool's extents: what is populated and registered as one.
pub const POOL_EXTENT_BYTES: u64 = 1 << 30;
/// Most regions of a pool.
pub const POOL_REGIONS_MAX: usize = 32;
/// Smallest pool.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// Most block hashes in one request of the local door; clients split longer batches.
pub const BATCH_HASHES_MAX: usize = 4096;
/// Largest frame of the local door.
pub const FRAME_BYTES_MAX: usize = 128 << 10;
/// Most connections of the local door.
pub const CONNECTIONS_MAX: usize = 1024;
/// Most connections beyond the local door's limit that wait for their refusal; older ones are closed without one.
pub const REFUSALS_MAX: usize = 16;
/// Most connections that the local door accepts before it looks whether it is to end.
pub const ACCEPTS_AT_ONCE_MAX: usize = 64;
/// Longest time, in milliseconds, that one request may wait for dirty blocks to be written.
pub const DRAIN_WAIT_MS_MAX: u32 = 600_000;
/// Most namespaces (ranks x groups) that one claim may span.
pub const CLAIM_NAMESPACES_MAX: usize = 512;
/// Most block hashes of one claim, which come in as many frames as they need; a longer prompt is claimed up to here.
pub const CLAIM_HASHES_MAX: usize = 1 << 20;
/// Most blocks that one claim may ask for, over all of its namespaces; a claim over more is cut at the end.
pub const CLAIM_BLOCKS_MAX: usize = 1 << 21;
/// Most claims that one connection may hold.
pub const CLAIMS_PER_CONNECTION_MAX: usize = 65_536;

/// Closed connections whose slots wait for their process's exit; more keep their place among the open ones.
pub const QUARANTINED_CONNECTIONS_MAX: usize = 8192;
/// How long slots of a closed connection are kept when its process's exit cannot be watched: the kernel has neither
/// SO_PEERPIDFD (Linux 6.5) nor a pid for it in this pid namespace.
pub const UNWATCHED_EXIT_WAIT_MS: u64 = 30_000;
/// How long slots of a connection that was closed without a goodbye are kept while its process goes on running: twice the
/// default of `timeout_ms`, by which every copy of a device that does not hang has ended.
pub const SILENT_CLOSE_WAIT_MS: u64 = 60_000;

const _: () = assert!(BLOCK_ALIGN_BYTES.is_power_of_two());
const _: () = assert!(BATCH_HASHES_MAX * 16 + 8192 < FRAME_BYTES_MAX);
const _: () = assert!(POOL_EXTENT_BYTES.is_multiple_of(BLOCK_ALIGN_BYTES));

/// Most threads of one kind (reading or writing) of one I/O engine.
pub const IO_THREADS_MAX: usize = 512;
/// Most requests waiting in one queue of an I/O engine; more are refused with `Busy`.
pub const IO_QUEUE_MAX: usize = 65_536;
/// Most threads of one I/O engine that may be written off while stuck in the operating system.
pub const IO_WORKERS_WRITTEN_OFF_MAX: usize = 64;
/// Reads in a row before a waiting write gets a turn.
pub const IO_READS_IN_A_ROW_MAX: usize = 64;
/// Most reads that a thread of an I/O engine on queues of the kernel has under way.
pub const IO_FLIGHTS_MAX: usize = 16;
/// Bytes of requests under way from which on such a thread takes no more.
pub const IO_FLIGHT_BYTES_MAX: usize = 64 << 20;
/// How late, in milliseconds, an expired request may learn of it.
pub const IO_WATCHDOG_TICK_MS: u64 = 5;
/// Pieces of memory in one vectored call: what Linux takes.
pub const IO_VECTORS_MAX: usize = 1024;
/// Most bytes of a small file (`namespace.json`) that is read whole.
pub const SMALL_FILE_BYTES_MAX: usize = 256 << 10;
/// Most directories of one Posix tier.
pub const TIER_DIRECTORIES_MAX: usize = 255;
/// Corrupt files kept aside for inspection, for each namespace.
pub const QUARANTINE_FILES_MAX: usize = 16;
/// Blocks known to be absent that a shared tier remembers.
pub const ABSENT_KEYS_MAX: usize = 65_536;
/// How long a shared tier believes that a block is absent: another node may write it at any time.
pub const ABSENT_TTL_MS: u64 = 2_000;
/// Recency updates waiting for the disk; more are dropped.
pub const TOUCH_QUEUE_MAX: usize = 65_536;
/// How often at most a block's recency goes to the disk.
pub const TOUCH_INTERVAL_MS: u64 = 60_000;
/// Age at which another host's temporary file counts as left behind.
pub const FOREIGN_TEMPORARY_AGE_S: u64 = 3_600;
/// Time between a tier's own sweeps for files left behind.
pub const SWEEP_INTERVAL_S: u64 = 600;
/// Longest time, in milliseconds, that opening or advancing a namespace waits for a file system.
pub const NAMESPACE_OPEN_MS: u64 = 4_000;
/// Most namespaces that a tier of files opens or advances at a time: each takes a thread until its file system answers.
pub const NAMESPACES_OPENING_MAX: usize = 64;
/// Pause, in milliseconds, between two tries to store an epoch that could not be stored.
pub const EPOCH_RETRY_MS: u64 = 1_000;
/// Tries to claim an epoch that other nodes claim at the same time.
pub const EPOCH_CLAIMS_MAX: usize = 64;
/// How often the index of a Posix tier is written to its directories, if much has changed.
pub const CHECKPOINT_INTERVAL_S: u64 = 300;
/// Evicted and lost blocks that a tier collects before it tells the depot; more are not told.
pub const TIER_EVENTS_MAX: usize = 65_536;
/// Most writers of one block that wait for the first of them.
pub const WRITERS_WAITING_MAX: usize = 1024;

const _: () = assert!(SLOT_RUNS_MAX + 2 <= IO_VECTORS_MAX);
const _: () = assert!(NAMESPACE_SPEC_BYTES_MAX * 2 < SMALL_FILE_BYTES_MAX);

/// Blocks that one tier, or one server of it, could not remove and is asked for again. Beyond so many it is not used for the
/// namespace any more, until that is reset.
pub const REMOVALS_OWED_MAX: usize = 1 << 13;

/// Most servers of one Remote tier.
pub const REMOTE_SERVERS_MAX: usize = 64;
/// Most connections to one server of a Remote tier.
pub const REMOTE_CONNECTIONS_MAX: usize = 64;
/// Namespaces that nobody has open and that a Remote tier remembers because a server has not taken their reset.
pub const REMOTE_OWED_CLOSED_MAX: usize = 1024;
/// Requests waiting for one server of a Remote tier; more are refused with `Busy`.
pub const REMOTE_QUEUE_MAX: usize = 8192;
/// Most blocks that one get or put of a Remote tier asks for: so many wait when a connection breaks.
pub const REMOTE_BATCH_BLOCKS_MAX: usize = 32;
/// Most bytes that one put of several blocks carries: so long does a get behind it wait.
pub const REMOTE_BATCH_BYTES_MAX: u64 = 8 << 20;
/// Bytes of waiting puts from which on a second connection of a Remote tier takes some of them: fewer travel together.
pub const REMOTE_SECOND_WRITER_BYTES: u64 = 256 << 10;
/// Blocks of which a tier over a network remembers whether they are there.
pub const KNOWN_KEYS_MAX: usize = 1 << 20;
/// Batches of reads that go before a waiting write.
pub const REMOTE_READS_IN_A_ROW_MAX: u32 = 16;
/// Bytes handed to a socket in one call, so that a slow peer is seen to make progress.
pub const REMOTE_SEND_BYTES_MAX: usize = 256 << 10;
/// How late, in milliseconds, an expired request of a Remote tier may learn of it.
pub const REMOTE_TICK_MS: u64 = 10;
/// Connections of a Remote tier to one server that ended amid a write and that the server has not closed: beyond them it is not
/// connected to.
pub const REMOTE_PARTING_MAX: usize = 64;
/// How often, in milliseconds, an idle connection of a Remote tier looks whether it is over.
pub const REMOTE_IDLE_LOOK_MS: u64 = 500;
/// First and longest pause of a Remote tier between two tries to reach a server.
pub const REMOTE_PAUSE_MS: (u64, u64) = (50, 2_000);
/// Epochs, with the first one, of a namespace at an InfiniStore server: each is an entry there, and is asked about one by one.
pub const REMOTE_FOREIGN_EPOCHS_MAX: u32 = 1 << 14;
/// How many silences long, at most, the rest of a value of an InfiniStore server is taken that nobody waits for any more.
pub const REMOTE_FOREIGN_DISCARD_TIMEOUTS: u32 = 16;
/// Longest answer of an InfiniStore server that is read only to be dropped.
pub const REMOTE_FOREIGN_VALUE_BYTES_MAX: u64 = BLOCK_BYTES_MAX + 4096;

/// Most requests of an Object tier that are under way at a time.
pub const OBJECT_REQUESTS_MAX: usize = 1024;
/// Tries of one request of an Object tier, the first one included, where its deadline leaves time.
pub const OBJECT_TRIES_MAX: u32 = 4;
/// Requests for epochs, and as many for removals, that an Object tier has under way at a time beside all others.
pub const OBJECT_APART_MAX: usize = 4;
/// How long, in milliseconds, a store must have been silent for a caller's deadline to count as a failure of the store's.
pub const OBJECT_CUT_MS: u64 = 500;
/// First and longest pause, in milliseconds, before an Object tier tries a request again.
pub const OBJECT_PAUSE_MS: (u64, u64) = (50, 2_000);
/// First and longest pause, in milliseconds, of all requests after a store has said that they are too many.
pub const OBJECT_SLOW_DOWN_MS: (u64, u64) = (100, 10_000);
/// Failures in a row after which an Object tier asks its store nothing for a while.
pub const OBJECT_FAILURES_MAX: u32 = 5;
/// First and longest such while, in milliseconds.
pub const OBJECT_OFF_MS: (u64, u64) = (1_000, 60_000);
/// How long, in seconds, a store may still carry out a write that it has not answered.
pub const OBJECT_DOUBT_S: u64 = 120;
/// Blocks that one lookup asks a store about at a time, at most; the first one goes alone.
pub const OBJECT_PROBE_BLOCKS_MAX: usize = 64;
/// Objects that one request deletes.
pub const OBJECT_DELETES_MAX: usize = 1_000;
/// Pause, in milliseconds, between two requests that delete objects of past epochs.
pub const OBJECT_SWEEP_PAUSE_MS: u64 = 1_000;
/// Threads of an Object tier.
pub const OBJECT_THREADS: usize = 4;
/// Changes of what can be read where that a depot keeps for those who follow its events: 40 bytes each.
pub const EVENTS_KEPT_MAX: usize = 1 << 16;
/// Of these, the most that one request looks at; events of all of them fit into a frame.
pub const EVENTS_LOOKS: usize = 4096;
/// Blocks in a piece of a snapshot.
pub const SNAPSHOT_HASHES_MAX: usize = 4096;
/// Blocks in all places that a client that follows events keeps in mind: about 32 bytes each.
pub const FOLLOWED_BLOCKS_MAX: usize = 1 << 22;
/// Changes that it keeps for a caller who does not take them, before it stops reading.
pub const FOLLOWED_CHANGES_MAX: usize = 1 << 16;
