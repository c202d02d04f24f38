"""Owns how a compiled step reaches the variables of a model and an optimizer. Knows nothing of what the step does."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def jit_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Does what `nnx.jit(fun, donate_argnums=(0, 1))` does, for `fun(model, optimizer, *args, **kwargs)`, in less time.

    `nnx.jit` walks the graph of its modules in Python, twice a call. A module is a tree to JAX as well, which JAX walks
    itself: at each call, so that nothing is remembered that could have changed since. A graph that is no tree of
    variables goes through `nnx.jit`: one where a module stands in two places, or where an array is no variable.
    """
    of_graphs = nnx.jit(fun, donate_argnums=(0, 1))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def of_trees(form: tuple[Any, tuple[int, ...]], variables: list[Any], *args: Any, **kwargs: Any) -> Any:
        tree, places = form
        nodes = tree.unflatten([variables[place] for place in places])
        kinds = jax.tree.structure(variables)  # types, metadata
        out = fun(*nodes, *args, **kwargs)
        form_after, after = _read(nodes)
        if form_after != form or jax.tree.structure(after) != kinds:
            raise ValueError(
                "A train step must leave the model and the optimizer the attributes and variables that they had: only "
                "values may change. Change the others between steps."
            )
        return out, [variable.get_raw_value() for variable in after]

    @functools.wraps(fun)
    def call(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        form, variables = _read((model, optimizer))
        if not all(map(_is_variable, variables)):
            return of_graphs(model, optimizer, *args, **kwargs)
        out, values = of_trees(form, variables, *args, **kwargs)
        for variable, value in zip(variables, values, strict=True):
            variable.set_raw_value(value)
        return out

    call.lower = of_graphs.lower  # type: ignore[attr-defined]
    return call


def _read(nodes: Any) -> tuple[tuple[Any, tuple[int, ...]], list[Any]]:
    """Returns the variables, each once, and the form of the tree: what stands in it, and which variable where."""
    seen = set()

    def is_leaf(node: Any) -> bool:
        if _is_variable(node):
            return True
        if not isinstance(node, nnx.Pytree):
            return False
        if id(node) in seen:  # two places, or a cycle
            return True
        seen.add(id(node))
        return False

    leaves, tree = jax.tree.flatten(nodes, is_leaf=is_leaf)
    numbers: dict[int, int] = {}
    places = tuple([numbers.setdefault(id(leaf), len(numbers)) for leaf in leaves])
    return (tree, places), list({id(leaf): leaf for leaf in leaves}.values())


def _is_variable(node: Any) -> bool:
    return issubclass(type(node), nnx.Variable)  # faster than isinstance, which asks about tracers
