"""How a compiled step reaches the variables of a model and an optimizer: in one program, or in two."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from optax_accum._across import jit_step as two_programs
from optax_accum._across import on_host
from optax_accum._arguments import callables
from optax_accum._core.state import map_states
from optax_accum._core.types import Tree
from optax_accum._shared.arrays import copied_to_host
from optax_accum.flax._nnx_reading import (
    ModuleForm,
    ModuleReading,
    ModuleReadings,
    in_states_of,
    is_variable,
    values_of,
    variables_in,
)
from optax_accum.flax._versions import set_value, value_of


def jit_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`nnx.jit(fun, donate_argnums=(0, 1))`, for `fun(model, optimizer, *args, **kwargs)`, in less time.

    `nnx.jit` walks the graph of its modules in Python, twice a call. To JAX a module is also a pytree. It is flattened
    again only if something other than values has changed. A graph that is no tree of variables goes through `nnx.jit`:
    one in which a module stands in two places, or an array is no variable.
    """
    of_graphs, readings = nnx.jit(fun, donate_argnums=(0, 1)), ModuleReadings()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def of_trees(form: ModuleForm, values: list[Any], *args: Any, **kwargs: Any) -> Any:
        nodes = form.filled(values)
        return fun(*nodes, *args, **kwargs), values_of(form, *nodes)

    @functools.wraps(fun)
    def call(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reading = readings.of(model, optimizer)
        if reading is None:
            return of_graphs(model, optimizer, *args, **kwargs)
        before = reading.values
        out, values = of_trees(reading.form, before, *args, **kwargs)
        reading.set_values(values, before)
        return out

    def lower(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program of a call; the values may be shapes."""
        reading = readings.of(model, optimizer)
        if reading is None:
            return of_graphs.lower(model, optimizer, *args, **kwargs).lowered
        return of_trees.lower(reading.form, reading.values, *args, **kwargs)

    call.lower, call.keep = lower, keep  # type: ignore[attr-defined]
    return call


def keep(model: Any, optimizer: Any, *_: Any) -> Callable[[], None]:
    """Copies the values of all variables to the host; returns a function that restores them."""
    variables = [node for _, node in nnx.iter_graph((model, optimizer)) if isinstance(node, nnx.Variable)]
    copies = [jax.tree.map(copied_to_host, value_of(variable)) for variable in variables]

    def restore() -> None:
        for variable, kept in zip(variables, copies, strict=True):
            set_value(variable, jax.tree.map(lambda again: again(), kept))

    return restore


def jit_step(step: Callable[..., Any]) -> "JitStep":
    """Compiles a train step into two programs; each call runs one.

        train_step = jit_step(step)
        loss = train_step(model, optimizer, batch)

    It does for a step that changes its modules in place what
    `optax_accum.jit_step` does for functions: most micro-steps only add a
    gradient, and their program is handed neither the moments of the inner
    optimizer nor new parameters. What that page says of `flush`, of when
    there is one program, and of restored states holds here, too.

    Args:
      step: `step(model, optimizer, *args, **kwargs)`: a `train_step` of this
        package, or a step of your own that calls `optimizer.update(model,
        grads)` once. The optimizer is an
        `optax_accum.flax.nnx.Optimizer`. Further arguments are arrays, or
        trees of them. If `step` is jitted, the function inside is taken.
        Call its argument that closes a window `flush`.

    Returns:
      A `JitStep`: a function of the arguments of `step`, which may overwrite
      the arrays in model and optimizer. Its `one_program` says why there is
      only one program, if so. `lower(...)` lowers both, for a look at them
      and for `plan.fit(..., run=False)`.

    Raises:
      TypeError: `step` is no function, or the optimizer no
        `nnx.Optimizer`; a further argument is no array.
      ValueError: the step changes model or optimizer otherwise than by
        values of variables.

    Guarantees:
      The variables are those after `nnx.jit(step)`. One program, with the
      reason in `one_program`, also where a module stands in two places, or
      an array in no variable; a variable in two places is fine.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> from flax import nnx
      >>> from optax_accum.flax.nnx import Optimizer, jit_step
      >>> def step(model, optimizer, x):
      ...     loss = lambda model: jnp.mean(model(x) ** 2)
      ...     value, grads = nnx.value_and_grad(loss)(model)
      ...     optimizer.update(model, grads)
      ...     return value
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=2)
      >>> optimizer = Optimizer(model, tx, wrt=nnx.Param)
      >>> train_step = jit_step(step)
      >>> for _ in range(4):
      ...     value = train_step(model, optimizer, jnp.ones((3, 2)))
      >>> int(optimizer.updates[...]), train_step.one_program
      (2, None)
    """
    return JitStep(callables.as_step(step))


class JitStep:
    """A train step of NNX modules in two programs: what `jit_step` returns.

    Attributes:
      one_program: why there is one program and not two; None where there
        are two, and before the first call.
    """

    def __init__(self, step: Callable[..., Any]):
        functools.update_wrapper(self, step)
        self._step, self._readings = step, ModuleReadings()
        self._of_graphs: Any = nnx.jit(step, donate_argnums=(0, 1))
        self._steps: dict[ModuleForm, _OfForm] = {}
        self._graph: str | None = None  # the reason why nnx.jit compiles the step

    @property
    def one_program(self) -> str | None:
        reasons = [self._graph, *(known.step.one_program for known in self._steps.values())]
        return next((reason for reason in reasons if reason), None)

    def __call__(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reading = self._reading(model, optimizer)
        if reading is None:
            return self._of_graphs(model, optimizer, *args, **kwargs)
        (places, step), values = self._of(reading, optimizer), reading.values
        out, carried = step(places.carried(values), *args, **kwargs)
        reading.set_values(places.values(carried), values)
        return out

    def lower(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lowers both programs, for arrays or their shapes in the variables."""
        reading = self._reading(model, optimizer)
        if reading is None:
            return self._of_graphs.lower(model, optimizer, *args, **kwargs).lowered
        places, step = self._of(reading, optimizer)
        return step.lower(places.carried(reading.values), *args, **kwargs)

    def _reading(self, model: Any, optimizer: Any) -> ModuleReading | None:
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "The second argument of a step of jit_step must be an optax_accum.flax.nnx.Optimizer: it is a "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. The order is (model, optimizer, ...)."
            )
        reading = self._readings.of(model, optimizer)
        if reading is None:
            self._graph = "a module stands in two places, or an array in no variable, so nnx.jit compiles the step"
        return reading

    def _of(self, reading: ModuleReading, optimizer: Any) -> "_OfForm":
        if reading.form not in self._steps:
            places = Places.of(reading, optimizer)
            step = two_programs.jit_step(_of_values(self._step, reading.form, places), donate_argnums=0)
            self._steps[reading.form] = _OfForm(places, step)
        return self._steps[reading.form]


