"""The four public functions: check, plan, launch, return."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flashbob_cupy import arrays, plan
from flashbob_cupy.arrays import Kind, Layout, View
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Problem, axes_of, check_layout, check_output, make_problem

if TYPE_CHECKING:
    from flashbob_cupy import kernels

Window = tuple[int | None, int | None]


class ForwardResult(NamedTuple):
    """Output (B, Hq, M, Dv), and the natural log-sum-exp of each row of scores (B, Hq, M)."""

    o: Any
    lse: Any


class BackwardResult(NamedTuple):
    """Gradients with respect to q, k and v, each of its argument's shape."""

    dq: Any
    dk: Any
    dv: Any


class _BobFields(NamedTuple):
    gq: Any
    gk: Any
    gv: Any
    gdo: Any


class BobResult(_BobFields):
    """Gradients of <dq, uq> + <dk, uk> + <dv, uv> with respect to q, k, v and do, each of its argument's shape.

    `gdlse` is the one with respect to `dlse`, (B, Hq, M), and None if no `dlse` was given. It is an attribute and not a
    fifth entry, so that unpacking into four always works.
    """

    gdlse: Any = None


class JvpResult(NamedTuple):
    """Tangents of o, (B, Hq, M, Dv), and of lse, (B, Hq, M)."""

    to: Any
    tlse: Any


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bhnd",
    stream: Any = None,
    out: Sequence[Any] | None = None,
    deterministic: bool = False,
) -> ForwardResult:
    """Exact attention, ``o = softmax(scale * q k^T) v``.

    Arrays are of any library with ``__dlpack__`` (torch, JAX, CuPy, NumPy, ...), all of the same one, on the same
    device and of the same dtype, with any strides. They are not copied, and results are arrays of the same library. On
    a CUDA device the work is put on the caller's stream and not waited for.

    Args:
        q: (B, Hq, M, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, N, D), with Hq a multiple of Hkv; query head h reads key head ``h // (Hq // Hkv)``.
        v: (B, Hkv, N, Dv).
        causal: query i sees key j only if ``j <= i + N - M``: the diagonal is aligned at the bottom right.
        scale: factor of the scores; None is ``1 / sqrt(D)``.
        window: (left, right), query i sees key j only if ``i + N - M - left <= j <= i + N - M + right``; None in place
            of a number is unbounded. Together with `causal`, right is at most 0.
        layout: "bhnd", or "bnhd" for heads after rows, (B, M, Hq, D), in every 4-D argument and result. lse stays
            (B, Hq, M).
        stream: CUDA stream to run on: an integer handle, an object with ``__cuda_stream__``, a torch.cuda.Stream or a
            cupy.cuda.Stream. None is torch's current stream for torch tensors, CuPy's for CuPy arrays, and the legacy
            default stream for all others, which DLPack synchronises with their producer.
        out: preallocated results, one entry for each in the order of the result; an entry of None is allocated.
        deterministic: the same inputs give bitwise the same results. The forward always is.

    Returns:
        ForwardResult(o, lse): o (B, Hq, M, Dv) of the dtype of q; lse (B, Hq, M) float32, or float64 for float64
        inputs. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: an argument is not an array, has a wrong dtype, or is of another library than q; a torch tensor
            requires grad or a JAX array is being traced (then `flashbob_cupy.torch` or `flashbob_cupy.jax` is needed).
        ValueError: a shape, a device or an option does not fit; `out` overlaps itself or an input.
        UnsupportedError: valid, but not offered on this device.
        CompileError: a kernel did not compile.
    """
    return run("forward", (q, k, v), causal, scale, window, layout, deterministic, stream, out)  # type: ignore[no-any-return]


