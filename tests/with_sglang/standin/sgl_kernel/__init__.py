"""A stand-in for ``sgl_kernel``, with which SGLang starts on a CPU that its kernels are not built for.

Every name can be imported. The kernels that SGLang's HiCache and its latent attention need on such a machine are
implemented in torch; all others raise when called. It must precede all other packages in the path; SGLang itself is
unchanged, except for two kernels of releases before 0.5.23 (``paged_alloc``) and for reads of sliding windows since
then (``window_reads``).
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types

import torch

__version__ = "0.0.0+standin"

# SGLang uses its own mock if this cannot be imported.
ABSENT = "scalar_type"


def _missing(name):
    def call(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in")

    return call


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, starts, ends, locations, *rest):
    """Records where the tokens of each request lie."""
    done = 0
    for request, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=False):
        count = int(end) - int(start)
        req_to_token[request, int(start) : int(end)] = locations[done : done + count].to(req_to_token.dtype)
        done += count


def __getattr__(name):
    if name.startswith("__") or name == ABSENT:
        raise AttributeError(name)
    return _missing(name)


class _Anything(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of this package that have no file."""

    def find_spec(self, name, path, target=None):
        if not name.startswith(f"{__name__}.") or name == f"{__name__}.{ABSENT}":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return _missing(f"{spec.name}.{name}")

        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = attribute
        return module

    def exec_module(self, module):
        pass


if not any(type(one).__name__ == "_Anything" for one in sys.meta_path):
    # Last, so that a file takes precedence.
    sys.meta_path.append(_Anything())


def _cudart():
    """Does nothing: SGLang registers host pools with CUDA everywhere, but there is no driver here."""
    return types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=str)


def _grow(kind, **methods):
    for name, method in methods.items():
        if name not in kind.__dict__:
            setattr(kind, name, method)


if not torch.cuda.is_available():
    torch.cuda.cudart = _cudart
    # Several ranks use gloo if NCCL cannot be loaded; they would call the stub that torch is linked to.
    os.environ["SGLANG_NCCL_SO_PATH"] = "no-nccl"

if not torch.cuda.is_available() and "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR" in os.environ:
    # HiCache's generic transfers pin their memory.
    _zeros = torch.zeros

    def _unpinned(*sizes, pin_memory=False, **options):
        return _zeros(*sizes, **options)

    torch.zeros = _unpinned

# HiCache expects streams and events of a CPU to have the methods of a GPU's. All work is done when its call returns.
_grow(
    torch.cpu.Stream,
    synchronize=lambda self: None,
    wait_event=lambda self, event: None,
    query=lambda self: True,
    record_event=lambda self, event=None: event or torch.cpu.Event(),
)
torch.cpu.Event.__init__ = lambda self, *_, **__: None
for _name, _method in {
    "query": lambda self: True,
    "record": lambda self, stream=None: None,
    "synchronize": lambda self: None,
    "wait": lambda self, stream=None: None,
    "elapsed_time": lambda self, other: 0.0,
}.items():
    setattr(torch.cpu.Event, _name, _method)

# Host pools import the transfers for GPUs only; on a CPU their names are looked up here, last.
_transfers = importlib.import_module(f"{__name__}.kvcacheio")
for _name in dir(_transfers):
    if _name.startswith("transfer_kv_"):
        setattr(builtins, _name, getattr(_transfers, _name))

importlib.import_module(f"{__name__}.attention").install()

# Later releases allocate pages without Triton on a CPU.
if tuple(map(int, importlib.metadata.version("sglang").split(".")[:3])) < (0, 5, 23):
    importlib.import_module(f"{__name__}.paged_alloc").install()
else:
    importlib.import_module(f"{__name__}.window_reads").install()
