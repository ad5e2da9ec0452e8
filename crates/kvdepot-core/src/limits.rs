//! All limits of the depot, because everything has one (P7).

/// Alignment of slots in the pool and of payloads in files: a page, as O_DIRECT requires.
pub const BLOCK_ALIGN_BYTES: u64 = 4096;
/// Largest block that a layout may describe.
pub const BLOCK_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of shards of a block.
pub const SHARDS_MAX: usize = 4096;
/// Maximum number of tensors of a block, over all shards.
pub const TENSORS_MAX: usize = 65_536;
/// Maximum number of pieces of the engine's memory that a block of registered pages is copied from and to.
pub const PAGE_PIECES_MAX: usize = 262_144;
/// Maximum length of an engine's hash.
pub const ENGINE_HASH_BYTES_MAX: usize = 64;
/// Maximum length of a canonical namespace description.
pub const NAMESPACE_SPEC_BYTES_MAX: usize = 64 << 10;
/// Maximum number of namespaces that one depot knows at a time; one client may use half of them.
pub const NAMESPACES_MAX: usize = 4096;
/// Maximum number of namespaces with blocks in one Posix tier, including those that its depot does not know now.
pub const NAMESPACES_STORED_MAX: usize = 32_768;
/// Maximum number of contiguous runs of a slot.
pub const SLOT_RUNS_MAX: usize = 64;
/// Number of slots that an eviction may pass over, because they cannot be evicted, without changing their order; see
/// `EvictionPolicy::victim`.
pub const EVICTION_PASSED_OVER_MAX: usize = 128;
/// Maximum number of leases of one connection.
pub const LEASES_PER_OWNER_MAX: usize = 1 << 20;
/// Maximum length of a pipeline's spelling.
pub const PIPELINE_TEXT_BYTES_MAX: usize = 256;
/// Size of the pool's extents, which are populated and registered as one.
pub const POOL_EXTENT_BYTES: u64 = 1 << 30;
/// Maximum number of regions of a pool.
pub const POOL_REGIONS_MAX: usize = 32;
/// Minimum size of a pool.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// Maximum number of block hashes in one request of the local door; clients split longer batches.
pub const BATCH_HASHES_MAX: usize = 4096;
/// Maximum size of a frame of the local door.
pub const FRAME_BYTES_MAX: usize = 128 << 10;
/// Maximum number of connections of the local door.
pub const CONNECTIONS_MAX: usize = 1024;
/// Maximum number of connections above the local door's limit that wait for their refusal; older ones are closed
/// without one.
pub const REFUSALS_MAX: usize = 16;
/// Maximum number of connections that the local door accepts before it checks whether it must shut down.
pub const ACCEPTS_AT_ONCE_MAX: usize = 64;
/// Longest time, in milliseconds, that one request may wait for dirty blocks to be written.
pub const DRAIN_WAIT_MS_MAX: u32 = 600_000;
/// Most namespaces (ranks x groups) that one claim may span.
pub const CLAIM_NAMESPACES_MAX: usize = 512;
/// Most block hashes of one claim, which come in as many frames as they need; a longer prompt is claimed up to here.
pub const CLAIM_HASHES_MAX: usize = 1 << 20;
/// Most blocks that one claim may ask for, over all of its namespaces; a claim over more is cut at the end.
pub const CLAIM_BLOCKS_MAX: usize = 1 << 21;
/// Most characters of what a client calls a claim; the rest is cut off.
pub const CLAIM_LABEL_CHARS_MAX: usize = 96;
/// Most claims that one connection may hold.
pub const CLAIMS_PER_CONNECTION_MAX: usize = 65_536;

/// Maximum number of closed connections whose slots wait for their process's exit; further ones still count as open.
pub const QUARANTINED_CONNECTIONS_MAX: usize = 8192;
/// How long slots of a closed connection are kept if its process's exit cannot be watched: the kernel has neither
/// SO_PEERPIDFD (Linux 6.5) nor a pid for it in this pid namespace.
pub const UNWATCHED_EXIT_WAIT_MS: u64 = 30_000;
/// How long slots of a connection that was closed without a goodbye are kept while its process continues to run: twice
/// the default of `timeout_ms`, by which every copy of a device that does not hang has ended.
pub const SILENT_CLOSE_WAIT_MS: u64 = 60_000;

const _: () = assert!(BLOCK_ALIGN_BYTES.is_power_of_two());
const _: () = assert!(BATCH_HASHES_MAX * 16 + 8192 < FRAME_BYTES_MAX);
const _: () = assert!(POOL_EXTENT_BYTES.is_multiple_of(BLOCK_ALIGN_BYTES));

