"""Owns accumulation within a call: each micro-batch of a batch is differentiated and added. Knows no optimizer."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Call, Roles
from optax_accum._core import dtypes, tracing
from optax_accum._core.types import Name, Tree
from optax_accum._loss.meter import Options, as_meter
from optax_accum._loss.parts import Parts, Returns
from optax_accum._loss.weighing import divided
from optax_accum._space.here import as_reduction, here
from optax_accum._space.mismatch import refuse_shards
from optax_accum._space.space import Space
from optax_accum._within import gradients, microbatches, reductions, splitting, whole_batch
from optax_accum._within.cut import Rules, cut


@callables.renamed("num_microbatches")
def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: Name | Sequence[Name] = 0,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    group_size: int = 1,
    stacked: bool = False,
    weight_fn: Callable[..., Any] | None = None,
    weight_of: Callable[[Any, Any], Any] | None = None,
    rng_argnum: Name | None = None,
    carry_argnum: Name | None = None,
    aux_reduction: Tree = "mean",
    accumulator_dtype: Any = None,
    in_place: bool | None = None,
    unroll: bool = False,
    overlap: bool | None = None,
    reduce_axes: str | Sequence[str] | None = None,
    reduce_to: Tree = None,
    reduce_dtype: Any = None,
    statistics: bool | Options = False,
) -> Callable[..., tuple[Any, Any]]:
    """Replaces `jax.value_and_grad`, one micro-batch at a time.

        value, grads = value_and_grad(loss, 8)(params, batch)

    Same call, same return, same numbers, less memory: value, gradient and
    `aux` are the whole batch's, to rounding. The traced loss of the whole
    batch tells how its rows belong together, so any loss is exact, and
    nothing is declared: masks, several terms, BatchNorm, contrastive losses,
    dropout (`microbatched` says how, and what it guarantees). With
    `reduce_axes` the rows of all devices are one batch. Where the loss is
    linear in sums over rows, as a masked mean is, it is run once; inside
    `jit` each gradient is added inside the backward pass, and no second
    tree of gradients is stored. If k divides the rows, row r is in
    micro-batch `r mod k`, so the rows of a sharded batch need not move.

    Say how micro-batches add up if each is to count by itself, or where the
    trace cannot tell: for a loss that communicates by itself, and for arrays
    on Explicit axes that are not in `reduce_axes`. With one of `weight_fn`,
    `weight_of`, `rng_argnum`, `carry_argnum`, `whole_argnums`,
    `group_size`, `stacked` or `aux_reduction`, the loss is that of one
    micro-batch, and micro-batches with losses `l_i` and weights `w_i` give

        loss     = sum_i s_i l_i
        gradient = sum_i s_i dl_i,    s_i = w_i / sum_j w_j

    The shares `s_i` come from the data, before the first micro-batch (with
    `weight_of` or a `Ratio` after the last). If k does not divide the rows,
    the last rows form a smaller micro-batch.

    Example:
      A masked mean over normalised rows, with dropout:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, batch, key):
      ...     x = batch["x"] - batch["x"].mean(0, keepdims=True)
      ...     kept = jax.random.bernoulli(key, 0.9, x.shape)
      ...     error = (jnp.where(kept, x, 0) @ w - batch["y"]) ** 2
      ...     return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
      >>> grad_fn = optax_accum.value_and_grad(loss, microbatch_size=4)
      >>> batch = {"x": jnp.eye(10, 3), "y": jnp.ones(10)}
      >>> batch["mask"] = jnp.arange(10) < 7
      >>> args = jnp.ones(3), batch, jax.random.key(0)
      >>> value, grad = jax.jit(grad_fn)(*args)
      >>> whole, _ = jax.value_and_grad(loss)(*args)
      >>> bool(jnp.allclose(value, whole))
      True

    Args:
      fun: the loss of the whole batch, a real scalar, for any number of
        rows. With weights it is a mean over what they count, and may be a
        dict of scalar terms, which are added; or a `Ratio(total, count)` if
        only the loss knows the denominator, or a dict of those.
        docs/losses.md has losses of each kind.
      num_microbatches: the most micro-batches to make, n at most, of
        `ceil(n / num_microbatches)` rows each. It is the second positional
        argument, where `jax.value_and_grad` has `argnums`.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      argnums: the argument to differentiate, or several, as in
        `jax.value_and_grad`.
      has_aux: `fun` returns `(loss, aux)`.
      batch_argnums: the argument, or several, that hold the batch: trees
        whose arrays are cut along their first axis; scalars stay whole, and
        a list of them is refused. Here, and wherever arguments are named,
        `1`, `"x"` and `(1, "mask")` are positions in `fun` and names of its
        parameters: either way, a call may pass the argument by position or
        by keyword.
      whole_argnums: arguments that all micro-batches get whole though they
        have as many rows, and keys that they share on purpose. Other
        arguments stay whole without being named.
      group_size: this many consecutive rows always stay in one micro-batch
        (pairs, the completions of one prompt).
      stacked: the batch is split already, [k, m, ...]: micro-batch j is
        `leaf[j]`. Pass neither `num_microbatches` nor `microbatch_size`.
        Leaves may differ in m, as those of graphs do. Use `aux_reduction=
        "stack"`, not `"concat"`.
      weight_fn: called with the micro-batch only (or with all arguments in
        `batch_argnums`, in order), returns how much it counts: a real
        scalar of at least 32 bits, such as `mask.sum()`, or a dict with one
        for each term of the loss. Default: the number of rows. It is traced
        under `jax.vmap`.
      weight_of: `weight_of(value, aux)`, for a weight that `fun` computes
        (`aux` is None without `has_aux`): losses times weights are added,
        and divided by the sum of weights, as with a `Ratio`.
      rng_argnum: an argument that is a key, or a tree of keys: micro-batch
        i gets `jax.random.fold_in(key, i)`.
      carry_argnum: an argument that each micro-batch hands to the next
        (statistics of BatchNorm): `fun` returns `(loss, carry)`, or
        `(loss, (aux, carry))` with `has_aux`.
      aux_reduction: how to combine `aux`, one name or a pytree prefix of
        names: `"mean"` (weighted as the loss is; by rows if the loss is a
        dict of terms with weights of their own), `"sum"`, `"max"`, `"min"`,
        `"concat"` (rows, in their order), `"stack"` (one for each
        micro-batch), `"last"`, or a function `(a, b) -> c` that merges two.
      accumulator_dtype: the dtype to add in, and to return, or a pytree
        prefix of dtypes. By default, and where it is None, sums are in at
        least float32, and gradients come back in the parameters' dtypes.
      in_place: whether to add inside the backward pass: by default wherever
        JAX can. Pass False if you differentiate twice through a `jit` (a
        Hessian). `logging.getLogger("optax_accum")` tells, at level INFO,
        which parameters' gradients are added there, and why others are not.
      unroll: compile each micro-batch separately, for convolutions on CPU,
        which XLA runs many times slower inside any loop
        (jax-ml/jax#12868). Compile time grows with k. On CPU up to JAX
        0.10, memory is the whole batch's.
      reduce_axes: the mesh axes over which the batch is sharded, for one
        reduction per call; see `optax_accum.sharding`.
      reduce_to: where the sum over these axes goes; see
        `optax_accum.sharding`.
      reduce_dtype: the dtype in which gradients cross the network; see
        `optax_accum.sharding`.
      overlap: whether gradients are added over the devices inside the last
        micro-batch's backward pass, so that communication overlaps the
        matrix products that follow. That micro-batch is compiled
        separately. By default on GPUs, from 64 MiB of gradients on, without
        `reduce_to`.
      statistics: whether to measure gradients; the function then returns
        `((value, statistics), gradient)`. See `optax_accum.statistics`.

    Returns:
      A function of the arguments of `fun`, which returns what
      `jax.value_and_grad(fun, argnums, has_aux)` returns.

    Raises:
      TypeError, ValueError: invalid arguments, when you build or trace; a
        loss that is another program for more rows. Where micro-batches are
        weighed, also a random key that neither `rng_argnum` nor
        `whole_argnums` names, numbers drawn for each row from a key that
        `fun` closes over, and another argument with as many rows as the
        batch.

    Guarantees:
      Known when tracing:

      * `aux` holds a random key, or its reduction does not fit (`"mean"` of
        an integer, `"max"` of a complex number, `"concat"` without rows):
        an error.
      * `aux` of another shape in the smaller last micro-batch, apart from
        its rows in `"concat"`: an error.
      * A loss that comes together in its end, and is not linear there (a
        variance, a balance term): a forward pass for the cotangents comes
        first. One that takes rows together earlier (BatchNorm) keeps what
        crosses for all rows, and has no `statistics`.
      * `reduce_to="partial"`: each device has a batch of its own.
      * A loss below 32 bits: the shares are rounded to its dtype; return
        `loss.astype(jnp.float32)`.
      * bfloat16 parameters, or float32 ones that `fun` casts: their
        gradients are added inside the backward pass, in float32.
      * float16 in `fun`, without a `jax.custom_vjp`: gradients are added
        as large as those of the whole batch, and scaled by their shares at
        the end, so that a small share does not underflow.
      * A `jax.custom_vjp` in `fun` whose rule is not linear (a clip): the
        rule gets `s_i dl_i`, the micro-batch's part of the gradient. That
        is exact for a rule that takes rows one by one; a gradient of
        parameters is not the whole batch's then, as `verify` says.
      * A parameter that is used twice: the parts of its gradient are added
        one by one; the sum is the same to rounding.
      * Differentiated again (`hessian`); JAX before 0.8.1; an
        `accumulator_dtype` narrower than the parameters: gradients are
        added after the backward pass. The second derivatives by bfloat16
        arrays are added in bfloat16: take them by float32 ones.
      * Differentiated again through a `jit` or `jax.checkpoint`: an error;
        pass `in_place=False`.

      Known when running:

      * `"sum"` of bools: counts them, in int32.
      * A weight of zero: its micro-batch is not run, so the number of those
        that run may vary without a new compilation. A micro-batch that is
        not run has zeros in `"concat"` and `"stack"`, and nothing
        elsewhere. On several devices a micro-batch that counts on one of
        them hands its carry on from all; with `overlap`, the last one is
        always run.
      * `weight_of` gives 0: the micro-batch is run; guard a 0 / 0 in its
        loss with `jnp.maximum`.
      * The weights add to zero: a zero loss and a zero gradient. `"max"` of
        nothing is the lowest number of its dtype: `-inf`, False of bools.
      * A weight of zero for one term only: the term adds nothing, but is
        computed, and a NaN of it reaches the gradient. Guard a 0 / 0 in it
        with `jnp.maximum`.
      * Called outside `jit`: the micro-batches run one after the other.
        `fun` is traced all the same; if it looks at values, which no trace
        has, its micro-batches are weighed as with options. Gradients are
        added after the backward pass. Nothing is compiled, but with
        `reduce_axes`, where every call is: use `jit`.

    References:
      Adding inside the backward pass uses JAX's mutable arrays
      (`jax.new_ref`, `jax.vjp(...).with_refs`). The interleaved cut is also
      that of `optax.microbatch`.
    """
    _check_no_argnums(num_microbatches)
    reductions.check_names("aux_reduction", aux_reduction, reductions.REDUCTIONS)
    single = isinstance(argnums, int | str)
    # Of the tuple of differentiated arguments.
    of_params = lambda prefix: (prefix,) if single else tuple(prefix) if isinstance(prefix, list) else prefix
    if isinstance(statistics, Options) and statistics.groups is not None:
        statistics = dataclasses.replace(statistics, groups=of_params(statistics.groups))
    roles = Roles(
        fun,
        argnums=argnums,
        batch_argnums=batch_argnums,
        whole_argnums=whole_argnums,
        rng_argnum=rng_argnum,
        carry_argnum=carry_argnum,
    )
    over = as_reduction(reduce_axes, reduce_to, reduce_dtype, partial=True)
    rules = Rules(
        fun=callables.as_function(fun),
        roles=roles,
        returns=Returns(has_aux, carry_argnum is not None, callables.as_weight_of(weight_of, weight_fn)),
        sizes=splitting.as_sizes(num_microbatches, microbatch_size, group_size, stacked),
        single=single,
        weight_fn=callables.as_weight_fn(weight_fn, roles),
        aux_reduction=aux_reduction,
        grad_reduction="mean",
        accumulator_dtype=of_params(checks.as_float_dtypes("accumulator_dtype", accumulator_dtype)),
        in_place=in_place,
        unroll=unroll,
        overlap=overlap,
        meter=as_meter(statistics),
        over=over._replace(to=reduce_to if reduce_to is None or over.is_partial else of_params(reduce_to)),
        of_rows=_tells_all(
            weight_fn, weight_of, rng_argnum, carry_argnum, stacked, group_size, whole_argnums, aux_reduction
        ),
    )
    _check_options(rules)
    return _computing(rules)


def _tells_all(*options: Any) -> bool:
    """Returns whether nothing is said of how micro-batches add up, so that the traced loss tells it."""
    nothing = (None, None, None, None, False, 1, (), "mean")
    return all(option is default or option == default for option, default in zip(options, nothing, strict=True))


def of_whole_batch(compute: Any) -> Callable[..., tuple[Any, Any]] | None:
    """Returns a function that `value_and_grad` made, if nothing was said of how micro-batches add up.

    It raises an `UnreadableError` where the traced loss does not tell it.
    """
    return _computing(dataclasses.replace(compute.rules, falls_back=False)) if compute.rules.of_rows else None


def one_by_one(compute: Any) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that `value_and_grad` made, where each micro-batch has a loss of its own, as across calls."""
    return _computing(dataclasses.replace(compute.rules, of_rows=False))


def replacing(compute: Any, grad_reduction: Tree) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that `value_and_grad` made, where some leaves get new values instead of gradients.

    `grad_reduction` is a prefix of the one argument that is differentiated: `"mean"` (weighted), or `"max"` or `"last"`
    for leaves whose backward pass returns new values in the place of gradients, such as the statistics of float8.
    """
    reductions.check_names("grad_reduction", grad_reduction, gradients.NAMES)
    return _computing(dataclasses.replace(compute.rules, grad_reduction=(grad_reduction,), of_rows=False))


def _computing(rules: Rules) -> Callable[..., tuple[Any, Any]]:
    @functools.wraps(rules.fun)
    def compute(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = rules.roles.bind(args, kwargs)
        return _of_rows(rules, call) if rules.of_rows else _value_and_grad(rules, call)

    compute.rules = rules  # type: ignore[attr-defined]
    return compute


def _check_no_argnums(num_microbatches: Any) -> None:
    """Raises for what `jax.value_and_grad` takes as its second argument, unless it could be a number."""
    if isinstance(num_microbatches, tuple | list | str) or (type(num_microbatches) is int and num_microbatches == 0):
        raise (ValueError if num_microbatches == 0 else TypeError)(
            f"num_microbatches must be an integer >= 1: num_microbatches={num_microbatches!r}. It is the second "
            f"argument here; for that of jax.value_and_grad, pass argnums={num_microbatches!r}."
        )


def _check_options(rules: Rules) -> None:
    """Raises for options that are no bools, or contradict each other."""
    checks.check_flag("unroll", rules.unroll, may_be_none=False)
    for name in ("in_place", "overlap"):
        checks.check_flag(name, getattr(rules, name))
    if rules.in_place and rules.unroll:
        raise ValueError(
            "in_place=True adds inside the backward pass, unroll=True after it: in_place=True, unroll=True. Pass one."
        )
    if rules.over.is_partial:
        rules.meter.refuse('Statistics take the sum of gradients: reduce_to="partial" was asked for. Leave it out.')


def _of_rows(rules: Rules, call: Call) -> tuple[Any, Any]:
    """Returns the whole batch's value and gradient, as the traced loss tells them."""
    checks.check_no_module(call[call.params])
    checks.check_differentiable(call[call.params])
    again = tracing.is_again(list(call.arguments.values()))
    call = call.with_values(call.params, jax.tree.map(jnp.asarray, call[call.params]))
    space = _checked_space(rules, call[call.params])
    try:
        local, outputs = space.run(lambda device, call: whole_batch.differentiated(rules, device, call, again), call)
    except whole_batch.UnreadableError:
        if not rules.falls_back:
            raise
        return _value_and_grad(rules, call)
    value = whole_batch.joined(space, local.outputs, outputs)
    grads = space.reduced(local.grads)[0]
    samples, weight = space.total((local.samples, local.weight))
    value = rules.meter.with_statistics(value, samples, grads, weight)
    grads = _in_dtypes(grads, call[call.params], rules.accumulator_dtype)
    return value, grads[0] if rules.single else grads


def _checked_space(rules: Rules, params: Tree) -> Space:
    space = here(rules.over)
    space.check_params(params)
    space.check_shared(params)
    refuse_shards(rules.meter, params, rules.over.axes)
    return space


def _value_and_grad(rules: Rules, call: Call) -> tuple[Any, Any]:
    """Adds the gradients of all micro-batches, on all devices, and returns what `jax.value_and_grad` would."""
    checks.check_no_module(call[call.params])
    again = tracing.is_again(list(call.arguments.values()))
    call = microbatches.checked_batch(call, rules.sizes)
    space = _checked_space(rules, call[call.params])
    local, carry = space.run(lambda device, call: cut(rules, device, call, again).add_up(), call)
    outputs = jax.tree.map(space.output, reductions.names_of(rules.aux_reduction, local.outputs), local.outputs)
    loss, grads = space.total(local.loss), space.reduced(local.grads)[0]
    loss, grads = divided((loss, grads), space.total(local.counted))
    kinds = rules.kinds(call[call.params])
    value = rules.returns.joined(Parts(loss, outputs, carry))
    samples, weight = space.total((local.samples, local.weight))
    value = rules.meter.with_statistics(value, samples, gradients.added(grads, kinds), weight)
    grads = gradients.over_devices(kinds, space, local.grads, grads, call[call.params])
    grads = _in_dtypes(grads, call[call.params], rules.accumulator_dtype)
    return value, grads[0] if rules.single else grads


def _in_dtypes(grads: Tree, params: Tree, dtype: Tree) -> Tree:
    """Returns gradients in the dtypes that were named, else in those of the parameters."""

    def cast(grad: Any, param: Any, named: Any) -> Any:
        if dtypes.is_float0(grad):
            return grad
        return grad.astype(jnp.result_type(param)) if named is None else grad

    return jax.tree.map(cast, grads, params, dtypes.named_dtypes(dtype, params))
