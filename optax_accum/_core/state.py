"""The state of a window in flight, and how to read it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from optax_accum._core import dtypes, messages
from optax_accum._core.leaves import by_path, is_inexact, unwrapped
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Tree
from optax_accum._shared.arrays import short


class AccumulationState(NamedTuple):
    """State of `accumulate_gradients`.

    Its types, shapes and shardings do not change from one update to the
    next. The first four fields have the names of `optax.MultiStepsState`,
    and the first three mean the same. `acc_grads` is a sum here and a mean
    there: code that logs its norm asks `optax_accum.mean_grads(state)`.

    Attributes:
      mini_step: int32 []. Micro-steps in the window so far; 0 when a window
        has just closed.
      gradient_step: int32 []. Updates made: calls of the inner optimizer.
        Schedules inside `inner` count these.
      inner_opt_state: the state of `inner`, in the dtypes of
        `inner.init(params)`. Changes only with an update.
      acc_grads: `sum(w g)` over the window, the tree of the parameters in
        the accumulator's dtype; `MaskedNode` where a parameter is an
        integer, and `()` for `every=1`. While `mini_step` is 0 it holds the
        sum of the window before, which the next micro-step overwrites.
      weight: float [], default float dtype. `sum(w)` over the window so
        far.
      mean_args: for each name in the factory's `mean_args` `sum(w x)`, a
        tree like the argument, and `sum(w)`, [], kept as `acc_grads` is.
        For the log: `state.mean_args["value"].mean`.
      emitted: bool []. Whether the last micro-step made an update; read it
        with `has_updated`.
      skipped: int32 []. Micro-batches left out by `nonfinite="skip"`,
        `"omit"` or a callable, since `init`.
      discarded: int32 []. Windows that closed without an update (weight
        zero, `nonfinite="discard"`, `discard_if`) or were dropped by
        `discard_window`, since `init`.
      batches: int32 []. Micro-batches given since `init`, those left out
        too: a resumed loop goes on with batch number `batches`. A call that
        flushes with weight 0 only closes the window, and is none.
      skip_state: the `info` that a callable `nonfinite` returned last; `()`
        otherwise.
      samples: with `statistics`, sums over the window of squared norms;
        `()` otherwise.
      statistics: with `statistics`, the estimates of noise and signal so
        far (see `optax_accum.statistics`); `()` otherwise.
      seen: with `statistics` or a schedule of tokens, the weight of all
        windows that made an update; `()` otherwise.

    With `devices`, the sums are those of each of the d devices: leaves
    of `acc_grads` are [d, ...], `weight` and those of `mean_args` and
    `samples` [d], one on each device. After an update, do not
    read `acc_grads`: the sum over devices, or a shard of it, may have
    overwritten the partial sums.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    weight: jax.Array
    mean_args: dict[str, WeightedSum]
    emitted: jax.Array
    skipped: jax.Array
    discarded: jax.Array
    batches: jax.Array
    skip_state: Any
    samples: Any = ()
    statistics: Any = ()
    seen: Any = ()


def _no_field(state: AccumulationState, name: str) -> NoReturn:
    """Tells where the inner optimizer's fields are, for `schedule_free_eval_params`, say, which looks for them here."""
    raise AttributeError(
        f"An AccumulationState has no field {name!r}: it holds the state of the inner optimizer. Pass "
        "state.inner_opt_state."
    )


AccumulationState.__getattr__ = _no_field  # type: ignore[attr-defined]


def holds_sum(state: AccumulationState) -> bool:
    """Whether gradients are kept from one micro-step to the next; not for `every=1`."""
    return not (type(state.acc_grads) is tuple and not state.acc_grads)  # a MaskedNode is a tuple, too


def holds_partial_sums(state: AccumulationState) -> bool:
    """Whether each of several devices has its own sum, not yet added."""
    return bool(state.weight.ndim)


def has_updated(state: Tree) -> jax.Array:
    """Returns whether the last micro-step made an update, as a bool [].

    Args:
      state: an `AccumulationState`, or any optimizer state that holds
        exactly one (of `optax.chain`, say, or the `opt_state` of an
        optimizer of Flax NNX).

    Raises:
      ValueError: `state` holds none, or several.

    Guarantees:
      The state stores the answer; it is not guessed from counters:

      * Before the first micro-step: False.
      * The micro-step only accumulated: False.
      * The window closed and `inner` ran: True.
      * The window closed and was discarded: False.
      * The micro-batch was skipped after an update: False.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> params = jnp.ones(3)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     _, state = tx.update(jnp.ones(3), state, params)
      ...     print(optax_accum.has_updated(state))
      False
      True
    """
    return find_state(state).emitted


def as_mean_args(names: Any) -> dict[str, Any]:
    """An example of each argument in `mean_args`; 0.0, where only its name is given."""
    several = isinstance(names, Iterable) and not isinstance(names, str)
    if not several or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'mean_args must be a tuple of names: mean_args={names!r}. Write mean_args=("value",), or () for none.'
        )
    reserved = [name for name in names if name in ("weight", "flush", "params")]
    if reserved:
        raise ValueError(
            f"mean_args must name extra arguments of the inner optimizer: mean_args={names!r}. "
            f"Leave out {reserved[0]!r}."
        )
    examples = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 0.0)
    for name, example in examples.items():
        if not callable(example):
            _check_example(name, example)
    return examples