/// Maximum number of threads of one kind (reading or writing) of one I/O engine.
pub const IO_THREADS_MAX: usize = 512;
/// Maximum number of requests waiting in one queue of an I/O engine; more are refused with `Busy`.
pub const IO_QUEUE_MAX: usize = 65_536;
/// Maximum number of threads of one I/O engine that may be written off while stuck in the operating system.
pub const IO_WORKERS_WRITTEN_OFF_MAX: usize = 64;
/// Number of consecutive reads before a waiting write gets a turn.
pub const IO_READS_IN_A_ROW_MAX: usize = 64;
/// Maximum number of reads in flight of a thread of an I/O engine with kernel queues.
pub const IO_FLIGHTS_MAX: usize = 16;
/// Bytes in flight at which such a thread takes no more requests.
pub const IO_FLIGHT_BYTES_MAX: usize = 64 << 20;
/// Maximum delay, in milliseconds, until an expired request is notified.
pub const IO_WATCHDOG_TICK_MS: u64 = 5;
/// Maximum number of pieces of memory in one vectored call on Linux.
pub const IO_VECTORS_MAX: usize = 1024;
/// Maximum size of a small file (`namespace.json`) that is read completely.
pub const SMALL_FILE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of directories of one Posix tier.
pub const TIER_DIRECTORIES_MAX: usize = 255;
/// Maximum number of corrupt files kept for inspection, per namespace.
pub const QUARANTINE_FILES_MAX: usize = 16;
/// Maximum number of blocks known to be absent that a shared tier remembers.
pub const ABSENT_KEYS_MAX: usize = 65_536;
/// How long a shared tier assumes that a block is absent: another node may write it at any time.
pub const ABSENT_TTL_MS: u64 = 2_000;
/// Maximum number of recency updates waiting for the disk; more are dropped.
pub const TOUCH_QUEUE_MAX: usize = 65_536;
/// Minimum interval between two writes of a block's recency to the disk.
pub const TOUCH_INTERVAL_MS: u64 = 60_000;
/// Age at which another host's temporary file counts as left behind.
pub const FOREIGN_TEMPORARY_AGE_S: u64 = 3_600;
/// Interval between a tier's own sweeps for files left behind.
pub const SWEEP_INTERVAL_S: u64 = 600;
/// Maximum time, in milliseconds, that opening or advancing a namespace waits for a file system.
pub const NAMESPACE_OPEN_MS: u64 = 4_000;
/// Maximum number of namespaces that a tier of files opens or advances at a time: each takes a thread until its file
/// system answers.
pub const NAMESPACES_OPENING_MAX: usize = 64;
/// Pause, in milliseconds, before storing an epoch is retried.
pub const EPOCH_RETRY_MS: u64 = 1_000;
/// Maximum number of tries to claim an epoch that other nodes claim at the same time.
pub const EPOCH_CLAIMS_MAX: usize = 64;
/// Minimum interval between two writes of a Posix tier's index to its directories, if much has changed.
pub const CHECKPOINT_INTERVAL_S: u64 = 300;
/// Maximum number of evicted and lost blocks that a tier collects before it notifies the depot; more are not reported.
pub const TIER_EVENTS_MAX: usize = 65_536;
/// Maximum number of writers of one block that wait for the first of them.
pub const WRITERS_WAITING_MAX: usize = 1024;

const _: () = assert!(SLOT_RUNS_MAX + 2 <= IO_VECTORS_MAX);
const _: () = assert!(NAMESPACE_SPEC_BYTES_MAX * 2 < SMALL_FILE_BYTES_MAX);

/// Maximum number of removals that one tier, or one server of it, owes. Beyond it the tier or server is no longer used
/// for the namespace until that is reset.
pub const REMOVALS_OWED_MAX: usize = 1 << 13;

/// How long after its deadline an operation of a tier counts as hung.
pub const OVERDUE: std::time::Duration = std::time::Duration::from_secs(1);

/// Maximum number of writes in flight at a tier, even if it takes more bytes.
pub const WRITES_IN_FLIGHT_MAX: usize = 1 << 11;