def backward(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bhnd",
    stream: Any = None,
    out: Sequence[Any] | None = None,
    deterministic: bool = False,
) -> BackwardResult:
    """Gradients of ``<do, o>``, or of ``<do, o> + <dlse, lse>``, with respect to q, k and v.

    Args:
        q: (B, Hq, M, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, N, D), with Hq a multiple of Hkv.
        v: (B, Hkv, N, Dv).
        do: (B, Hq, M, Dv), the cotangent of o.
        o: (B, Hq, M, Dv), the result of `forward` or of any other exact forward.
        lse: (B, Hq, M) or (B, Hq, M, 1), float32 (float64 for float64 inputs), natural log. What it holds for queries
            that see no key does not matter.
        dlse: None, or the cotangent of lse, of its shape and dtype.
        causal: as in `forward`.
        scale: as in `forward`.
        window: as in `forward`.
        layout: as in `forward`.
        stream: as in `forward`.
        out: as in `forward`, for (dq, dk, dv).
        deterministic: the same inputs give bitwise the same results, at some cost in time on a GPU.

    Returns:
        BackwardResult(dq, dk, dv), of the shapes of q, k and v and of their dtype. Queries that see no key and keys
        that no query sees get exact zeros.

    Raises:
        TypeError, ValueError, UnsupportedError, CompileError: as in `forward`.
    """
    arguments = (q, k, v, do, o, lse, dlse)
    return run("backward", arguments, causal, scale, window, layout, deterministic, stream, out)  # type: ignore[no-any-return]


def bob(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    uq: Any,
    uk: Any,
    uv: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bhnd",
    stream: Any = None,
    out: Sequence[Any] | None = None,
    deterministic: bool = False,
) -> BobResult:
    """The double backward: gradients of ``<dq, uq> + <dk, uk> + <dv, uv>`` with respect to q, k, v and do.

    dq, dk and dv are the results of `backward` for the same arguments. uq, uk and uv are their cotangents, as they
    arise when a function of the gradient is differentiated: Hessian-vector products, gradient penalties, meta-learning.

    Args:
        q: (B, Hq, M, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, N, D), with Hq a multiple of Hkv.
        v: (B, Hkv, N, Dv).
        do: (B, Hq, M, Dv), the cotangent of o.
        uq: (B, Hq, M, D), or None for exactly zero, which skips its share of the work.
        uk: (B, Hkv, N, D), or None.
        uv: (B, Hkv, N, Dv), or None.
        o: (B, Hq, M, Dv), the result of `forward` or of any other exact forward.
        lse: (B, Hq, M) or (B, Hq, M, 1), float32 (float64 for float64 inputs), natural log. What it holds for queries
            that see no key does not matter.
        dlse: None, or the cotangent of lse that was given to `backward`, of the shape and dtype of lse.
        causal: as in `forward`.
        scale: as in `forward`.
        window: as in `forward`.
        layout: as in `forward`.
        stream: as in `forward`.
        out: as in `forward`, for (gq, gk, gv, gdo), or for (gq, gk, gv, gdo, gdlse) when `dlse` is given.
        deterministic: the same inputs give bitwise the same results, at some cost in time on a GPU.

    Returns:
        BobResult(gq, gk, gv, gdo), of the shapes of q, k, v and do and of their dtype; its attribute `gdlse` is the
        gradient with respect to `dlse`, of the shape and dtype of lse, or None without `dlse`. Queries that see no key
        and keys that no query sees get exact zeros.

    Raises:
        TypeError, ValueError, UnsupportedError, CompileError: as in `forward`.
    """
    arguments = (q, k, v, do, uq, uk, uv, o, lse, dlse)
    return run("bob", arguments, causal, scale, window, layout, deterministic, stream, out)  # type: ignore[no-any-return]


def jvp(
    q: Any,
    k: Any,
    v: Any,
    uq: Any,
    uk: Any,
    uv: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    layout: str = "bhnd",
    stream: Any = None,
    out: Sequence[Any] | None = None,
    deterministic: bool = False,
) -> JvpResult:
    """The derivative of `forward` along (uq, uk, uv).

    Args:
        q: (B, Hq, M, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, N, D), with Hq a multiple of Hkv.
        v: (B, Hkv, N, Dv).
        uq: (B, Hq, M, D), the tangent of q, or None for exactly zero, which skips its share of the work.
        uk: (B, Hkv, N, D), or None.
        uv: (B, Hkv, N, Dv), or None.
        o: (B, Hq, M, Dv), the result of `forward` or of any other exact forward.
        lse: (B, Hq, M) or (B, Hq, M, 1), float32 (float64 for float64 inputs), natural log. What it holds for queries
            that see no key does not matter.
        causal: as in `forward`.
        scale: as in `forward`.
        window: as in `forward`.
        layout: as in `forward`.
        stream: as in `forward`.
        out: as in `forward`, for (to, tlse).
        deterministic: the same inputs give bitwise the same results. The jvp always is.

    Returns:
        JvpResult(to, tlse): to (B, Hq, M, Dv) of the dtype of q; tlse of the shape and dtype of lse, without a last
        axis of 1. A query that sees no key has exact zeros.

    Raises:
        TypeError, ValueError, UnsupportedError, CompileError: as in `forward`.
    """
    arguments = (q, k, v, uq, uk, uv, o, lse)
    return run("jvp", arguments, causal, scale, window, layout, deterministic, stream, out)  # type: ignore[no-any-return]


