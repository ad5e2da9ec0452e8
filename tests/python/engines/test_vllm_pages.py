"""Where the bytes of a page are in an engine's tensors: every layout that vLLM has, compared with numpy's indexing."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.engines.vllm.pages import group_pages, joined, layer_pages
from kvdepot.layout import BlockLayout

PAGES, LAYERS, HEADS, TOKENS, CONTENT = 6, 3, 2, 4, 8
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def tensor(array: np.ndarray) -> Any:
    """The part of a torch tensor that ``pages`` uses."""
    item = array.itemsize
    return SimpleNamespace(
        shape=array.shape,
        dtype=str(array.dtype),
        device=SimpleNamespace(type="cpu", index=None),
        stride=lambda: tuple(step // item for step in array.strides),
        element_size=lambda: item,
        data_ptr=lambda: array.ctypes.data,
    )


def layers_of(layout: str) -> list[np.ndarray]:
    """Per-layer views [B, H, N, C] of one allocation in a physical order."""
    order = LAYOUTS[layout]
    sizes = (LAYERS, PAGES, HEADS, TOKENS, CONTENT)
    backing = np.random.default_rng(1).integers(0, 60000, [sizes[axis] for axis in order], dtype=np.uint16)
    logical = backing.transpose(np.argsort(order))
    return [logical[layer] for layer in range(LAYERS)]


def read(runs: Any, page: int) -> bytes:
    return b"".join(ctypes.string_at(run.base + page * run.stride, run.size) for run in runs)


@pytest.mark.parametrize(("layout", "layerwise"), [(layout, how) for layout in LAYOUTS for how in (True, False)])
def test_runs_are_the_bytes_of_the_page(layout: str, layerwise: bool) -> None:
    arrays = layers_of(layout)
    names = [f"layers.{index}" for index in range(LAYERS)]
    found = group_pages(names, {name: tensor(a) for name, a in zip(names, arrays, strict=True)}, PAGES, layerwise)
    assert len(found.shards) == (LAYERS if layerwise else 1)
    assert found.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * 2
    for page in range(PAGES):
        data = b"".join(read(shard, page) for shard in found.shards)
        if layerwise:
            assert data == b"".join(in_memory_order(array[page]).tobytes() for array in arrays)
        else:  # the layout's own order without its blocks: layers of one head may follow each other
            order = [axis - (axis > 1) for axis in LAYOUTS[layout] if axis != 1]
            assert data == np.stack([array[page] for array in arrays]).transpose(order).tobytes()


def in_memory_order(page: np.ndarray) -> np.ndarray:
    """Returns the page with its dimensions from the widest stride to the narrowest."""
    return page.transpose(np.argsort([-step for step in page.strides], kind="stable"))


@pytest.mark.parametrize(
    ("layout", "ratio"), [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 1), ("BLNHC", 1), ("LBHNC", 2), ("LBNHC", 2)]
)
def test_a_page_that_is_contiguous_is_one_run_whatever_the_order_of_its_dimensions(layout: str, ratio: int) -> None:
    """Even if the kernel sees a block as several: NHD is vLLM's default on GPUs."""
    for array in layers_of(layout):
        (run,) = layer_pages(tensor(array), PAGES // ratio).runs
        assert run.size == HEADS * TOKENS * CONTENT * 2 * ratio


def test_forms_tell_layouts_apart_whose_dimensions_have_the_same_sizes() -> None:
    """As many heads as tokens: the strides are the same numbers in another order (P8)."""
    page = np.zeros((PAGES, HEADS, HEADS, CONTENT), dtype=np.uint16)
    inside, outside = layer_pages(tensor(page), PAGES), layer_pages(tensor(page.transpose(0, 2, 1, 3)), PAGES)
    assert inside.runs == outside.runs
    assert inside.form != outside.form
    assert inside.form == "uint16:[2, 2, 8]/[32, 16, 2]x1"


def test_a_block_outermost_layout_is_one_copy_a_block() -> None:
    arrays = layers_of("BLHNC")
    caches = {str(index): tensor(array) for index, array in enumerate(arrays)}
    whole = group_pages(list(caches), caches, PAGES, layerwise=False)
    assert whole.layout == BlockLayout(1, [LAYERS * HEADS * TOKENS * CONTENT * 2])


def test_kernel_blocks_are_parts_of_a_page() -> None:
    whole = np.arange(PAGES * 2 * 16, dtype=np.uint8).reshape(PAGES * 2, 16)
    pages = layer_pages(tensor(whole), PAGES)
    assert [(run.size, run.stride) for run in pages.runs] == [(32, 32)]
    assert read(pages.runs, 3) == whole[6:8].tobytes()


def test_padding_between_pages_is_left_out() -> None:
    padded = np.arange(PAGES * 48, dtype=np.uint8).reshape(PAGES, 48)[:, :40]
    pages = layer_pages(tensor(padded), PAGES)
    assert [(run.size, run.stride) for run in pages.runs] == [(40, 48)]


def test_names_for_the_same_memory_count_once() -> None:
    arrays = layers_of("LBHNC")
    caches = {"own": tensor(arrays[0]), "shared": tensor(arrays[0]), "other": tensor(arrays[1])}
    found = group_pages(list(caches), caches, PAGES, layerwise=True)
    assert found.layer_names == ("own", "other")
    assert found.shard_of_layer() == {"own": 0, "other": 1}


@pytest.mark.parametrize("shape", [(PAGES - 1, 3), (PAGES + 1, 3), (3, PAGES), (0, PAGES), ()])
def test_tensors_whose_first_dimension_does_not_count_blocks_are_refused(shape: tuple[int, ...]) -> None:
    """Another dimension of the right size counts something else: heads, or tokens."""
    with pytest.raises(ValueError, match="does not count"):
        layer_pages(tensor(np.zeros(shape, dtype=np.uint8)), PAGES)


def test_a_layer_without_a_tensor_is_refused() -> None:
    """Its bytes would be missing in every block (P1)."""
    with pytest.raises(ValueError, match="no tensor for layer b"):
        group_pages(["a", "b"], {"a": tensor(layers_of("LBHNC")[0])}, PAGES, layerwise=True)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC"])
def test_a_block_is_copied_in_the_order_of_its_addresses(layout: str) -> None:
    """One copy, though the group lists its layers in another order, which is then a fact."""
    arrays = layers_of(layout)
    caches = {str(index): tensor(array) for index, array in enumerate(arrays)}
    found = group_pages(list(reversed(caches)), caches, PAGES, layerwise=False)
    assert found.layout == BlockLayout(1, [LAYERS * HEADS * TOKENS * CONTENT * 2])
    assert any(form.startswith("order:") for form in found.forms)
    straight = group_pages(list(caches), caches, PAGES, layerwise=False)
    assert found.shards == straight.shards
    assert found.forms != straight.forms


def test_only_neighbours_with_one_stride_are_joined() -> None:
    arrays = layers_of("LBHNC")
    runs = [run for array in arrays for run in layer_pages(tensor(array), PAGES).runs]
    assert len(joined(runs)) == LAYERS
