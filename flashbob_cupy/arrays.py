"""Arrays of any framework: in as pointers, out in the caller's kind, and the stream to run on.

No framework is imported to look at an array: an object of a framework can only exist when its module is in
`sys.modules`. CuPy is imported when results for JAX or another DLPack library have to be allocated on a GPU.

A `Kind` is what the package knows about one framework. `Kind.read` is on the hot path: it returns the raw description
of every array, which serves as a cache key as it is, and `Kind.translate` turns such a description into plain values
when the key is new.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import math
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashbob_cupy.errors import UnsupportedError

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class View:
    """A strided array somewhere in memory; `owner` keeps that memory alive."""

    __slots__ = ("device", "dtype", "owner", "pointer", "shape", "strides")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        device: tuple[str, int],
        owner: object,
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = strides  # in elements
        self.dtype = dtype
        self.device = device
        self.owner = owner

    def __repr__(self) -> str:
        return f"View({self.pointer:#x}, {self.shape}, {self.strides}, {self.dtype!r}, {self.device})"


class Layout(NamedTuple):
    """A `View` without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def borrow(x: Any, name: str) -> View:
    """The memory of `x`, not copied; `name` is what errors call it."""
    kind = kind_of(x, name)
    tokens, pointers, owners = kind.read((name,), (x,), None)
    return View(pointers[0], *kind.translate(name, *tokens), owners[0])


# ------------------------------------------------------------------------------------------ views as NumPy and CuPy


class _Interface:
    """What NumPy reads to make an array over foreign memory; the array keeps this object, and so the owner, alive."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, owner: object
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": tuple(stride * item for stride in strides),
            "typestr": np.dtype(_BITS[item]).str,
        }


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        name = importlib.import_module("ml_dtypes").bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def numpy_view(view: View) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of a CPU view."""
    bits = np.asarray(_Interface(view.pointer, view.shape, view.strides, _ITEM_BYTES[view.dtype], view.owner))
    return bits.view(numpy_dtype(view.dtype))


def cupy_view(view: View) -> Any:
    """A CuPy array over the memory of a CUDA view; bfloat16 appears as uint16."""
    cupy = _cupy()
    item = _ITEM_BYTES[view.dtype]
    below, size = extent(view)
    memory = cupy.cuda.UnownedMemory(view.pointer - below, size, view.owner, view.device[1])
    return cupy.ndarray(
        view.shape,
        cupy.uint16 if view.dtype == "bfloat16" else view.dtype,
        cupy.cuda.MemoryPointer(memory, below),
        strides=tuple(stride * item for stride in view.strides),
    )


def extent(lie: View | Layout) -> tuple[int, int]:
    """How many bytes an array reaches below its pointer, and how many it spans."""
    if 0 in lie.shape:
        return 0, 0
    item = _ITEM_BYTES[lie.dtype]
    reach = [(size - 1) * stride for size, stride in zip(lie.shape, lie.strides, strict=True)]
    return -sum(r for r in reach if r < 0) * item, (sum(abs(r) for r in reach) + 1) * item