def _bob_result(results: list[Any]) -> BobResult:
    result = BobResult(*results[:4])
    if len(results) == 5:
        result.gdlse = results[4]
    return result


_RESULTS: dict[str, Callable[[list[Any]], Any]] = {
    "forward": ForwardResult._make,
    "backward": BackwardResult._make,
    "bob": _bob_result,
    "jvp": JvpResult._make,
}


def _reader(variable: str) -> Callable[[], object]:
    """A function whose result changes when an environment variable does."""
    try:
        # os.environ.get takes as long as a launch when the variable is not set; the dictionary behind it does not.
        return functools.partial(
            getattr(os.environ, "_data").get,  # noqa: B009  # not declared, and not promised
            os.environ.encodekey(variable),
        )
    except AttributeError:
        return functools.partial(os.environ.get, variable)


_family = _reader(plan.FAMILY_VARIABLE)

#: Everything that is known about a call before its pointers, by what was asked and how the arrays lie: `_Call` under
#: (options, *tokens). Under the options alone are the last few of them, where the kind of array has recognisers.
_calls: dict[Any, Any] = {}
#: Shapes that keep changing (growing sequences) must not fill the memory; a call is cheap to make again.
_MOST_CALLS = 1024
_MOST_RECOGNISED = 4


def run(
    op: str,
    arguments: tuple[Any, ...],
    causal: bool,
    scale: float | None,
    window: Window | None,
    layout: str,
    deterministic: bool,
    stream: Any = None,
    out: Sequence[Any] | None = None,
    kind: Kind | None = None,
) -> Any:
    """What the public functions do, with the arguments in the order of INPUTS.

    `kind` is the kind of q where a caller has one of its own.
    """
    if kind is None:
        kind = arrays.kind_of(arguments[0], "q")
    handle, stream_device = (None, None) if stream is None else arrays.stream_of(stream)
    if arguments[-1] is None:  # dlse as a rule; what is left is mostly complete
        arguments = arguments[:-1]
    names = INPUTS[op][: len(arguments)]
    given: tuple[Any, ...] = ()
    if out is not None:
        given = _unpack_out(op, kind, out, with_dlse=op == "bob" and names[-1] == "dlse")
        names, arguments = names + _LABELS[op], arguments + given
    present = [x for x in arguments if x is not None]
    if len(present) != len(arguments):
        names = tuple([name for name, x in zip(names, arguments, strict=True) if x is not None])
    options: tuple[Any, ...] | None
    try:
        # Types are part of the key because True == 1 == 1.0, but only some of these are right.
        options = (
            op, names, kind, causal, scale, window, layout, deterministic,
            type(causal), type(scale), window and tuple(map(type, window)), type(deterministic), _family(),
        )  # fmt: skip
        known = _calls.get(options, ())
    except TypeError:  # an option of a wrong type, which the checks of a new call name
        options, known = None, ()
    call = kind.recognise(known, present)
    if call is not None:
        pointers, owners = list(map(kind.pointer, present)), present
    else:
        tokens, pointers, owners = kind.read(names, present, handle)
        call = None if options is None else _calls.get((options, *tokens))
        if call is None:
            call = _Call(op, kind, names, tokens, causal, scale, window, layout, deterministic)
        if options is not None:
            _remember(options, tokens, kind.recogniser(owners), call)
    if handle is not None:
        call.check_stream(stream_device)
    return call.run(arguments[0], pointers, owners, given, handle)


def _remember(options: tuple[Any, ...], tokens: list[Any], accepts: Callable[..., bool] | None, call: _Call) -> None:
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[options, *tokens] = call
    if accepts is not None:
        known = [entry for entry in _calls.get(options, ()) if entry[1] is not call]
        _calls[options] = ((accepts, call), *known[: _MOST_RECOGNISED - 1])


