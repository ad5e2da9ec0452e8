"""The part of the CUDA driver that a ping needs, through ctypes."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

NON_BLOCKING = 1
PORTABLE_DEVICEMAP = 3
CAPTURE_RELAXED = 2


class CudaError(RuntimeError):
    """A call of the driver failed."""


class Cuda:
    """A stream of a device, and 4 KiB on each side."""

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.size_bytes = size_bytes
        context, stream, host, device = c_void_p(), c_void_p(), c_void_p(), c_uint64()
        mode = c_int(CAPTURE_RELAXED)
        self._call("cuInit", c_uint(0))
        self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(ordinal))
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(NON_BLOCKING), c_int(0))
        self._call("cuMemHostAlloc", byref(host), c_size_t(size_bytes), c_uint(PORTABLE_DEVICEMAP))
        self._call("cuMemAlloc_v2", byref(device), c_size_t(size_bytes))
        self._stream, self._host, self._device = stream, host, device

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise CudaError(f"{name} failed with {code}")

    def to_device(self) -> None:
        """Copies to the device and waits."""
        self._call("cuMemcpyHtoDAsync_v2", self._device, self._host, c_size_t(self.size_bytes), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def to_host(self) -> None:
        """Copies to the host and waits."""
        self._call("cuMemcpyDtoHAsync_v2", self._host, self._device, c_size_t(self.size_bytes), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def allocate(self) -> None:
        """Allocates and frees device memory."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(self.size_bytes))
        self._call("cuMemFree_v2", address)
