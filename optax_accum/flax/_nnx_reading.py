"""The variables of a model and an optimizer as a compiled step takes them, read again where they have moved."""

import operator
import weakref
from itertools import chain
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.tree_util import default_registry

from optax_accum._across import on_host
from optax_accum._core.state import AccumulationState, states_in
from optax_accum._core.types import Tree
from optax_accum.flax._versions import metadata_of, set_value, value_of


class ModuleForm(NamedTuple):
    """A model and an optimizer without the values of their variables: one program is compiled for each form.

    Attributes:
      tree: their tree, with variables as leaves.
      places: each leaf's index among the variables. One variable may have two places, such as a tied embedding.
      kinds: the tree of the list of variables, each once, with values as leaves: types and metadata.
    """

    tree: Any
    places: tuple[int, ...]
    kinds: Any

    def filled(self, values: list[Any]) -> Any:
        """A new model and optimizer, whose variables have these values."""
        variables = self.kinds.unflatten(values)
        return self.tree.unflatten([variables[place] for place in self.places])


class ModuleReading(NamedTuple):
    """A model and an optimizer as they were read.

    It holds no reference to the optimizer, so that it can be a value in a `WeakKeyDictionary`.

    Attributes:
      form: what a program is compiled for.
      variables: each once.
      model: the model.
      modules: all NNX modules, without the optimizer.
      containers: all other inner nodes, such as lists, and the state of the inner optimizer.
      content: the children of all inner nodes, as `_content` returned them.
    """

    form: ModuleForm
    variables: list[Any]
    model: Any
    modules: list[Any]
    containers: list[Any]
    content: tuple[Any, list[Any]]

    @property
    def values(self) -> list[Any]:
        return list(map(value_of, self.variables))

    def set_values(self, values: list[Any], before: list[Any]) -> None:
        """Sets the values that differ from before; setting takes the host longest."""
        for variable, value, old in zip(self.variables, values, before, strict=True):
            if value is not old:
                set_value(variable, value)

    def holds(self, model: Any, optimizer: Any) -> bool:
        """Whether only values have changed since; takes a third of the time of `read`."""
        if model is not self.model:
            return False
        labels, things = _content([optimizer, *self.modules], self.containers, self.variables)
        old_labels, old_things = self.content
        return labels == old_labels and not any(map(operator.is_not, things, old_things))


class ModuleReadings:
    """The last reading of each optimizer, with its model."""

    def __init__(self) -> None:
        self._kept = weakref.WeakKeyDictionary[Any, ModuleReading]()  # by optimizer
        # jit finds a program sooner by the same object than by an equal one.
        self._forms: dict[ModuleForm, ModuleForm] = {}

    def of(self, model: Any, optimizer: Any) -> ModuleReading | None:
        """A reading that still holds, or a new one; None if the two are no tree of variables."""
        if not isinstance(optimizer, nnx.Pytree):
            return None
        kept = self._kept.get(optimizer)
        if kept is not None and kept.holds(model, optimizer):
            return kept
        new = read(model, optimizer)
        if new is not None:
            self._kept[optimizer] = new = new._replace(form=self._forms.setdefault(new.form, new.form))
        return new


def read(model: Any, optimizer: Any) -> ModuleReading | None:
    """Flattens a model and an optimizer to their variables; None if they are no tree of variables."""
    modules: dict[int, Any] = {}
    containers: list[Any] = []

    def is_leaf(node: Any) -> bool:
        if is_variable(node) or id(node) in modules:  # a module in two places, or a cycle
            return True
        if isinstance(node, nnx.Pytree):
            modules[id(node)] = node
        else:
            containers.append(node)
        return False

    leaves, tree = jax.tree.flatten((model, optimizer), is_leaf=is_leaf)
    if not all(map(is_variable, leaves)):
        return None
    variables = list({id(leaf): leaf for leaf in leaves}.values())
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    kinds = jax.tree.structure(variables, is_leaf=lambda node: node is not variables and not is_variable(node))
    form = ModuleForm(tree, tuple([numbers[id(leaf)] for leaf in leaves]), kinds)
    del containers[0], modules[id(optimizer)]  # the outer tuple; and a reading must not keep the optimizer alive
    content = _content([optimizer, *modules.values()], containers, variables)
    return ModuleReading(form, variables, model, list(modules.values()), containers, content)


def _content(modules: list[Any], containers: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
    """Labels, to be compared by equality, and children, to be compared by identity."""
    attributes = list(map(vars, modules))  # a tenth of the time that flattening them takes
    flat = list(map(default_registry.flatten_one_level, containers))
    children = [tuple(children) for children, _ in flat]
    sizes = list(map(len, chain(attributes, children)))
    metadata = list(map(metadata_of, variables))
    labels = sizes, list(chain.from_iterable(attributes)), [label for _, label in flat], metadata
    values = [named.values() for named in attributes]
    return labels, list(chain.from_iterable([*values, *children]))


def values_of(form: ModuleForm, model: Any, optimizer: Any) -> list[Any]:
    """The values of the variables after a step; raises if the step has changed anything else."""
    after = read(model, optimizer)
    if after is None or after.form != form:
        raise ValueError(
            "A train step must leave the model and the optimizer the attributes and variables that they had: only "
            "values may change. Change the others between steps."
        )
    return list(map(value_of, after.variables))


def variables_in(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_variable)


def in_states_of(like: Tree, tree: Tree) -> Any:
    """Gives window states in `tree` the types (`Decided` or plain) that they have in `like`; variables stay."""
    of = iter(states_in(like))

    def change(node: Any) -> Any:
        return on_host.alike(node, next(of)) if isinstance(node, AccumulationState) else node

    return jax.tree.map(change, tree, is_leaf=lambda node: isinstance(node, AccumulationState) or is_variable(node))


def is_variable(node: Any) -> bool:
    return issubclass(type(node), nnx.Variable)  # faster than isinstance, which asks about tracers