def _unpack_out(op: str, kind: Kind, out: object, with_dlse: bool) -> tuple[Any, ...]:
    """`out` with one entry for each name in OUTPUTS, None where nothing is given."""
    names = OUTPUTS[op][:4]
    if not isinstance(out, tuple | list):
        raise TypeError(f"out must be None or a tuple ({', '.join(names)}) of arrays; got {type(out).__name__}")
    if len(out) != len(names) and not (with_dlse and len(out) == 5):
        raise ValueError(
            f"out must have {len(names)} entries ({', '.join(names)})"
            + (" or 5, with gdlse" if with_dlse else "")
            + f"; got {len(out)}"
        )
    given = (*out, *(None for _ in OUTPUTS[op][len(out) :]))
    for name, x in zip(OUTPUTS[op], given, strict=True):
        if x is not None and arrays.kind_of(x, f"out ({name})") is kind:
            if not kind.mutable:
                raise TypeError(f"out ({name}) must be an array that can be written to; {kind.name} arrays cannot")
            if not kind.writable(x):
                raise ValueError(f"out ({name}) must be writable; got a read-only array")
    return given


def _label(name: str) -> str:
    return f"out ({name})"


_LABELS = {op: tuple(map(_label, OUTPUTS[op])) for op in OUTPUTS}


def logical(name: str, given: Layout, layout: str) -> Layout:
    """The same memory with its axes in the order batch, head, row, width."""
    shape, strides, dtype, device = given
    if len(AXES[name]) == 3:
        shape, strides = shape[:3], strides[:3]
    elif layout == "bnhd":
        shape = (shape[0], shape[2], shape[1], shape[3])
        strides = (strides[0], strides[2], strides[1], strides[3])
    return Layout(shape, strides, dtype, device)


def compute_in_blocks(
    problem: Problem, inputs: Mapping[str, View | None], outputs: Mapping[str, View | None], stream: int
) -> None:
    """Compute with the blocked engine, on the device of the arrays; absent ones are None or missing."""
    from flashbob_cupy import blocked

    engine = getattr(blocked, problem.op)
    q = inputs["q"]
    assert q is not None
    borrowed = [*map(inputs.get, INPUTS[problem.op]), *map(outputs.get, OUTPUTS[problem.op])]
    if q.device[0] == "cpu":
        engine(problem, *(view and arrays.numpy_view(view) for view in borrowed))
    else:
        with arrays.cupy_stream(stream, q.device[1]):
            engine(problem, *(view and arrays.cupy_view(view) for view in borrowed))


