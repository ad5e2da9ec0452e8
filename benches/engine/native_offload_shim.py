"""Makes vLLM's own OffloadingConnector run on a CPU, so that it can be measured beside kvdepot.

vLLM has a copy worker for GPUs only. This one is for engines whose KV cache is already in host memory; lookup,
eviction, promotion between tiers and the file tier are vLLM's own code. Named in ``kv_connector_extra_config`` as
``spec_module_path``, with ``spec_name`` ``HostCpuSpec`` or ``HostTieringSpec``.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Rows = Callable[[int], torch.Tensor]


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the engine's pages and vLLM's chunks on its own thread."""

    def __init__(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, rows: Rows, close: Callable[[], None] | None = None
    ) -> None:
        """``rows(size)`` returns the next tensor with one row of ``size`` bytes per chunk; ``close`` frees them all."""
        self._close = close
        self._groups = caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._pages: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        for cache in caches.tensors:
            size = cache.page_size_bytes
            self._pages.append(cache.tensor.view(torch.int8).view(-1, size))
            self._chunks.append(rows(size * blocks_per_chunk).unflatten(1, (blocks_per_chunk, size)))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-copy")
        self._jobs: dict[int, Future[tuple[int, float]]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copies from the engine to chunks."""
        self._jobs[job_id] = self._thread.submit(self._move, src_spec, dst_spec, storing=True)
        return True

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copies from chunks to the engine."""
        self._jobs[job_id] = self._thread.submit(self._move, dst_spec, src_spec, storing=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns jobs that have ended since the last call."""
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [TransferResult(job_id, True, *self._jobs.pop(job_id).result()) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Returns when these jobs have ended; ``get_finished`` still reports them."""
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        """Ends the thread and releases vLLM's memory, which is unmapped next."""
        self._thread.shutdown(wait=True)
        self._chunks.clear()
        if self._close is not None:
            self._close()

    def _move(self, engine: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, *, storing: bool) -> tuple[int, float]:
        started_s, moved = time.perf_counter(), 0
        page_start = chunk_start = 0
        for refs, count, first in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            if count == 0:
                continue
            # A request's blocks are consecutive; the first may lie in the middle of its chunk.
            index = first + np.arange(count)
            nth_chunk = index // self._blocks_per_chunk - first // self._blocks_per_chunk
            pages = torch.from_numpy(engine.block_ids[page_start : page_start + count].astype(np.int64))
            chunks = torch.from_numpy(host.block_ids[chunk_start + nth_chunk].astype(np.int64))
            inside = torch.from_numpy(index % self._blocks_per_chunk)
            for ref in refs:
                ours = self._pages[ref.tensor_idx][:, : ref.page_size_bytes]
                theirs = self._chunks[ref.tensor_idx][:, :, : ref.page_size_bytes]
                if storing:
                    theirs[chunks, inside] = ours[pages]
                else:
                    ours[pages] = theirs[chunks, inside]
                moved += count * ref.page_size_bytes
            page_start += count
            chunk_start += int(nth_chunk[-1]) + 1
        return moved, time.perf_counter() - started_s


class HostCpuSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """The host-memory tier of vLLM."""

    _host_worker: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker, which is created once."""
        if self._host_worker is None:

            def rows(size: int) -> torch.Tensor:
                return torch.zeros((self.num_chunks, size), dtype=torch.int8)

            self._host_worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, rows)
        return self._host_worker


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiers: host memory that scheduler and workers share, with secondary tiers below."""

    _host_worker: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker, which is created once, on the shared memory that the secondary tiers read."""
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostCopyWorker(
                kv_caches, self.blocks_per_chunk, region.create_next_worker_view, region.cleanup
            )
        return self._host_worker