class _OfForm(NamedTuple):
    places: "Places"
    step: two_programs.JitStep


class Carried(NamedTuple):
    """The values of all variables of a model and an optimizer, in parts that a program may only pass through.

    Attributes:
      state: the optimizer's, as a tree.
      params: of the trained variables.
      others: statistics, keys, counters.
    """

    state: Tree
    params: list[Any]
    others: list[Any]


class Places(NamedTuple):
    """The index of each value of a `Carried` among all variables, and the tree of the optimizer's state."""

    tree: Any
    state: list[int]
    params: list[int]
    others: list[int]

    @classmethod
    def of(cls, reading: ModuleReading, optimizer: Any) -> "Places":
        numbers = {id(variable): number for number, variable in enumerate(reading.variables)}
        is_trained = nnx.filterlib.to_predicate(optimizer.wrt)
        of_model = ((path, node) for path, node in nnx.iter_graph(reading.model) if is_variable(node))
        state = [numbers[id(variable)] for variable in variables_in(optimizer.opt_state)]
        trained = (numbers[id(variable)] for path, variable in of_model if is_trained(path, variable))
        params = list(dict.fromkeys(trained))  # an older Flax yields a variable in two places twice
        tree = jax.tree.structure(optimizer.opt_state, is_leaf=is_variable)
        return cls(tree, state, params, [number for number in numbers.values() if number not in {*state, *params}])

    def carried(self, values: Sequence[Any]) -> Carried:

        def chosen(places: list[int]) -> list[Any]:
            return [values[place] for place in places]

        return Carried(self.tree.unflatten(chosen(self.state)), chosen(self.params), chosen(self.others))

    def values(self, carried: Carried) -> list[Any]:
        """The inverse of `carried`."""
        by_place = dict(zip(self.params + self.others, carried.params + carried.others, strict=True))
        state = map_states(on_host.plain, carried.state)
        leaves = self.tree.flatten_up_to(state)  # a masked parameter's placeholder is a value without leaves
        by_place.update(zip(self.state, leaves, strict=True))
        return [by_place[place] for place in range(len(by_place))]


def _of_values(step: Callable[..., Any], form: ModuleForm, places: Places) -> Callable[..., Any]:
    """The step as a function of the values of the modules' variables."""

    def run(carried: Carried, *args: Any, **kwargs: Any) -> tuple[Any, Carried]:
        model, optimizer = form.filled(places.values(carried))
        plain = optimizer.opt_state
        optimizer.opt_state = nnx.data(in_states_of(carried.state, plain))  # which may say whether the window closes
        out = step(model, optimizer, *args, **kwargs)
        after, optimizer.opt_state = optimizer.opt_state, nnx.data(plain)
        carried = places.carried(values_of(form, model, optimizer))
        return out, carried._replace(state=in_states_of(after, carried.state))

    run.__name__ = run.__qualname__ = getattr(step, "__name__", "step")
    signature = inspect.signature(step)
    first = inspect.Parameter("carried", inspect.Parameter.POSITIONAL_ONLY)
    run.__signature__ = signature.replace(parameters=[first, *list(signature.parameters.values())[2:]])  # type: ignore[attr-defined]
    return run