class _Call:
    """What is the same in all calls with the same options on arrays that lie the same way.

    Arrays are always in one order: inputs, preallocated results, new results; absent ones have no place in it.
    """

    def __init__(
        self,
        op: str,
        kind: Kind,
        names: tuple[str, ...],
        tokens: list[Any],
        causal: bool,
        scale: float | None,
        window: Window | None,
        layout: str,
        deterministic: bool,
    ) -> None:
        check_layout(layout)
        described = {name: kind.translate(name, *tokens[place :: len(names)]) for place, name in enumerate(names)}
        inputs = {name: described.get(name) for name in INPUTS[op]}
        self.problem: Problem = make_problem(
            op, inputs, causal=causal, scale=scale, window=window, layout=layout, deterministic=deterministic
        )
        self.kind = kind
        self.device = described["q"].device
        lies = {name: logical(name, given, layout) for name, given in described.items() if name in inputs}
        self._first_output = len(lies)
        #: How each new result is made: a function to call, and the place of the array it is to be like, if any.
        self._new: list[tuple[Callable[..., Any], int | None]] = []
        self._outputs = tuple(name for name in OUTPUTS[op] if name != "gdlse" or self.problem.dlse)
        new_lies: dict[str, Layout] = {}
        for name in self._outputs:
            given = described.get(_label(name))
            if given is not None:
                check_output(self.problem, name, given, layout, self.device)
                if arrays.overlaps_itself(given):
                    raise ValueError(
                        f"out ({name}) must not overlap itself; got shape {given.shape} with strides {given.strides}"
                    )
                lies[name] = logical(name, given, layout)
            else:
                shape = tuple(getattr(self.problem, axis) for axis in axes_of(name, layout))
                new = Layout(shape, arrays.row_major(shape), self.problem.dtype_of(name), self.device)
                new_lies[name] = logical(name, new, layout)
                alike = next((place for place, given in enumerate(described.values()) if given == new), None)
                if kind.twin is not None and alike is not None:
                    self._new.append((kind.twin, alike))
                else:
                    self._new.append((kind.allocator(shape, new.dtype, self.device), None))
        self._lies = lies | new_lies
        #: Label, layout and extent of every array there is, to see that preallocated results have memory of their own.
        self._spans = tuple((label, lie, *arrays.extent(lie)) for label, lie in described.items())
        self._apart: list[int] | None = None  # the last addresses for which that was seen
        self._scratch: dict[int, Callable[[], Any]] = {}
        self._prepared: kernels.Prepared | None = None
        if self.device[0] == "cuda" and not self.problem.vanishes:
            from flashbob_cupy import kernels

            if plan.route(self.problem, kernels.device_info(self.device[1])) != "blocked":
                strides = {name: lie.strides for name, lie in self._lies.items()}
                self._prepared = kernels.prepare(self.problem, strides, self.device[1])
        self._result = _RESULTS[op]

    def check_stream(self, stream_device: int | None) -> None:
        kind, index = self.device
        if kind == "cpu":
            raise ValueError("stream must be None for arrays on the CPU; q is on the CPU")
        if stream_device not in (None, index):
            raise ValueError(f"stream must be on cuda:{index} like q; got a stream of cuda:{stream_device}")

    def run(self, q: Any, pointers: list[int], owners: list[Any], given: tuple[Any, ...], stream: int | None) -> Any:
        """Compute on one set of arrays; `given` are preallocated results, or empty."""
        kind, (place, index) = self.kind, self.device
        if given and pointers != self._apart:
            self._check_overlap(pointers)
            self._apart = pointers.copy()
        if place == "cpu":
            return self._compute(q, pointers, owners, given, 0)
        current = kind.current_stream(index)
        if stream is None:
            stream = current
        if stream == current and kind.is_current(index):
            return self._compute(q, pointers, owners, given, stream)
        with kind.on(stream, index):
            results = self._compute(q, pointers, owners, given, stream)
            kind.hold(owners, stream, index)
        return results

    def _check_overlap(self, pointers: list[int]) -> None:
        """Refuse preallocated results that share memory with an input or with each other."""
        earlier: list[tuple[int, int, str, View]] = []
        for place, ((label, lie, below, size), pointer) in enumerate(zip(self._spans, pointers, strict=True)):
            low, high, view = pointer - below, pointer - below + size, View(pointer, *lie, None)
            if place >= self._first_output:
                for other_low, other_high, other, taken in earlier:
                    if low < other_high and other_low < high and arrays.overlap(view, taken):
                        raise ValueError(f"{label} must not share memory with {other}")
            earlier.append((low, high, label, view))

    def _compute(self, q: Any, pointers: list[int], owners: list[Any], given: tuple[Any, ...], stream: int) -> Any:
        kind = self.kind
        new = [make() if like is None else make(owners[like]) for make, like in self._new]
        pointers += map(kind.pointer, new)
        if self._prepared is not None:
            recipe = self._prepared.recipe(pointers)
            if recipe.workspace:
                workspace = self._workspace(recipe.workspace)  # held until everything is launched
                recipe.run(pointers, kind.pointer(workspace), stream)
            else:
                recipe.run(pointers, 0, stream)
        else:
            results = [x for x in given if x is not None] + new
            self._compute_without_kernels(pointers, owners + new, results, stream)
        if kind.finishes:
            new = [kind.finish(x, q) for x in new]
        if given:
            fresh = iter(new)
            new = [next(fresh) if x is None else x for x in given[: len(self._outputs)]]
        return self._result(new)

    def _compute_without_kernels(self, pointers: list[int], owners: list[Any], results: list[Any], stream: int) -> None:
        views = {
            name: View(pointer, lie.shape, lie.strides, lie.dtype, lie.device, owner)
            for (name, lie), pointer, owner in zip(self._lies.items(), pointers, owners, strict=True)
        }
        if not self.problem.vanishes:
            compute_in_blocks(self.problem, views, views, stream)
            return
        for name, x in zip(list(views)[self._first_output :], results, strict=True):
            if 0 not in views[name].shape:
                self.kind.fill(x, views[name], -math.inf if name == "lse" else 0.0)

    def _workspace(self, size: int) -> Any:
        """Scratch of so many bytes, from the allocator that the results come from."""
        make = self._scratch.get(size)
        if make is None:
            make = self._scratch[size] = self.kind.allocator((size,), "uint8", self.device)
        return make()
