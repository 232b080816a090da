"""The CUDA driver through ctypes: the dozen functions that kernels need, loaded on first use.

Only the driver's own library is touched, so nothing of the CUDA toolkit has to be installed. Pointers, streams and
handles are plain integers. A call that fails raises DriverError with the driver's name and description of the error.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any

from flashbob_cupy.plan import Device, arch_for

_OLDEST = 12000  # cuLibraryLoadData and cuLaunchKernelEx with kernels of a library

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuLibraryLoadData": (c_void_p, c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    "cuLibraryGetKernel": (c_void_p, c_void_p, c_char_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, *(c_void_p,) * 5, c_int, c_int, c_int, c_int),
}

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS, _SHARED_PER_BLOCK_OPTIN = 75, 76, 16, 97
_MAX_DYNAMIC_SHARED = 8
_FOREIGN_CODE = frozenset({200, 209, 218, 222})  # invalid image, no binary for this GPU, invalid or too new PTX


class DriverError(RuntimeError):
    """The CUDA driver is missing, too old or reported an error; the message says which call failed and why."""


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("blocks", c_uint * 3),
        ("threads", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


class Driver:
    """The loaded driver. `launch` and `current` are bare functions for the hot path: they return error codes."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise DriverError(f"the CUDA driver has no {name}: version 12.0 or later is needed; update the driver")
            function.argtypes = arguments
            function.restype = c_int
            self._functions[name] = function
        self.call("cuInit", 0)
        version = self._read_int("cuDriverGetVersion")
        if version < _OLDEST:
            found = f"{version // 1000}.{version % 1000 // 10}"
            raise DriverError(f"the CUDA driver supports CUDA {found}; 12.0 or later is needed: update the driver")
        self.version = version
        self.launch: Callable[[int, int, int, int | None], int] = self._functions["cuLaunchKernelEx"]
        self._contexts: dict[int, int] = {}
        self._devices: dict[int, Device] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise DriverError(f"{name} failed: {self.describe(code)}")

    def describe(self, code: int) -> str:
        """The driver's name and description of an error code."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if self._functions[name](code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode())
        return ": ".join(words) or f"error {code}"

    def _read_int(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def _read_handle(self, name: str, *arguments: Any) -> int:
        value = c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value or 0

    def device_count(self) -> int:
        return self._read_int("cuDeviceGetCount")

    def device(self, index: int) -> Device:
        """What planning needs to know of a device."""
        found = self._devices.get(index)
        if found is None:
            if not 0 <= index < self.device_count():
                raise DriverError(f"there is no CUDA device {index}: the driver sees {self.device_count()}")
            handle = self._read_int("cuDeviceGet", index)
            major, minor, multiprocessors, shared = (
                self._read_int("cuDeviceGetAttribute", attribute, handle)
                for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS, _SHARED_PER_BLOCK_OPTIN)
            )
            capability = (major, minor)
            found = self._devices[index] = Device(arch_for(capability), capability, shared, multiprocessors)
        return found

    def name_and_memory(self, index: int) -> tuple[str, int]:
        """The product name of a device, and its memory in bytes."""
        handle = self._read_int("cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        memory = ctypes.c_size_t()
        self.call("cuDeviceGetName", name, len(name), handle)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        return name.value.decode(), memory.value

    def primary_context(self, index: int) -> int:
        """The context every framework shares on a device; kept for the life of the process."""
        context = self._contexts.get(index)
        if context is None:
            handle = self._read_int("cuDeviceGet", index)
            context = self._contexts[index] = self._read_handle("cuDevicePrimaryCtxRetain", handle)
        return context

    def current_context(self) -> int:
        return self._read_handle("cuCtxGetCurrent")

    def push_context(self, context: int) -> None:
        self.call("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> None:
        self._read_handle("cuCtxPopCurrent_v2")

    def load(self, cubin: bytes, entry: str, index: int, shared_bytes: int) -> int:
        """Load compiled code and return its kernel, allowed `shared_bytes` of dynamic shared memory on the device.

        The kernel belongs to no context; the code stays loaded for the life of the process.
        """
        library = c_void_p()
        code = self._functions["cuLibraryLoadData"](ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        kernel = c_void_p()
        if code == 0:
            code = self._functions["cuLibraryGetKernel"](ctypes.byref(kernel), library, entry.encode())
        if code == 0:
            handle = self._read_int("cuDeviceGet", index)
            code = self._functions["cuKernelSetAttribute"](_MAX_DYNAMIC_SHARED, shared_bytes, kernel, handle)
        if code:
            device = self.device(index)
            message = f"kernel {entry} could not be loaded on device {index}: {self.describe(code)}"
            if code in _FOREIGN_CODE:
                message += (
                    f". It was compiled for {device.arch}; the device has compute capability "
                    f"{device.capability[0]}.{device.capability[1]} and its driver supports CUDA "
                    f"{self.version // 1000}.{self.version % 1000 // 10}: an NVRTC newer than the driver makes such "
                    "code, so update the driver or install an older NVRTC"
                )
            raise DriverError(message)
        return kernel.value or 0

    def tensor_map(
        self,
        pointer: int,
        shape: tuple[int, int, int, int],
        strides: tuple[int, int, int],
        box_rows: int,
        bfloat16: bool,
    ) -> bytes:
        """A tensor map over (batch, head, row, column) of 2-byte elements, in boxes of 64 columns x `box_rows` rows.

        Rows and columns past the ends read as zeros. `strides` count elements: batch, head, row.
        """
        raw = (ctypes.c_uint64 * 24)()
        address = -(-ctypes.addressof(raw) // 64) * 64
        sizes = (ctypes.c_uint64 * 4)(*reversed(shape))
        steps = (ctypes.c_uint64 * 3)(*(2 * stride for stride in reversed(strides)))
        box = (ctypes.c_uint32 * 4)(64, box_rows, 1, 1)
        ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        dtype, interleave, swizzle_128, promote_256, zeros = 9 if bfloat16 else 6, 0, 3, 3, 0
        self.call(
            "cuTensorMapEncodeTiled", address, dtype, 4, pointer, sizes, steps, box, ones,
            interleave, swizzle_128, promote_256, zeros,
        )  # fmt: skip
        return ctypes.string_at(address, 128)


@functools.cache
def driver() -> Driver:
    """The CUDA driver of this machine.

    Raises:
        DriverError: no driver, an old one, or one that cannot start.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"no CUDA driver: {name} cannot be loaded ({error})") from error
    return Driver(library)