/// Maximum number of servers of one Remote tier.
pub const REMOTE_SERVERS_MAX: usize = 64;
/// Maximum number of connections to one server of a Remote tier.
pub const REMOTE_CONNECTIONS_MAX: usize = 64;
/// Maximum number of closed namespaces that a Remote tier remembers because a server has not taken their reset.
pub const REMOTE_OWED_CLOSED_MAX: usize = 1024;
/// Maximum number of requests waiting for one server of a Remote tier; more are refused with `Busy`.
pub const REMOTE_QUEUE_MAX: usize = 8192;
/// Maximum number of blocks of one get or put of a Remote tier: that many wait when a connection breaks.
pub const REMOTE_BATCH_BLOCKS_MAX: usize = 32;
/// Maximum size of one put of several blocks: a get behind it waits that long.
pub const REMOTE_BATCH_BYTES_MAX: u64 = 8 << 20;
/// Size of waiting puts at which a second connection of a Remote tier takes some of them; smaller ones are sent
/// together.
pub const REMOTE_SECOND_WRITER_BYTES: u64 = 256 << 10;
/// Maximum number of blocks of which a tier over a network remembers whether they are present.
pub const KNOWN_KEYS_MAX: usize = 1 << 20;
/// Number of batches of reads that are sent before a waiting write.
pub const REMOTE_READS_IN_A_ROW_MAX: u32 = 16;
/// Bytes passed to a socket in one call, so that a slow peer is seen to make progress.
pub const REMOTE_SEND_BYTES_MAX: usize = 256 << 10;
/// Maximum delay, in milliseconds, until an expired request of a Remote tier is notified.
pub const REMOTE_TICK_MS: u64 = 10;
/// Maximum number of connections of a Remote tier to one server that ended in the middle of a write and that the server
/// has not closed. Beyond it the tier does not connect to the server.
pub const REMOTE_PARTING_MAX: usize = 64;
/// Interval, in milliseconds, at which an idle connection of a Remote tier checks whether it has ended.
pub const REMOTE_IDLE_LOOK_MS: u64 = 500;
/// First and longest pause of a Remote tier, in milliseconds, before it retries to reach a server.
pub const REMOTE_PAUSE_MS: (u64, u64) = (50, 2_000);
/// Maximum number of epochs of a namespace on an InfiniStore server, including the first: each is an entry there, and
/// is queried one by one.
pub const REMOTE_FOREIGN_EPOCHS_MAX: u32 = 1 << 14;
/// Maximum time, in multiples of the timeout, for discarding the rest of an InfiniStore server's value that is no
/// longer waited for.
pub const REMOTE_FOREIGN_DISCARD_TIMEOUTS: u32 = 16;
/// Maximum size of an InfiniStore server's answer that is read only to be discarded.
pub const REMOTE_FOREIGN_VALUE_BYTES_MAX: u64 = BLOCK_BYTES_MAX + 4096;

/// Maximum number of concurrent requests of an Object tier.
pub const OBJECT_REQUESTS_MAX: usize = 1024;
/// Maximum number of tries of one request of an Object tier, including the first, if its deadline leaves time.
pub const OBJECT_TRIES_MAX: u32 = 4;
/// Maximum number of concurrent requests of an Object tier for epochs, and of those for removals, in addition to all
/// others.
pub const OBJECT_APART_MAX: usize = 4;
/// How long, in milliseconds, a store must have been silent, in one request or in several, for callers' deadlines to count
/// as its failure.
pub const OBJECT_CUT_MS: u64 = 500;
/// First and longest pause, in milliseconds, before an Object tier retries a request.
pub const OBJECT_PAUSE_MS: (u64, u64) = (50, 2_000);
/// First and longest pause, in milliseconds, of all requests after a store has reported too many requests.
pub const OBJECT_SLOW_DOWN_MS: (u64, u64) = (100, 10_000);
/// Number of consecutive failures after which an Object tier pauses its requests.
pub const OBJECT_FAILURES_MAX: u32 = 5;
/// First and longest duration of that pause, in milliseconds.
pub const OBJECT_OFF_MS: (u64, u64) = (1_000, 60_000);
/// How long, in seconds, a store may still carry out a write that it has not answered.
pub const OBJECT_DOUBT_S: u64 = 120;
/// Maximum number of blocks that one lookup asks a store about at a time; the first one is asked alone.
pub const OBJECT_PROBE_BLOCKS_MAX: usize = 64;
/// Maximum number of objects that one request deletes.
pub const OBJECT_DELETES_MAX: usize = 1_000;
/// Pause, in milliseconds, between two requests that delete objects of past epochs.
pub const OBJECT_SWEEP_PAUSE_MS: u64 = 1_000;
/// Maximum number of blocks in a pack, an object with several small blocks.
pub const OBJECT_PACK_BLOCKS_MAX: usize = 1 << 11;
/// Minimum number of blocks that fit into a pack, or they are not packed.
pub const OBJECT_PACK_BLOCKS_MIN: u64 = 4;
/// How long, in milliseconds, a small block waits for others of its pack.
pub const OBJECT_PACK_LINGER_MS: u64 = 200;
/// Time, in milliseconds, that a block must have left after that: with less it gets an object of its own.
pub const OBJECT_PACK_LEAST_MS: u64 = 2_000;
/// Pause, in milliseconds, between two lists of a namespace's packs.
pub const OBJECT_PACK_LIST_MS: u64 = 10_000;
/// How far, in milliseconds, the clocks of depots that share a bucket may differ, including the time that a pack takes to be
/// written: later lists go back that far.
pub const OBJECT_PACK_SKEW_MS: u64 = 600_000;
/// How long, in milliseconds, opening a namespace waits for the first list of its packs.
pub const OBJECT_PACK_OPEN_MS: u64 = 1_000;
/// Maximum size of one read of adjacent blocks of a pack; larger ones are divided.
pub const OBJECT_PACK_READ_BYTES_MAX: u64 = 4 << 20;
/// How long, in milliseconds, a read of a block of a pack waits for reads of adjacent ones.
pub const OBJECT_PACK_READ_LINGER_MS: u64 = 2;
/// Number of packs whose heads are read concurrently.
pub const OBJECT_PACK_HEADS_MAX: usize = 16;
/// Number of full packs whose blocks an Object tier takes at a time.
pub const OBJECT_PACKS_IN_FLIGHT: u64 = 16;
/// Maximum number of blocks in packs that an Object tier knows, at about 100 bytes each.
pub const OBJECT_PACKED_BLOCKS_MAX: u64 = 1 << 22;
/// Maximum number of packs that one list takes from a bucket, the newest.
pub const OBJECT_PACKS_LISTED_MAX: usize = 1 << 20;
/// Maximum number of packs of a namespace that are being deleted, and of deleted ones that are remembered.
pub const OBJECT_PACKS_DOOMED_MAX: usize = 1 << 12;
/// Number of failed reads after which the head of a pack is not read again.
pub const OBJECT_PACK_HEAD_TRIES: u8 = 3;
/// Number of threads of an Object tier.
pub const OBJECT_THREADS: usize = 4;

