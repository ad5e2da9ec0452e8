"""Where SGLang's attention in torch reads sliding windows that have a pool of their own.

SGLang 0.5.23 writes them to the places of that pool, but reads at the places of the pool for full attention, so that
answers depend on which pages were free. Its kernels for GPUs translate both.
"""

import torch

from sgl_kernel.changed import after_import

MODULE = "sglang.srt.layers.attention.torch_native_backend"


def _translated(run):
    def attend(self, query, output, keys, values, req_to_token, requests, *rest, sliding_window_size=None, **more):
        if self.use_sliding_window_kv_pool and sliding_window_size is not None:
            req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token[requests])
            requests = torch.arange(len(requests))
        more["sliding_window_size"] = sliding_window_size
        return run(self, query, output, keys, values, req_to_token, requests, *rest, **more)

    return attend


def _translate(module):
    kind = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(kind, name, _translated(getattr(kind, name)))


def install():
    """Changes the backend when SGLang imports it."""
    after_import(MODULE, _translate)
