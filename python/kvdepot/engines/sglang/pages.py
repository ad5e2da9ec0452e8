"""Where the bytes of SGLang's pages lie: a host pool's own addresses, in the same order for layouts of equal bytes.

A page consists of pieces. ``layer_first`` has one for each layer (keys and values), far apart in memory;
``page_first_direct`` has the same bytes in the same order, but contiguous. Both are cut into layers here, so that
engines with either layout share blocks. ``page_first``, ``page_head`` and ``page_first_kv_split`` have the bytes of a
page in another order: they are separate forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError
from kvdepot.layout import BlockLayout

BLOCK_BYTES_MAX = 1 << 30
PIECES_MAX = 65_536
BY_LAYER = "by_layer"
"""Form of a page whose pieces are layers: all keys, then all values."""
KNOWN = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}
"""Classes of pools whose pages are known to have that order, with the number of tensors per layer."""


class PoolPages(Protocol):
    """Where the pages of a pool are: ``Pages`` in host memory, ``DevicePages`` in a device's."""

    @property
    def pool(self) -> Any:
        """SGLang's pool."""

    @property
    def form(self) -> str:
        """Order of the bytes in a page."""

    @property
    def page_tokens(self) -> int:
        """Number of the pool's indices per page."""

    @property
    def size_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def layout(self) -> BlockLayout:
        """Layout of a page as a block."""

    @property
    def cuda_device(self) -> int | None:
        """Number of the CUDA device that holds the pages; ``None`` = host memory."""

    def attach(self, store: Any) -> None:
        """Tells a new store what its tasks take for granted."""

    def submit(self, store: Any, verb: str, hashes: Sequence[bytes], places: npt.NDArray[Any]) -> Any:
        """Begins a task over the pages at ``places``, and returns it."""


@dataclass(frozen=True)
class Pages:
    """The pages of one host pool.

    Attributes:
        pool: SGLang's host pool.
        page_tokens: number of the pool's indices per page.
        form: order of the bytes in a page.
        sizes: bytes of each piece of a page as stored in a block, in order.
        reported: number of pieces of a page that the pool reports.
        order: indexes of the reported pieces, in the order of a block; each is cut into ``cuts`` equal pieces.
        cuts: number of equal pieces that a reported piece is cut into.
    """

    pool: Any
    page_tokens: int
    form: str
    sizes: tuple[int, ...]
    reported: int
    order: tuple[int, ...]
    cuts: int

    @classmethod
    def of(cls, pool: Any, name: str) -> "Pages | None":
        """Returns the pages of a host pool; ``None`` for one without bytes, whose indices only refer to other pools.

        Raises:
            ConfigError: the pool does not report where its pages lie, or a page does not fit a block.
        """
        page_tokens = int(getattr(pool, "page_size", 1) or 1)
        try:
            first = _reported(pool, np.arange(page_tokens))
        except (NotImplementedError, ValueError) as error:
            layout = getattr(pool, "layout", "")
            raise ConfigError(
                f"pool {name}: layout {layout}: SGLang does not report where its pages are ({error}): "
                "start with --hicache-mem-layout page_first or page_first_direct"
            ) from error
        if first is None:
            return None
        sizes = [int(size) for size in first[1]]
        if not sizes or min(sizes) <= 0 or sum(sizes) > BLOCK_BYTES_MAX or len(sizes) > PIECES_MAX:
            raise ConfigError(
                f"pool {name}: a page has {len(sizes)} pieces of {sum(sizes)} bytes together: there must be 1 to "
                f"{PIECES_MAX}, each with bytes, all 1 GiB at most: choose a smaller --page-size"
            )
        return cls._ordered(pool, page_tokens, sizes)

    @classmethod
    def _ordered(cls, pool: Any, page_tokens: int, sizes: Sequence[int]) -> "Pages":
        layout, layers = str(getattr(pool, "layout", "")), int(getattr(pool, "layer_num", 0) or 0)
        tensors = KNOWN.get(type(pool).__name__, 0)
        if tensors and layers and len(set(sizes)) == 1:
            if layout == "layer_first" and len(sizes) == tensors * layers:
                order = tuple(layer * tensors + tensor for tensor in range(tensors) for layer in range(layers))
                return cls(pool, page_tokens, BY_LAYER, tuple(sizes), len(sizes), order, 1)
            if layout == "page_first_direct" and len(sizes) == tensors and sizes[0] % layers == 0:
                pieces = (sizes[0] // layers,) * (tensors * layers)
                return cls(pool, page_tokens, BY_LAYER, pieces, len(sizes), tuple(range(tensors)), layers)
        return cls(pool, page_tokens, layout, tuple(sizes), len(sizes), tuple(range(len(sizes))), 1)

    cuda_device: ClassVar[None] = None
    """Host memory."""

    @property
    def size_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.sizes)

    @property
    def layout(self) -> BlockLayout:
        """Layout of a block: one shard, with a tensor for each piece."""
        return BlockLayout(1, self.sizes)

    def attach(self, store: Any) -> None:
        """Does nothing: every task names its own addresses."""

    def submit(self, store: Any, verb: str, hashes: Sequence[bytes], places: npt.NDArray[Any]) -> Any:
        """Begins a dump or load of pages whose ``places`` are rows from ``addresses``. Returns the task."""
        return getattr(store, verb)(hashes, places, keep=self.pool)

    def addresses(self, host_indices: Any, count: int) -> npt.NDArray[np.uint64]:
        """Returns the addresses of the pieces of ``count`` pages: shape ``(count, len(sizes))``.

        Raises:
            ValueError: the indices are not those of ``count`` pages of this pool.
        """
        indices = len(host_indices)
        if indices != count * self.page_tokens:
            raise ValueError(f"{indices} indices for {count} pages of {self.page_tokens}")
        reported = _reported(self.pool, host_indices)
        if reported is None or len(reported[0]) != count * self.reported:
            raise ValueError(f"the pool reports {0 if reported is None else len(reported[0])} pieces of {count} pages")
        rows = np.asarray(reported[0], dtype=np.uint64).reshape(count, self.reported)[:, self.order]
        if self.cuts > 1:
            steps = np.arange(self.cuts, dtype=np.uint64) * np.uint64(self.sizes[0])
            rows = (rows[:, :, None] + steps).reshape(count, -1)
        return np.ascontiguousarray(rows)


def _reported(pool: Any, indices: Any) -> tuple[Sequence[int], Sequence[int]] | None:
    reported = pool.get_page_buffer_meta(indices)
    if reported is None:
        return None
    pointers, sizes = reported
    return pointers, sizes