/// Maximum size of a frame between a Mooncake tier and its helper.
pub const MOONCAKE_FRAME_BYTES_MAX: usize = 1 << 20;
/// Maximum number of blocks of one call of Mooncake.
pub const MOONCAKE_BATCH_BLOCKS_MAX: usize = 64;
/// Maximum number of calls of Mooncake that have not ended, including those that nobody waits for any more.
pub const MOONCAKE_PENDING_MAX: usize = 64;
/// Maximum number of concurrent calls for reads and lookups of a Mooncake tier, and of those for writes.
pub const MOONCAKE_CALLS_MAX: usize = 24;
/// Maximum number of batches of a Mooncake tier that wait for a call, for reads and lookups, and for writes.
pub const MOONCAKE_QUEUE_MAX: usize = 8192;
/// How long, in milliseconds, a call of Mooncake may hang after its deadline before its process is killed. With the
/// longest timeout it is less than the 60 s after which Mooncake itself gives a transfer up without ending it.
pub const MOONCAKE_HANG_MS: u64 = 10_000;
/// How long, in milliseconds, the helper of a Mooncake tier may read nothing before it is killed.
pub const MOONCAKE_SEND_MS: u64 = 2_000;
/// Maximum time, in milliseconds, until the helper of a Mooncake tier has connected. Mooncake itself tries for 90 s, and
/// registering much memory takes long.
pub const MOONCAKE_SETUP_MS: u64 = 180_000;
/// Maximum time, in milliseconds, that the end of a Mooncake tier waits for the end of its helper, which it has killed.
pub const MOONCAKE_END_MS: u64 = 5_000;
/// First and longest pause, in milliseconds, before the helper of a Mooncake tier is started again.
pub const MOONCAKE_RESTART_MS: (u64, u64) = (200, 10_000);
/// Interval, in milliseconds, at which a Mooncake tier looks for calls that hang.
pub const MOONCAKE_TICK_MS: u64 = 50;
/// Number of tries of a removal that Mooncake's leases refuse, and the pause between them in milliseconds.
pub const MOONCAKE_REMOVE_TRIES: (u32, u64) = (5, 200);
/// Number of tries to remove a corrupt block, one a second: a lease of Mooncake's default lasts 10 s.
pub const MOONCAKE_CORRUPT_TRIES: u32 = 60;
/// Maximum number of corrupt blocks that a Mooncake tier treats as absent until they are removed.
pub const MOONCAKE_CORRUPT_MAX: usize = 4096;
/// Changes of what can be read where that a depot keeps for those who follow its events: 40 bytes each.
pub const EVENTS_KEPT_MAX: usize = 1 << 16;
/// Maximum number of these that one request looks at. Its answer, with an id for each namespace, fits into a frame.
pub const EVENTS_LOOKS: usize = 3072;
/// Blocks in a piece of a snapshot.
pub const SNAPSHOT_HASHES_MAX: usize = 4096;
/// Blocks in all places that a client that follows events keeps in mind: about 32 bytes each.
pub const FOLLOWED_BLOCKS_MAX: usize = 1 << 22;
/// Changes that it keeps for a caller who does not take them, before it stops reading.
pub const FOLLOWED_CHANGES_MAX: usize = 1 << 16;
