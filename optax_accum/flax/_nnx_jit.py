"""How a compiled step reaches the variables of a model and an optimizer, read again where they have moved."""

import functools
import operator
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.tree_util import default_registry

from optax_accum._core.memory import copied_to_host
from optax_accum.flax._versions import metadata_of, set_value, value_of


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


class Form(NamedTuple):
    """What a program is compiled for: all of a model and an optimizer but values.

    Attributes:
      tree: what stands in them, variables being leaves.
      places: of each leaf, its number among the variables. One may have two places, such as a tied embedding.
      kinds: the variables, each once, values being leaves: types and metadata.
    """

    tree: Any
    places: tuple[int, ...]
    kinds: Any

    def filled(self, values: list[Any]) -> Any:
        """Returns a model and an optimizer of this form, whose variables have these values."""
        variables = self.kinds.unflatten(values)
        return self.tree.unflatten([variables[place] for place in self.places])


class Reading(NamedTuple):
    """A model and an optimizer as they were read.

    It holds no reference to the optimizer, so that it can be a value in a `WeakKeyDictionary`.

    Attributes:
      form: what a program is compiled for.
      variables: each once.
      model: the model.
      modules: all in which something stands but the optimizer.
      containers: all else in which something stands, such as lists, and the state of the inner optimizer.
      content: what stood there.
    """

    form: Form
    variables: list[Any]
    model: Any
    modules: list[Any]
    containers: list[Any]
    content: tuple[Any, list[Any]]

    def holds(self, model: Any, optimizer: Any) -> bool:
        """Returns whether nothing but values has changed since, in a third of the time that reading takes."""
        if model is not self.model:
            return False
        labels, things = _content([optimizer, *self.modules], self.containers, self.variables)
        old_labels, old_things = self.content
        return labels == old_labels and not any(map(operator.is_not, things, old_things))


def read(model: Any, optimizer: Any) -> Reading | None:
    """Returns what stands in a model and an optimizer, or None if they are no tree of variables."""
    modules: dict[int, Any] = {}
    containers: list[Any] = []

    def is_leaf(node: Any) -> bool:
        if _is_variable(node) or id(node) in modules:  # a module in two places, or a cycle
            return True
        if isinstance(node, nnx.Pytree):
            modules[id(node)] = node
        else:
            containers.append(node)
        return False

    leaves, tree = jax.tree.flatten((model, optimizer), is_leaf=is_leaf)
    if not all(map(_is_variable, leaves)):
        return None
    variables = list({id(leaf): leaf for leaf in leaves}.values())
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    kinds = jax.tree.structure(variables, is_leaf=lambda node: node is not variables and not _is_variable(node))
    form = Form(tree, tuple([numbers[id(leaf)] for leaf in leaves]), kinds)
    del containers[0], modules[id(optimizer)]  # the pair of them, and what the reading is not to keep alive
    content = _content([optimizer, *modules.values()], containers, variables)
    return Reading(form, variables, model, list(modules.values()), containers, content)


def _content(modules: list[Any], containers: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
    """Returns labels, which are the same if they are equal, and the things themselves: equal ones may be two."""
    attributes = list(map(vars, modules))  # a tenth of the time that flattening them takes
    flat = list(map(default_registry.flatten_one_level, containers))
    children = [tuple(children) for children, _ in flat]
    sizes = list(map(len, chain(attributes, children)))
    metadata = list(map(metadata_of, variables))
    labels = sizes, list(chain.from_iterable(attributes)), [label for _, label in flat], metadata
    values = [named.values() for named in attributes]
    return labels, list(chain.from_iterable([*values, *children]))


def _is_variable(node: Any) -> bool:
    return issubclass(type(node), nnx.Variable)  # faster than isinstance, which asks about tracers
