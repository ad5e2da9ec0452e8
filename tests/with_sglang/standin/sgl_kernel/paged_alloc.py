"""The two kernels by which SGLang 0.5.17 allocates pages on every platform, in torch: Triton has none for a CPU."""

import torch

from sgl_kernel.changed import after_import

MODULE = "sglang.srt.mem_cache.allocator.paged"


def _pages(tokens, page):
    return -(-int(tokens) // page)


def extend(prefix_lens, seq_lens, last_locations, free_pages, out, _, page):
    """Gives each request the rest of its last page, then new pages in the order of the free ones."""
    if sum(_pages(seq, page) - _pages(prefix, page) for prefix, seq in zip(prefix_lens, seq_lens, strict=True)) > len(
        free_pages
    ):
        return  # SGLang notices afterwards, and does not use what is in `out`
    found, taken = [], 0
    for prefix, seq, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_locations.tolist(), strict=True):
        rest = min(seq, _pages(prefix, page) * page) - prefix
        new = _pages(seq, page) - _pages(prefix, page)
        starts = free_pages[taken : taken + new] * page
        whole = (starts[:, None] + torch.arange(page)).reshape(-1)
        found += [torch.arange(last + 1, last + 1 + rest), whole[: seq - prefix - rest]]
        taken += new
    out.copy_(torch.cat(found))


def decode(seq_lens, last_locations, free_pages, out, _, page):
    """Gives each request the place of one more token."""
    taken = 0
    for row, (seq, last) in enumerate(zip(seq_lens.tolist(), last_locations.tolist(), strict=True)):
        if _pages(seq, page) > _pages(seq - 1, page):
            out[row] = free_pages[taken] * page
            taken += 1
        else:
            out[row] = last + 1


class _Kernel:
    """Is called like a kernel of Triton: with a grid in brackets first."""

    def __init__(self, run):
        self._run = run

    def __getitem__(self, grid):
        return self._run


def _replace(module):
    for kernel, ours in (("alloc_extend_kernel", extend), ("alloc_decode_kernel", decode)):
        if hasattr(module, kernel):
            setattr(module, kernel, _Kernel(ours))


def install():
    """Does nothing for releases that allocate without these kernels."""
    after_import(MODULE, _replace)
