"""How a compiled step reaches the variables of a model and an optimizer."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from optax_accum._core.memory import copied_to_host
from optax_accum.flax._nnx_reading import Form, Reading, read
from optax_accum.flax._versions import set_value, value_of


def jit_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Does what `nnx.jit(fun, donate_argnums=(0, 1))` does, for `fun(model, optimizer, *args, **kwargs)`, in less time.

    `nnx.jit` walks the graph of its modules in Python, twice a call. A module is a tree to JAX as well, which is read
    again only where something else than values has changed. A graph that is no tree of variables goes through
    `nnx.jit`: one where a module stands in two places, or where an array is no variable.
    """
    of_graphs = nnx.jit(fun, donate_argnums=(0, 1))
    readings = weakref.WeakKeyDictionary[Any, Reading]()  # by optimizer
    forms: dict[Form, Form] = {}  # a program is found sooner by the very form that it was compiled for

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def of_trees(form: Form, values: list[Any], *args: Any, **kwargs: Any) -> Any:
        nodes = form.filled(values)
        out = fun(*nodes, *args, **kwargs)
        after = read(*nodes)
        if after is None or after.form != form:
            raise ValueError(
                "A train step must leave the model and the optimizer the attributes and variables that they had: only "
                "values may change. Change the others between steps."
            )
        return out, list(map(value_of, after.variables))

    def current(model: Any, optimizer: Any) -> Reading | None:
        kept = readings.get(optimizer)
        if kept is not None and kept.holds(model, optimizer):
            return kept
        new = read(model, optimizer)
        if new is not None:
            readings[optimizer] = new = new._replace(form=forms.setdefault(new.form, new.form))
        return new

    @functools.wraps(fun)
    def call(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reading = current(model, optimizer) if isinstance(optimizer, nnx.Pytree) else None
        if reading is None:
            return of_graphs(model, optimizer, *args, **kwargs)
        values = list(map(value_of, reading.variables))
        out, values = of_trees(reading.form, values, *args, **kwargs)
        for variable, value in zip(reading.variables, values, strict=True):
            set_value(variable, value)
        return out

    def lower(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program of a call; the values may be shapes."""
        reading = current(model, optimizer) if isinstance(optimizer, nnx.Pytree) else None
        if reading is None:
            return of_graphs.lower(model, optimizer, *args, **kwargs).lowered
        return of_trees.lower(reading.form, list(map(value_of, reading.variables)), *args, **kwargs)

    call.lower, call.keep = lower, keep  # type: ignore[attr-defined]
    return call


def keep(model: Any, optimizer: Any, *_: Any) -> Callable[[], None]:
    """Copies the values of all variables to the host; returns what puts the values back that they have now."""
    variables = [node for _, node in nnx.iter_graph((model, optimizer)) if isinstance(node, nnx.Variable)]
    copies = [jax.tree.map(copied_to_host, value_of(variable)) for variable in variables]

    def restore() -> None:
        for variable, kept in zip(variables, copies, strict=True):
            set_value(variable, jax.tree.map(lambda again: again(), kept))

    return restore