def _check_example(name: str, example: Tree) -> None:
    """Raises for an example of a mean argument with a leaf that has no mean."""
    for path, leaf in by_path(example, ""):
        if isinstance(leaf, bool) or not (isinstance(leaf, float) or (hasattr(leaf, "shape") and is_inexact(leaf))):
            raise TypeError(
                "An example of a mean argument must be a tree of floating-point arrays, or a function of the "
                f"parameters that returns one: mean_args[{name!r}]{path} is {short(leaf)}. Pass jnp.zeros(shape), say, "
                "or 0.0 for a scalar."
            )


def no_means(examples: Mapping[str, Any], params: Tree, zeros: Callable[[Tree], Tree]) -> dict[str, WeightedSum]:
    """An empty sum for each mean argument; `zeros` makes it from shapes."""
    means: dict[str, WeightedSum] = {}
    for name, example in examples.items():
        shapes = jax.eval_shape(example, params) if callable(example) else example
        _check_example(name, shapes)
        weight = jax.ShapeDtypeStruct((), dtypes.default_float())
        means[name] = WeightedSum(zeros(jax.tree.map(_shape_of_sum, shapes)), zeros(weight))
    return means


def _shape_of_sum(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = dtypes.default_float() if isinstance(leaf, float) else dtypes.accumulator_dtype(leaf.dtype, None)
    return jax.ShapeDtypeStruct(getattr(leaf, "shape", ()), dtype)


def new_state(
    inner_opt_state: Any,
    acc_grads: Any,
    mean_args: dict[str, WeightedSum],
    weight: jax.Array,
    **fields: Any,
) -> AccumulationState:
    """The state before the first micro-step, with `fields` in place of zeros."""
    # One buffer for each field: a state that is donated may not hold the same one twice.
    count = lambda: jnp.zeros([], jnp.int32)
    blank = AccumulationState(
        mini_step=count(),
        gradient_step=count(),
        inner_opt_state=inner_opt_state,
        acc_grads=acc_grads,
        weight=weight,
        mean_args=mean_args,
        emitted=jnp.array(False),
        skipped=count(),
        discarded=count(),
        batches=count(),
        skip_state=(),
    )
    return blank._replace(**fields)


def states_in(state: Tree, kind: type | tuple[type, ...] = AccumulationState) -> list[Any]:
    is_one = lambda node: isinstance(node, kind)
    return [node for node in jax.tree.leaves(state, is_leaf=is_one) if is_one(node)]


OTHER_WINDOWS = (optax.MultiStepsState, optax.ApplyEvery)  # the states of other optimizers that accumulate


def check_no_other_window(state: Tree, caller: str) -> None:
    """Raises for an optimizer that accumulates, but not as we do: weights and a flush do not reach it."""
    if found := states_in(state, OTHER_WINDOWS):
        raise ValueError(
            f"{caller} must be given an optimizer whose windows take weights, or one without windows: its state holds "
            f"{type(found[0]).__name__}, which ignores weight and flush and counts micro-steps as updates. Wrap the "
            "optimizer inside it in optax_accum.accumulate_gradients(inner, every); from_multi_steps turns a running "
            "state of optax.MultiSteps into ours."
        )


@functools.cache
def warn_of_no_window() -> None:
    """Warns, once in a process, that what belongs to a window does nothing without one."""
    messages.warn(
        "weight, rows, flush and metrics belong to a window, and this optimizer has none: each call is an update. Wrap "
        "it in optax_accum.accumulate_gradients."
    )


def map_states(
    convert: Callable[..., Any],
    state: Tree,
    *rest: Tree,
    kind: type = AccumulationState,
    others: Callable[..., Any] = lambda leaf, *_: leaf,
) -> Tree:
    """Converts each state of a kind inside an optimizer state; `others` converts all other leaves."""
    is_one = lambda node: isinstance(node, kind)
    convert_one = lambda node, *parts: convert(node, *parts) if is_one(node) else others(node, *parts)
    return jax.tree.map(convert_one, state, *rest, is_leaf=is_one)


def find_state(state: Tree) -> AccumulationState:
    """The one `AccumulationState` inside an optimizer state; raises for none or several."""
    windows = states_in(state)
    if len(windows) != 1:
        raise ValueError(
            f"The optimizer state must hold exactly one AccumulationState: {type(state).__name__} "
            f"holds {len(windows)}. "
            + ("Pass the one that is meant." if windows else "Wrap the optimizer in accumulate_gradients.")
        )
    return unwrapped(windows[0])


def micro_step_of(state: Tree, *, keyed: bool) -> jax.Array | int:
    """The number of this micro-step in its window; 0 for an optimizer that has none.

    Raises:
      ValueError: there are several windows, and a key is to be drawn for this micro-step.
    """
    windows = states_in(state)
    if len(windows) > 1 and keyed:
        raise ValueError(
            f"rng_argnum draws a key for each micro-step of one window: the state holds {len(windows)} windows. "
            "Pass a key of your own at each micro-step and share it by whole_argnums."
        )
    return windows[0].mini_step if windows else 0
