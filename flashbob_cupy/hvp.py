"""Hessian-vector products of a loss, whatever it goes through: a torch module, or a function of tensors or JAX arrays.

    from flashbob_cupy.hvp import hvp, linearize

    value, product = hvp(lambda model: loss(model(x), y), model, v)

    value, gradient, product = linearize(lambda model: loss(model(x), y), model)
    curvature = product(v)                                    # as often as needed: one more backward each

The Hessian is never formed. With attention from `flashbob_cupy.torch` or `flashbob_cupy.jax` nothing of the size of
queries times keys is either, so a product costs about three times a training step in time and little more than one in
memory.

`inputs` is what to differentiate with respect to, and may be nested: a torch module (its parameters that require grad,
by name), a tensor, tuples, lists and dicts of them, or any pytree of JAX arrays. Gradients, vectors and products have
its structure; for a module that is a dict by parameter name. A vector may also be a callable from an input to its part
of the vector, such as `torch.randn_like`. With JAX, both functions may be used inside jit, vmap and the like.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple


class Linearized(NamedTuple):
    """The value of a loss, its gradient, and its Hessian as a function from a vector to their product."""

    value: Any
    gradient: Any
    product: Callable[[Any], Any]


def hvp(function: Callable[[Any], Any], inputs: Any, vector: Any) -> tuple[Any, Any]:
    """The value of a scalar loss and the product of its Hessian with a vector.

    Args:
        function: called once, with `inputs` (a module itself, otherwise detached copies of the same structure), and
            returns a scalar.
        inputs: as in the description of the module.
        vector: as in the description of the module.

    Returns:
        (value, product), detached; product has the structure of `inputs`, with zeros where the loss does not depend on
        an input.

    Raises:
        TypeError, ValueError: inputs, vector or the result of `function` are not as described.
    """
    value, _, product = _linearize(function, inputs, keep=False)
    return value, product(vector)


def linearize(function: Callable[[Any], Any], inputs: Any) -> Linearized:
    """The value of a scalar loss, its gradient, and a function that multiplies its Hessian with any number of vectors.

    The graph of the gradient lives as long as that function does. Parameters must not change in between.

    Args:
        function: as in `hvp`.
        inputs: as in `hvp`.

    Raises:
        TypeError, ValueError: as in `hvp`.
    """
    return _linearize(function, inputs, keep=True)


def _linearize(function: Callable[[Any], Any], inputs: Any, *, keep: bool) -> Linearized:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(inputs, torch.nn.Module):
        parameters = {name: p for name, p in inputs.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("inputs must have parameters that require grad; this module has none")
        return _linearize_torch(torch, function, inputs, parameters, keep)
    leaves = _flatten(inputs)
    if torch is not None and leaves and all(isinstance(x, torch.Tensor) for x in leaves):
        for x in leaves:
            if not x.is_floating_point():
                raise TypeError(f"inputs must be floating-point tensors; got one of dtype {x.dtype}")
        copies = _unflatten(inputs, [x.detach().requires_grad_() for x in leaves])
        return _linearize_torch(torch, function, copies, copies, keep)
    jax = sys.modules.get("jax")
    if jax is not None:
        leaves = jax.tree.leaves(inputs)
        if leaves and all(isinstance(x, jax.Array) for x in leaves):
            return _linearize_jax(jax, function, inputs)
    found = ", ".join(sorted({type(x).__name__ for x in leaves})) or "nothing"
    raise TypeError(
        f"inputs must be a torch module, tensors or JAX arrays, in tuples, lists or dicts or alone; got {found}"
    )


def _linearize_torch(torch: Any, function: Callable[[Any], Any], argument: Any, tree: Any, keep: bool) -> Linearized:
    leaves = _flatten(tree)

    def backward(*arguments: Any, **options: Any) -> Any:
        with _in_this_thread(torch, leaves):
            return torch.autograd.grad(*arguments, materialize_grads=True, **options)

    with torch.enable_grad():
        value = function(argument)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            came = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"function must return a scalar tensor; got {came}")
        gradient = backward(value, leaves, create_graph=True)

    def product(vector: Any) -> Any:
        vectors = [vector(x.detach()) for x in leaves] if callable(vector) else _flatten(vector)
        shapes, wanted = ([tuple(x.shape) for x in arrays] for arrays in (vectors, leaves))
        if shapes != wanted:
            raise ValueError(f"vector must have the structure of inputs, with shapes {wanted}; got {shapes}")
        used = [(g, v) for g, v in zip(gradient, vectors, strict=True) if g.requires_grad]
        if not used:  # the loss is linear
            return _unflatten(tree, [torch.zeros_like(x) for x in leaves])
        outputs, cotangents = zip(*used, strict=True)
        products = backward(outputs, leaves, cotangents, retain_graph=keep)
        return _unflatten(tree, products)

    return Linearized(value.detach(), _unflatten(tree, [g.detach() for g in gradient]), product)


def _in_this_thread(torch: Any, leaves: list[Any]) -> Any:
    """PyTorch hands the derivatives of each GPU to a thread of its own and waits for it; where all leaves are on one
    device nothing is gained by that, and at short sequences it takes longer than the derivatives."""
    if len({x.device for x in leaves}) > 1:
        return nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


def _linearize_jax(jax: Any, function: Callable[[Any], Any], inputs: Any) -> Linearized:
    for x in jax.tree.leaves(inputs):
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            raise TypeError(f"inputs must be floating-point arrays; got one of dtype {x.dtype}")

    def scalar(x: Any) -> Any:
        value = function(x)
        if not isinstance(value, jax.Array) or value.shape != ():
            came = f"shape {value.shape}" if isinstance(value, jax.Array) else type(value).__name__
            raise ValueError(f"function must return a scalar array; got {came}")
        return value

    (value, gradient), tangent = jax.linearize(jax.value_and_grad(scalar), inputs)

    def product(vector: Any) -> Any:
        if callable(vector):
            vector = jax.tree.map(vector, inputs)
        came, wanted = (jax.tree.map(jax.numpy.shape, tree) for tree in (vector, inputs))
        if came != wanted:
            raise ValueError(f"vector must have the structure of inputs, with shapes {wanted}; got {came}")
        return tangent(vector)[1]

    return Linearized(value, gradient, product)


def _flatten(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _flatten(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in _flatten(branch)]
    return [tree]


def _unflatten(tree: Any, leaves: Iterable[Any]) -> Any:
    """A tree like `tree` with other leaves, in the order of `_flatten`."""
    remaining = iter(leaves)

    def build(branch: Any) -> Any:
        if isinstance(branch, dict):
            built = {key: build(branch[key]) for key in sorted(branch)}
            return {key: built[key] for key in branch}
        if isinstance(branch, tuple | list):
            branches = [build(b) for b in branch]
            return type(branch)(*branches) if hasattr(branch, "_fields") else type(branch)(branches)
        return next(remaining)

    return build(tree)
