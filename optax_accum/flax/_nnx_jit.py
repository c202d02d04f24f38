"""How a compiled step reaches the variables of a model and an optimizer: in one program, or in two."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from optax_accum._across import jit_step as two_programs
from optax_accum._across import on_host
from optax_accum._arguments import callables
from optax_accum._core.state import map_states
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
    run_graphs, readings = nnx.jit(fun, donate_argnums=(0, 1)), ModuleReadings()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def run_trees(form: ModuleForm, values: list[Any], *args: Any, **kwargs: Any) -> Any:
        nodes = form.filled(values)
        return fun(*nodes, *args, **kwargs), values_of(form, *nodes)

    @functools.wraps(fun)
    def call(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reading = readings.of(model, optimizer)
        if reading is None:
            return run_graphs(model, optimizer, *args, **kwargs)
        before = reading.values
        out, values = run_trees(reading.form, before, *args, **kwargs)
        reading.set_values(values, before)
        return out

    def lower(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program of a call; the values may be shapes."""
        reading = readings.of(model, optimizer)
        if reading is None:
            return run_graphs.lower(model, optimizer, *args, **kwargs).lowered
        return run_trees.lower(reading.form, reading.values, *args, **kwargs)

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
        self._run_graphs: Any = nnx.jit(step, donate_argnums=(0, 1))
        self._steps: dict[ModuleForm, _StepOfForm] = {}
        self._graph: str | None = None  # the reason why nnx.jit compiles the step

    @property
    def one_program(self) -> str | None:
        reasons = [self._graph, *(known.two_programs.one_program for known in self._steps.values())]
        return next((reason for reason in reasons if reason), None)

    def __call__(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reading = self._reading(model, optimizer)
        if reading is None:
            return self._run_graphs(model, optimizer, *args, **kwargs)
        step, values = self._of(reading, optimizer), reading.values
        out, carried = step.two_programs(step.carried(values), *args, **kwargs)
        reading.set_values(step.values(carried), values)
        return out

    def lower(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lowers both programs, for arrays or their shapes in the variables."""
        reading = self._reading(model, optimizer)
        if reading is None:
            return self._run_graphs.lower(model, optimizer, *args, **kwargs).lowered
        step = self._of(reading, optimizer)
        return step.two_programs.lower(step.carried(reading.values), *args, **kwargs)

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

    def _of(self, reading: ModuleReading, optimizer: Any) -> "_StepOfForm":
        if reading.form not in self._steps:
            self._steps[reading.form] = _StepOfForm(self._step, reading, optimizer)
        return self._steps[reading.form]


class _StepOfForm:
    """A step in two programs, for modules of one form, as a function of the values of their variables.

    It carries a tuple of these values. The variables of the optimizer's state are consecutive: their values are one
    element, in the state's tree, where `optax_accum.jit_step` finds the windows.
    """

    def __init__(self, step: Callable[..., Any], reading: ModuleReading, optimizer: Any):
        self._step, self._form = step, reading.form
        self._tree = jax.tree.structure(optimizer.opt_state, is_leaf=is_variable)
        first = next(iter(variables_in(optimizer.opt_state)), None)
        self._start = next((number for number, variable in enumerate(reading.variables) if variable is first), 0)
        self.two_programs = two_programs.jit_step(self._taking_values(), donate_argnums=0)

    def carried(self, values: list[Any]) -> tuple[Any, ...]:
        start, end = self._start, self._start + self._tree.num_leaves
        return *values[:start], self._tree.unflatten(values[start:end]), *values[end:]

    def values(self, carried: tuple[Any, ...]) -> list[Any]:
        """The inverse of `carried`."""
        state = self._tree.flatten_up_to(carried[self._start])  # a masked parameter's value has no leaves
        return [*carried[: self._start], *state, *carried[self._start + 1 :]]

    def _taking_values(self) -> Callable[..., Any]:
        def run(carried: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            state = carried[self._start]  # whose type may say whether its window closes
            model, optimizer = self._form.filled(self.values(map_states(on_host.plain, carried)))
            plain = optimizer.opt_state
            optimizer.opt_state = nnx.data(in_states_of(state, plain))
            out = self._step(model, optimizer, *args, **kwargs)
            after, optimizer.opt_state = optimizer.opt_state, nnx.data(plain)
            carried = self.carried(values_of(self._form, model, optimizer))
            state = in_states_of(after, carried[self._start])
            return out, (*carried[: self._start], state, *carried[self._start + 1 :])

        run.__name__ = run.__qualname__ = getattr(self._step, "__name__", "step")
        signature = inspect.signature(self._step)
        parameters = [inspect.Parameter("carried", inspect.Parameter.POSITIONAL_ONLY)]
        parameters += list(signature.parameters.values())[2:]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run
