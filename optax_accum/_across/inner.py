"""The call of the inner optimizer, AdamW say, with a float32 mean: arguments, their dtypes, and permitted results."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from optax_accum._arguments import checks
from optax_accum._arguments.signature import misspelt, signature_of
from optax_accum._core import compilers, dtypes, equations
from optax_accum._core.state import OTHER_WINDOWS, AccumulationState, states_in
from optax_accum._core.types import Tree

Inner = optax.GradientTransformationExtraArgs


def update(
    inner: Inner, mean: Tree, grads: Tree, state: Tree, params: Tree | None, extra_args: Mapping[str, Any]
) -> tuple[Tree, Tree]:
    """Calls the inner optimizer with the window's mean.

    Updates have the dtypes that `grads` would have given; the state keeps its dtypes and its memory (the host's, say).
    """
    old, same = compilers.on_device(state), dtypes.same(mean, grads)
    run = lambda grads: inner.update(grads, old, params, **extra_args)
    try:
        with jax.named_scope("optax_accum.inner"):
            updates, new = run(mean)
    except Exception as error:
        check_inner_state(inner, state, mean if params is None else params, error)
        if not same and isinstance(error, TypeError | ValueError):
            error.add_note(_DTYPE_NOTE.format(emitted=dtypes.names_in(mean), given=dtypes.names_in(grads)))
        if "per_example_global_norm_clip" in str(error):
            error.add_note(_PRIVATE_NOTE)
        if any(map(dtypes.is_float0, jax.tree.leaves(mean))):
            error.add_note(_INTEGER_NOTE)
        raise
    if not same:
        updates = dtypes.cast_like(updates, jax.eval_shape(lambda: run(grads))[0])
    if not same_tree(new, state):
        return updates, dtypes.strong(new)
    leaves = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    if leaves and all(leaf is other for leaf, other in leaves):  # an optimizer without a state hands back any
        check_inner_state(inner, state, mean if params is None else params)
    remedy = "Begin with that dtype in init: jnp.zeros([]), say, not 0."
    checks.check_kinds("The state of the inner optimizer", new, old, remedy)
    return updates, compilers.to_memory_of(dtypes.cast_like(new, old), state)


def same_tree(new: Tree, old: Tree) -> bool:
    return jax.tree.structure(new) == jax.tree.structure(old)


def check_accumulates_once(state: Tree) -> None:
    if accumulating := states_in(state, (AccumulationState, *OTHER_WINDOWS)):
        raise ValueError(
            "inner must not accumulate gradients itself: the two windows would multiply, and the inner one would not "
            f"see the weights. The state of inner holds {type(accumulating[0]).__name__}. Accumulate once: "
            "accumulate_gradients around the whole chain."
        )


def check_no_lookahead(params: Tree) -> None:
    if isinstance(params, optax.LookaheadParams):
        raise TypeError(
            "Parameters must have the tree of their gradients: params=LookaheadParams(fast, slow). Put optax.lookahead "
            "outside: optax.lookahead(accumulate_gradients(...), sync_period, slow_step_size)."
        )


def check_inner_state(inner: Inner, state: Tree, params: Tree, cause: Exception | None = None) -> None:
    """Where something has failed: raises if the reason is a state of another optimizer than `inner`."""
    try:
        expected = jax.eval_shape(inner.init, params)
    except Exception:
        return  # an init that needs values tells nothing
    if same_tree(state, expected):
        return
    given, made = _kinds(state), _kinds(expected)
    if given == made:
        given, made = str(jax.tree.structure(state)), str(jax.tree.structure(expected))
    raise ValueError(
        f"The state must be that of this inner optimizer and these parameters: inner_opt_state={given}, and init gives "
        f"{made}. To go on with another optimizer, state._replace(inner_opt_state=tx.init(params).inner_opt_state)."
    ) from cause


def check_tree(inner: Inner, new: Tree, old: Tree, params: Tree) -> None:
    if not same_tree(new, old):
        check_inner_state(inner, old, params)
        raise ValueError(
            "The inner optimizer must keep the tree of its state, or micro-steps with and without an update would "
            f"return different ones: init gave {_beginning(old)}, update {_beginning(new)}. Put optax.monitor after "
            "the wrapper: optax.chain(accumulate_gradients(...), optax.monitor(...))."
        )


def _beginning(state: Tree) -> str:
    text = str(jax.tree.structure(state)).removeprefix("PyTreeDef")
    return text if len(text) < 80 else f"{text[:77]}..."


def check_extra_args(inner: Inner, names: set[str], args: tuple[Any, ...], extra_args: Mapping[str, Any]) -> None:
    """Raises for a misspelt `weight`, say, which would pass for an argument of `inner` and be lost."""
    own = "weight", "grad_weight", "flush"
    meant = misspelt(names - set(signature_of(inner.update).keywords), own)
    for name in ignored_args(inner, meant, args, extra_args):
        raise TypeError(
            f"{name}= looks like a misspelt {meant[name]}=, and the inner optimizer does not read it: {name!r}. Pass "
            f"{meant[name]}=, or put what reads {name} inside accumulate_gradients."
        )


def ignored_args(inner: Inner, names: Iterable[str], args: tuple[Any, ...], extra_args: Mapping[str, Any]) -> list[str]:
    """Which of these extra arguments the optimizer ignores."""
    return [name for name in sorted(names) if not _reads(inner, name, args, extra_args)]


def is_data(value: Any) -> bool:
    """Whether an argument is made of arrays and numbers: a traced program shows whether those are read."""
    kinds = jax.Array | np.ndarray | np.generic | int | float
    return all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(value))


def _reads(inner: Inner, name: str, args: tuple[Any, ...], extra_args: Mapping[str, Any]) -> bool:
    """Whether `inner` uses an argument that its signature does not name, as a member of a chain may."""
    others, value = dict(extra_args), extra_args[name]
    del others[name]
    try:
        jax.eval_shape(lambda: inner.update(*args, **others))
        if not is_data(value):
            return False
        program = jax.make_jaxpr(lambda value: inner.update(*args, **others, **{name: value}))(value).jaxpr
    except TypeError:  # it misses the argument, or needs its value
        return True
    read = {var for equation in program.eqns for var in equations.operands(equation)}
    return not read.isdisjoint(program.invars) or any(var in program.invars for var in program.outvars)


def _kinds(state: Tree) -> str:
    return f"({', '.join(map(_kinds, state))})" if type(state) is tuple else type(state).__name__


_PRIVATE_NOTE = (
    "DP-SGD clips the gradient of each example, and a sum over a window has no examples. Clip them before: accumulate "
    'their sum, with reduction="sum", and let the inner optimizer add the noise, once per update.'
)
_INTEGER_NOTE = (
    "An integer parameter has no gradient (float0), and most of Optax's optimizers calculate with it. Keep it out: "
    "optax.masked(inner, lambda tree: jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), tree))."
)
_DTYPE_NOTE = (
    "accumulate_gradients gave the inner optimizer gradients of dtype {emitted}, and was given {given}. An optimizer "
    "that needs the dtype of its parameters (optax.novograd and optax.contrib.mechanize over bfloat16 ones) gets it "
    'with emit_dtype="gradient".'
)
