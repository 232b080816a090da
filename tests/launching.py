"""One call of the kernels, as the engine makes it: prepare, find the recipe, run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flashbob_cupy import kernels
from flashbob_cupy.problem import INPUTS, OUTPUTS, Problem


class View(Protocol):
    """Where an array is, and its strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


def execute(
    problem: Problem,
    inputs: Mapping[str, View | None],
    outputs: Mapping[str, View | None],
    workspace: Callable[[int], View],
    stream: int = 0,
    known: dict[Any, kernels.Prepared] | None = None,
) -> None:
    """Launch everything a problem takes on device 0. What was prepared for the same problem may be `known`.

    Inputs and outputs are named as in problem.INPUTS and problem.OUTPUTS, in axis order; absent ones are None or
    missing. `workspace(nbytes)` is called at most once.
    """
    given = {**inputs, **outputs}
    views = {name: view for name in INPUTS[problem.op] + OUTPUTS[problem.op] if (view := given.get(name)) is not None}
    lies = {name: view.strides for name, view in views.items()}
    known = {} if known is None else known
    prepared = known.get((problem, *lies.items()))
    if prepared is None:
        prepared = known[problem, *lies.items()] = kernels.prepare(problem, lies, 0)
    pointers = [view.pointer for view in views.values()]
    recipe = prepared.recipe(pointers)
    scratch = workspace(recipe.workspace) if recipe.workspace else None  # held until everything is launched
    recipe.run(pointers, 0 if scratch is None else scratch.pointer, stream)
