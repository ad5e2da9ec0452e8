"""Copies between SGLang's device pages and host pages, in torch and numpy: plain and latent attention, not page_head.

``lf`` is layer first, ``pf`` page first. Names and arguments are those that SGLang 0.5.23 calls.
"""

import ctypes

import numpy as np


def _rows(pointer, row_bytes, count):
    memory = (ctypes.c_uint8 * (row_bytes * count)).from_address(int(pointer))
    return np.frombuffer(memory, dtype=np.uint8).reshape(count, row_bytes)


def _array(tensor):
    return tensor.detach().to("cpu").numpy()


def _gather(layer_pointers, into, sources, row_bytes):
    """Copies rows of every layer to the place that ``into`` returns for it."""
    count = int(sources.max()) + 1
    for number, pointer in enumerate(_array(layer_pointers).tolist()):
        target, places = into(number)
        target[places] = _rows(pointer, row_bytes, count)[sources]


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_pf_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, *_, **__):
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, *_, **__):
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    sources, places = _array(src_indices), _array(dst_indices)
    for layers, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        pointers, count = _array(targets).tolist(), int(places.max()) + 1

        def into(number, pointers=pointers, count=count):
            return _rows(pointers[number], item_size, count), places

        _gather(layers, into, sources, item_size)


def _to_pages(layers, target, src_indices, dst_indices, item_size, dst_layout_dim):
    rows, places = _rows(target.data_ptr(), dst_layout_dim, target.shape[0]), _array(dst_indices)
    _gather(
        layers,
        lambda number: (rows[:, number * item_size : (number + 1) * item_size], places),
        _array(src_indices),
        item_size,
    )


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    _to_pages(src_k_layers, dst_k, src_indices, dst_indices, item_size, dst_layout_dim)
    _to_pages(src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    _to_pages(src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    for kind, target in enumerate(dst_ptrs):
        for layer in range(layers):
            target[dst_indices // page_size, layer, dst_indices % page_size] = src_ptrs[kind * layers + layer][
                src_indices
            ]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    from . import _missing

    return _missing(f"kvcacheio.{name}")
