"""The CUDA driver as an engine uses it, through ctypes: memory, streams, events; and the stand-in's controls."""

import ctypes
from ctypes import byref, c_uint, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

LOG_BYTES_MAX = 1 << 16
NON_BLOCKING = 1
NO_TIMING = 2
CAPTURE_RELAXED = 2


class CudaError(RuntimeError):
    """A call of the driver failed."""


class Device:
    """One device and the engine's own use of it: what vLLM does through torch."""

    def __init__(self, library: Path, ordinal: int, seed: int) -> None:
        self._cuda = ctypes.CDLL(str(library))
        self.ordinal = ordinal
        if self.is_standin:
            self._cuda.standin_reset(ordinal, c_uint64(seed))
        self._call("cuInit", 0)
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
        self._call("cuCtxPushCurrent_v2", context)
        self.compute = self._stream()
        self._pinned: list[tuple[int, int]] = []
        self._events: list[int] = []

    @property
    def is_standin(self) -> bool:
        """Whether this is the stand-in, which works with delays and in a random legal order."""
        return hasattr(self._cuda, "standin_reset")

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise CudaError(f"{name} failed with {code}")

    def _call_relaxed(self, name: str, *arguments: object) -> None:
        """Allocates as torch does: in the thread's default mode that would end the capture of a graph."""
        mode = ctypes.c_int(CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        self._call(name, *arguments)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def _stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(NON_BLOCKING), 0)
        assert stream.value is not None
        return stream.value

    def allocate(self, size_bytes: int) -> int:
        """Allocates device memory."""
        address = c_uint64()
        self._call_relaxed("cuMemAlloc_v2", byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def allocate_touching(self, first_bytes: int, second_bytes: int) -> list[int]:
        """On the stand-in: makes two allocations of which the second begins where the first ends."""
        sizes, addresses = (c_uint64 * 2)(first_bytes, second_bytes), (c_uint64 * 2)()
        self._cuda.standin_allocate_touching.restype = ctypes.c_bool
        if not self._cuda.standin_allocate_touching(self.ordinal, byref(sizes), byref(addresses)):
            raise CudaError("standin_allocate_touching failed")
        return list(addresses)

    def _pin(self, size_bytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        address = c_void_p()
        self._call_relaxed("cuMemHostAlloc", byref(address), ctypes.c_size_t(size_bytes), 0)
        assert address.value is not None
        self._pinned.append((address.value, size_bytes))
        memory = (ctypes.c_uint8 * size_bytes).from_address(address.value)
        return address.value, np.frombuffer(memory, dtype=np.uint8)

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """Launches a kernel that writes ``data`` on the compute stream."""
        source, memory = self._pin(data.size)
        memory[:] = data
        self._call(
            "cuMemcpyHtoDAsync_v2",
            c_uint64(address),
            c_void_p(source),
            ctypes.c_size_t(data.size),
            c_void_p(self.compute),
        )

    def read(self, address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Launches a kernel that reads memory on the compute stream; its result is available after ``synchronize``."""
        target, memory = self._pin(size_bytes)
        self._call(
            "cuMemcpyDtoHAsync_v2",
            c_void_p(target),
            c_uint64(address),
            ctypes.c_size_t(size_bytes),
            c_void_p(self.compute),
        )
        return memory

    def record(self) -> int:
        """Returns an event after everything launched so far."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(NO_TIMING))
        assert event.value is not None
        self._events.append(event.value)
        self._call("cuEventRecord", event, c_void_p(self.compute))
        return event.value

    def synchronize(self) -> None:
        """Waits for everything that was launched."""
        self._call("cuStreamSynchronize", c_void_p(self.compute))

    def hang(self, hung: bool) -> None:
        """On the stand-in: stops or resumes the progress of launched work."""
        self._cuda.standin_hang(self.ordinal, c_uint64(self.compute), ctypes.c_bool(hung))

    def violations(self) -> str:
        """Returns the stand-in's complaints about wrong use; empty on a real device."""
        if not self.is_standin:
            return ""
        log = ctypes.create_string_buffer(LOG_BYTES_MAX)
        self._cuda.standin_log.restype = ctypes.c_size_t
        length = self._cuda.standin_log(self.ordinal, log, ctypes.c_size_t(LOG_BYTES_MAX))
        return log.raw[:length].decode()