def overlaps_itself(lie: View | Layout) -> bool:
    """Whether two elements may be one place in memory."""
    if 0 in lie.shape:
        return False
    reach = 0
    for stride, size in sorted((abs(stride), size) for size, stride in zip(lie.shape, lie.strides, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def overlap(a: View, b: View) -> bool:
    """Whether two views on one device share a byte. Interleaved views of one buffer do not."""
    (below_a, size_a), (below_b, size_b) = extent(a), extent(b)
    low_a, low_b = a.pointer - below_a, b.pointer - below_b
    if size_a == 0 or size_b == 0 or low_a + size_a <= low_b or low_b + size_b <= low_a:
        return False
    # NumPy solves this exactly from addresses and strides alone, so device memory may be described to it.
    x, y = (np.asarray(_Interface(v.pointer, v.shape, v.strides, _ITEM_BYTES[v.dtype], None)) for v in (a, b))
    try:
        return bool(np.shares_memory(x, y, max_work=1_000_000))  # type: ignore[arg-type]  # the stub allows 0 and -1
    except np.exceptions.TooHardError:
        return True


# --------------------------------------------------------------------------------------------------------- streams


def stream_of(stream: Any) -> tuple[int, int | None]:
    """The handle of a stream, and its device where the object knows it.

    Args:
        stream: an integer handle, an object with `__cuda_stream__`, a torch.cuda.Stream or a cupy.cuda.Stream.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"stream must be a handle of 0 or more; got {stream}")
        return _named_once(stream), None
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            device = getattr(getattr(stream, "device", None), "index", getattr(stream, "device_id", None))
            return _named_once(handle), device if isinstance(device, int) and device >= 0 else None
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        return _named_once(int(protocol()[1])), None
    raise TypeError(
        "stream must be an integer handle, an object with __cuda_stream__, a torch.cuda.Stream or a cupy.cuda.Stream; "
        f"got {type(stream).__name__}"
    )


def _named_once(handle: int) -> int:
    """0 and 1 are both the legacy default stream."""
    return 0 if handle == 1 else handle


@contextlib.contextmanager
def cupy_stream(stream: int, device: int) -> Iterator[None]:
    """Make a stream CuPy's current one on its device, and put both back afterwards."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        # 0 is the legacy default stream, 2 the per-thread one: CuPy has objects for them.
        known = {0: cupy.cuda.Stream.null, 2: cupy.cuda.Stream.ptds}
        with known.get(stream) or cupy.cuda.ExternalStream(stream, device):
            yield


class _Held:
    """Arrays whose library does not know our stream, kept until the stream has passed the work that uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, object]] = deque()

    def until_now(self, owners: object) -> None:
        """Keep `owners` until CuPy's current stream has done everything that is on it now."""
        event = _cupy().cuda.Event(disable_timing=True)
        event.record()
        with self._lock:
            self._waiting.append((event, owners))
            while self._waiting and self._waiting[0][0].done:
                self._waiting.popleft()


_held = _Held()


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedError(
            "this array on a GPU needs CuPy: install flashbob-cupy[cu13] (or [cu12] for CUDA 12 drivers)"
        ) from error


# ----------------------------------------------------------------------------------------------------------- kinds

Tokens = list[Any]
#: Recognisers, and what is known of the arrays that they take.
Known = tuple[tuple[Callable[..., bool], Any], ...]
_shape, _strides, _dtype, _device, _requires_grad = map(
    operator.attrgetter, ("shape", "strides", "dtype", "device", "requires_grad")
)


class Kind:
    """One array framework."""

    name: str
    #: Whether `out=` can be an array of this kind.
    mutable = True
    #: Makes a new raw array like an owner that `read` returned, if that is cheaper than `allocator`.
    twin: Callable[[Any], Any] | None = None

    def read(
        self, names: Sequence[str], arrays: Sequence[Any], stream: int | None
    ) -> tuple[Tokens, list[int], list[Any]]:
        """Describe arrays of this kind, and make them ready on `stream`.

        Returns a flat list to be used as a cache key (all shapes, all strides, all dtypes and all devices, in the
        framework's own objects), the pointers, and the objects that keep the memory alive.
        """
        raise NotImplementedError

    def recogniser(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        """A function of as many arrays: whether `read` would accept them and return the same tokens.

        None if the framework has nothing that is quicker than `read`.
        """
        return None

    def recognise(self, known: Known, arrays: Sequence[Any]) -> Any:
        """What is known under the first recogniser that takes the arrays, or None."""
        return None

    def translate(self, name: str, shape: Any, strides: Any, dtype: Any, device: Any) -> Layout:
        """What `read` says of one array, in plain values."""
        raise NotImplementedError

    def writable(self, x: Any) -> bool:
        return True

    def allocator(self, shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Callable[[], Any]:
        """A function that makes a new contiguous array, still raw (see `finish`)."""
        raise NotImplementedError

    def pointer(self, raw: Any) -> int:
        raise NotImplementedError

    #: Whether raw arrays have to be passed through `finish`.
    finishes = False

    def finish(self, raw: Any, like: Any) -> Any:
        """The caller's kind of array over a raw one that has been filled; `like` is an input."""
        return raw

    def fill(self, x: Any, view: View, value: float) -> None:
        """Set every element of `x`, whose memory is `view`."""
        (numpy_view if view.device[0] == "cpu" else cupy_view)(view)[...] = value

    def current_stream(self, device: int) -> int:
        """The stream that the caller's work is on."""
        raise NotImplementedError

    def is_current(self, device: int) -> bool:
        """Whether allocations land on `device` and on its current stream without `on`."""
        raise NotImplementedError

    def on(self, stream: int, device: int) -> contextlib.AbstractContextManager[Any]:
        """Make a device and a stream current."""
        return cupy_stream(stream, device)

    def hold(self, arrays: Sequence[Any], stream: int, device: int) -> None:
        """Keep the memory of arrays until `stream`, which `on` made current, has passed the work on it now."""
        _held.until_now(arrays)

    def other(self, name: str, x: Any) -> TypeError:
        """The error for an array of another kind than the first one."""
        came = kind_of(x, name).name
        return TypeError(f"{name} must be a {self.name} array like q; got a {came} array ({_type_name(x)})")


class NumpyKind(Kind):
    name = "NumPy"

    def read(
        self, names: Sequence[str], arrays: Sequence[Any], stream: int | None
    ) -> tuple[Tokens, list[int], list[Any]]:
        for name, x in zip(names, arrays, strict=True):
            if not isinstance(x, np.ndarray):
                raise self.other(name, x)
            if isinstance(x, np.ma.MaskedArray):
                raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(...)")
        tokens = [*map(_shape, arrays), *map(_strides, arrays), *map(_dtype, arrays), *["cpu"] * len(arrays)]
        return tokens, [x.__array_interface__["data"][0] for x in arrays], list(arrays)

    def translate(self, name: str, shape: Any, strides: Any, dtype: Any, device: Any) -> Layout:
        return Layout(shape, _element_strides(name, strides, dtype.itemsize), _dtype_name(dtype), ("cpu", 0))

    def writable(self, x: Any) -> bool:
        return bool(x.flags.writeable)

    def allocator(self, shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Callable[[], Any]:
        return functools.partial(np.empty, shape, numpy_dtype(dtype))

    def pointer(self, raw: Any) -> int:
        return int(raw.__array_interface__["data"][0])


class CupyKind(Kind):
    name = "CuPy"

    def __init__(self) -> None:
        self._cupy = sys.modules["cupy"]

    def read(
        self, names: Sequence[str], arrays: Sequence[Any], stream: int | None
    ) -> tuple[Tokens, list[int], list[Any]]:
        ndarray = self._cupy.ndarray
        for name, x in zip(names, arrays, strict=True):
            if not isinstance(x, ndarray):
                raise self.other(name, x)
        data = [x.data for x in arrays]
        tokens = [*map(_shape, arrays), *map(_strides, arrays), *map(_dtype, arrays), *[x.device_id for x in data]]
        return tokens, [x.ptr for x in data], list(arrays)

    def translate(self, name: str, shape: Any, strides: Any, dtype: Any, device: Any) -> Layout:
        return Layout(shape, _element_strides(name, strides, dtype.itemsize), _dtype_name(dtype), ("cuda", device))

    def allocator(self, shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Callable[[], Any]:
        return functools.partial(self._cupy.empty, shape, numpy_dtype(dtype))

    def pointer(self, raw: Any) -> int:
        return int(raw.data.ptr)

    def current_stream(self, device: int) -> int:
        return int(self._cupy.cuda.get_current_stream(device).ptr)

    def is_current(self, device: int) -> bool:
        return bool(self._cupy.cuda.runtime.getDevice() == device)


class TorchKind(Kind):
    name = "torch"

    def __init__(self, cut: bool = False) -> None:
        """`cut`: tensors may require grad; that their graph ends here is what the caller wants."""
        self._cut = cut
        self._torch = torch = sys.modules["torch"]
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self.twin = torch.empty_like
        # Without a Python frame of our own these cost half as much.
        self.pointer = torch.Tensor.data_ptr  # type: ignore[method-assign]
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw_stream is not None:
            self.current_stream = raw_stream  # type: ignore[method-assign]
        self._forward_ad = torch.autograd.forward_ad
        self._guards = _tensor_guards(torch)

    def read(
        self, names: Sequence[str], arrays: Sequence[Any], stream: int | None
    ) -> tuple[Tokens, list[int], list[Any]]:
        if not self._plain.issuperset(map(type, arrays)):
            arrays = [self._without_type(name, x) for name, x in zip(names, arrays, strict=True)]
        tensor = self._torch.Tensor
        try:
            if self._cut:
                # What a transform of torch.func left behind wraps a tensor, which any operator finds.
                wrapped = self._torch._C._functorch.is_functorch_wrapped_tensor
                arrays = [x.detach() if wrapped(x) else x for x in arrays]
            # Layouts that are not strided have no data_ptr.
            pointers = list(map(tensor.data_ptr, arrays))
            tokens = [*map(_shape, arrays), *map(tensor.stride, arrays), *map(_dtype, arrays), *map(_device, arrays)]
            refused = (
                (not self._cut and any(map(_requires_grad, arrays)))
                or any(map(tensor.is_neg, arrays))
                or self._any_dual(arrays)
            )
        except RuntimeError as error:
            raise self._refusal(names, arrays) from error
        if refused:
            raise self._refusal(names, arrays)
        return tokens, pointers, list(arrays)

    def recogniser(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        if self._guards is None or not self._plain.issuperset(map(type, arrays)):
            return None
        return self._guards(arrays)

    def recognise(self, known: Known, arrays: Sequence[Any]) -> Any:
        if known and not self._in_forward_mode():  # guards do not see tangents
            for accepts, call in known:
                if accepts(*arrays):
                    return call
        return None

    def _without_type(self, name: str, x: Any) -> Any:
        """The same tensor as a torch.Tensor, so that no subclass gets a say in what follows."""
        tensor = self._torch.Tensor
        if type(x) is tensor:
            return x
        if not isinstance(x, tensor):
            raise self.other(name, x)
        kind_of(x, name)  # refuses the subclasses that only wrap memory
        # Under no_grad this loses requires_grad, which `read` has yet to see.
        return x if x.requires_grad and not self._cut else x.as_subclass(tensor)

    def _any_dual(self, arrays: Sequence[Any]) -> bool:
        return self._in_forward_mode() and any(self._forward_ad.unpack_dual(x).tangent is not None for x in arrays)

    def _in_forward_mode(self) -> bool:
        # Where forward mode is switched off, as inside the operators of the adapter, PyTorch drops tangents itself.
        level: int = getattr(self._forward_ad, "_current_level", 0)
        return level >= 0 and bool(self._torch._C._is_fwd_grad_enabled())

    def _refusal(self, names: Sequence[str], arrays: Sequence[Any]) -> TypeError:
        """The error for the first tensor that cannot be read."""
        faults = ((name, self._fault(name, x)) for name, x in zip(names, arrays, strict=True))
        return TypeError(next(f"{name} {fault}" for name, fault in faults if fault))

    def _fault(self, name: str, x: Any) -> str | None:
        torch = self._torch
        adapter = "flashbob_cupy.torch.attention is differentiable"
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return f"is inside torch.func (grad, vmap, jvp, ...), which cannot see through this: {adapter}"
        if x.requires_grad and not self._cut:
            return f"requires grad, and its graph would be cut here: {adapter}; or pass {name}.detach()"
        if x.layout is not torch.strided:
            return f"must be a dense tensor; got layout {x.layout}. Pass {name}.to_dense()"
        if x.is_neg():
            return f"has its negative bit set; pass {name}.resolve_neg()"
        if self._any_dual([x]):
            return f"carries a forward-mode tangent, which would be lost here: {adapter}"
        if torch._C._functorch.is_legacy_batchedtensor(x):
            return (
                "is batched by is_grads_batched or vectorize of torch.autograd; use torch.func.vmap, jacrev or hessian "
                "instead"
            )
        try:
            x.data_ptr(), x.shape
        except RuntimeError:
            return f"has no memory of its own ({_type_name(x)}); got a tensor without storage"
        return None

    def translate(self, name: str, shape: Any, strides: Any, dtype: Any, device: Any) -> Layout:
        return Layout(tuple(shape), strides, str(dtype).removeprefix("torch."), (device.type, device.index or 0))

    def allocator(self, shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Callable[[], Any]:
        torch = self._torch
        options = {"dtype": getattr(torch, dtype), "device": torch.device(*device) if device[0] != "cpu" else "cpu"}
        if 0 in shape:
            return functools.partial(torch.empty_strided, shape, row_major(shape), **options)
        # `empty_like` is the cheapest to call, the more so after a `twin`: what it copies is one element, expanded.
        ones = (1,) * len(shape)
        return functools.partial(torch.empty_like, torch.empty_strided(ones, ones, **options).expand(shape))

    def fill(self, x: Any, view: View, value: float) -> None:
        x.fill_(value)

    def current_stream(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def is_current(self, device: int) -> bool:
        return True

    def on(self, stream: int, device: int) -> contextlib.AbstractContextManager[Any]:
        return self._torch.cuda.stream(self._stream(stream, device))  # type: ignore[no-any-return]

    def hold(self, arrays: Sequence[Any], stream: int, device: int) -> None:
        user = self._stream(stream, device)
        for x in arrays:
            x.record_stream(user)

    def _stream(self, stream: int, device: int) -> Any:
        cuda = self._torch.cuda
        # A null pointer asks ExternalStream for a fresh stream.
        return cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device)


def _tensor_guards(torch: Any) -> Callable[[Sequence[Any]], Callable[..., bool]] | None:
    """Makes torch.compile's test that tensors are still what they were: one call that looks at everything.

    It is not part of torch's interface, so it is only used where it does what is needed here.
    """

    def guards(arrays: Sequence[Any]) -> Callable[..., bool]:
        made = torch._C._dynamo.guards.TensorGuards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return made.check  # type: ignore[no-any-return]

    try:
        x = torch.empty(2, 3)
        parameter, leaf = torch.nn.Parameter(x, requires_grad=False), x.clone().requires_grad_()
        others = [x.double(), x.t(), x[:, :2], x[0], torch._neg_view(x), x.to("meta"), x.to_sparse(), parameter, leaf]
        accepts = guards([x])
        right = accepts(torch.empty(2, 3)) and not any(map(accepts, others))
        with torch.no_grad():
            right = right and not guards([x])(leaf)
    except Exception:  # whatever a torch that lacks it, or has it in another form, makes of this
        return None
    return guards if right else None


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    """`DLManagedTensorVersioned` of dlpack.h."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_DL_BFLOAT = 4
_DL_READ_ONLY = 1
_DL_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3 is pinned host memory, 13 managed memory
_DL_TYPES = {0: "int", 1: "uint", 2: "float", _DL_BFLOAT: "bfloat", 5: "complex", 6: "bool"}


def _open_capsule(capsule: Any) -> tuple[_DLTensor, bool]:
    """The tensor in a DLPack capsule, and whether it is read-only.

    The capsule is not consumed: it goes on owning the tensor, and frees it when the last reference to the capsule goes.
    """
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise BufferError(f"DLPack {managed.major}.{managed.minor} is not understood, 1.x is")
        return managed.dl_tensor, bool(managed.flags & _DL_READ_ONLY)
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False


def _export(x: Any, stream: int | None) -> Any:
    """A DLPack capsule of `x`, ready on `stream` if `x` is on a GPU."""
    on_gpu = _DL_DEVICES.get(int(x.__dlpack_device__()[0])) == "cuda"
    stream = (stream or 1) if on_gpu else None  # the legacy default stream is 1 in DLPack, where 0 is not allowed
    try:
        return x.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # before DLPack 1.0 there was no max_version
        return x.__dlpack__(stream=stream)


class DLPackKind(Kind):
    """Any library whose arrays have `__dlpack__` and `__dlpack_device__`; work runs on the legacy default stream."""

    finishes = True

    def __init__(self, array_type: type) -> None:
        self.name = _qualified(array_type)
        self._type = array_type

    def _accepts(self, name: str, x: Any) -> bool:
        return type(x) is self._type

    def read(
        self, names: Sequence[str], arrays: Sequence[Any], stream: int | None
    ) -> tuple[Tokens, list[int], list[Any]]:
        described: list[tuple[Any, ...]] = []
        pointers: list[int] = []
        owners: list[Any] = []
        for name, x in zip(names, arrays, strict=True):
            if not self._accepts(name, x):
                raise self.other(name, x)
            try:
                capsule = _export(x, stream)
                tensor, _ = _open_capsule(capsule)
            except BufferError as error:
                raise ValueError(f"{name} cannot be read through DLPack: {error}") from error
            shape = tuple(tensor.shape[: tensor.ndim])
            strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
            dtype, device = (tensor.code, tensor.bits, tensor.lanes), (tensor.device_type, tensor.device_id)
            described.append((shape, strides, dtype, device))
            pointers.append((tensor.data or 0) + tensor.byte_offset)
            owners.append(capsule)
        return list(itertools.chain(*zip(*described, strict=True))), pointers, owners

    def translate(self, name: str, shape: Any, strides: Any, dtype: Any, device: Any) -> Layout:
        code, bits, lanes = dtype
        dtype_name = f"{_DL_TYPES.get(code, f'DLPack type {code} of ')}{bits}" + (f"x{lanes}" if lanes != 1 else "")
        where = _DL_DEVICES.get(device[0], f"DLPack device type {device[0]}")
        return Layout(shape, strides, dtype_name, (where, device[1] if where == "cuda" else 0))

    def writable(self, x: Any) -> bool:
        return not _open_capsule(_export(x, None))[1]

    def allocator(self, shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Callable[[], Any]:
        if device[0] == "cpu":
            return functools.partial(_aligned, shape, numpy_dtype(dtype))
        cupy = _cupy()
        return functools.partial(cupy.empty, shape, cupy.uint16 if dtype == "bfloat16" else dtype)

    def pointer(self, raw: Any) -> int:
        return int(raw.__array_interface__["data"][0] if isinstance(raw, np.ndarray) else raw.data.ptr)

    def finish(self, raw: Any, like: Any) -> Any:
        if hasattr(like, "__array_namespace__"):
            from_dlpack = like.__array_namespace__().from_dlpack
        else:
            from_dlpack = getattr(sys.modules.get(self._type.__module__.partition(".")[0]), "from_dlpack", None)
        if from_dlpack is not None:
            return from_dlpack(_exportable(raw))
        return raw.view(numpy_dtype("bfloat16")) if raw.dtype == np.uint16 else raw

    def current_stream(self, device: int) -> int:
        return 0

    def is_current(self, device: int) -> bool:
        return False


class JaxKind(DLPackKind):
    mutable = False

    def __init__(self) -> None:
        super().__init__(sys.modules["jax"].Array)
        self.name = "JAX"
        self._jax = sys.modules["jax"]

    def _accepts(self, name: str, x: Any) -> bool:
        if not isinstance(x, self._jax.Array):
            return False
        _refuse_tracer(self._jax, name, x)
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(f"{name} must be on one device; got an array sharded over {len(devices)}")
        if next(iter(devices)).platform == "cpu":
            x.block_until_ready()  # on a GPU, DLPack makes our stream wait instead
        return True

    def finish(self, raw: Any, like: Any) -> Any:
        if isinstance(raw, np.ndarray):
            return self._jax.device_put(raw, like.device)  # takes over aligned CPU memory as it is
        return self._jax.dlpack.from_dlpack(_exportable(raw))


class _AsBfloat16:
    """Exports 16-bit integers as bfloat16: NumPy and CuPy before 14 do not know that type of DLPack."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._bits.__dlpack__(**options)
        _open_capsule(capsule)[0].code = _DL_BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._bits.__dlpack_device__()  # type: ignore[no-any-return]


def _exportable(raw: Any) -> Any:
    """A raw result as something that `from_dlpack` functions take."""
    return _AsBfloat16(raw.view(np.uint16)) if raw.dtype.name in ("bfloat16", "uint16") else raw


def _refuse_tracer(jax: Any, name: str, x: Any) -> None:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer (inside jit, grad, vmap, ...), which has no memory: "
            "use flashbob_cupy.jax.attention there"
        )


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array on a 64-byte boundary: JAX copies CPU memory that is not."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -int(buffer.__array_interface__["data"][0]) % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def _element_strides(name: str, strides: tuple[int, ...], item: int) -> tuple[int, ...]:
    if any(stride % item for stride in strides):
        raise ValueError(
            f"{name} must have strides that are multiples of its {item}-byte items; got {strides}. Copy it"
        )
    return tuple(stride // item for stride in strides)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name) if dtype.isnative else f"byte-swapped {dtype.name}"


def _qualified(t: type) -> str:
    return t.__qualname__ if t.__module__ == "builtins" else f"{t.__module__}.{t.__qualname__}"


def _type_name(x: Any) -> str:
    return _qualified(type(x))


# ------------------------------------------------------------------------------------------------------- detection

_kinds: dict[type, Kind] = {}
_numpy = NumpyKind()
_framework_kinds: dict[str, Kind] = {}


def kind_of(x: Any, name: str) -> Kind:
    """The kind of an array; `name` is what errors call it.

    Raises:
        TypeError: `x` is not an array, or one that only an adapter can handle.
    """
    kind = _kinds.get(type(x))
    return kind if kind is not None else _detect(x, name)


def _detect(x: Any, name: str) -> Kind:
    kind: Kind
    if isinstance(x, np.ndarray):
        kind = _numpy
    elif _is_instance(x, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"{name} must be a plain torch tensor; got {_type_name(x)}, whose memory is not its own "
                "(a fake, distributed, nested or wrapped tensor)"
            )
        kind = _framework("torch", TorchKind)
    elif _is_instance(x, "jax", "Array"):
        _refuse_tracer(sys.modules["jax"], name, x)
        kind = _framework("jax", JaxKind)
    elif _is_instance(x, "cupy", "ndarray"):
        kind = _framework("cupy", CupyKind)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") and not isinstance(x, type):
        kind = DLPackKind(type(x))
    else:
        raise TypeError(
            f"{name} must be an array (torch, JAX, CuPy, NumPy or any object with __dlpack__); got {_type_name(x)}"
        )
    return _kinds.setdefault(type(x), kind)


def _is_instance(x: Any, module: str, attribute: str) -> bool:
    array_type = getattr(sys.modules.get(module), attribute, None)
    return isinstance(array_type, type) and isinstance(x, array_type)


def _framework(module: str, make: Callable[[], Kind]) -> Kind:
    return _framework_kinds.get(module) or _framework_kinds.setdefault(module, make())
