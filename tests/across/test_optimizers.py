"""The law for every optimizer that Optax exports: enumerated from its modules, never from a list."""

import inspect
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests.tiers import sweep

K, WINDOWS = 3, 2

# What a factory's required parameters are given, by name.
ARGUMENTS = {
    "learning_rate": 0.05,
    "clipping": 0.1,
    "eta": 0.01,
    "gamma": 0.55,
    "inner": optax.adam(0.1),
    "optimizer": optax.adam(0.1),
    "base_optimizer": optax.sgd(0.1),
    "adv_optimizer": optax.sgd(0.01),
    "fast_optimizer": optax.sgd(0.1),
    "tx": optax.adam(0.1),
    "sync_period": 1,
    "slow_step_size": 0.5,
    "max_consecutive_errors": 2,
    "should_transform_fn": lambda step, **_: step >= 1,
    "max_delta": 0.1,
    "threshold": 0.1,
    "max_norm": 0.1,
    "decay": 0.9,
    "mask": {"w": True, "b": False},
    "freeze_mask": {"w": True, "b": False},
    "inner_factory": optax.adam,
    "transforms": {"a": optax.adam(0.1), "b": optax.sgd(0.1)},
    "param_labels": {"w": "a", "b": "b"},
    "step_size": -0.1,
    "step_size_fn": lambda step: -0.1 / (1 + step),
    "max_backtracking_steps": 3,
    "max_linesearch_steps": 3,
    "measure": lambda updates, *_, **__: jnp.sum(updates["w"]),
    "measure_name": "norm",
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
}


def all_matrices(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


SPECIAL = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip_by_global_norm(0.5)), ("adam", optax.adam(0.1))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(0.1),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda g, p: g - p, updates, params)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g - p),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, 0.9),
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=all_matrices), {"w": True, "b": False}
    ),
    "snapshot": lambda: optax.snapshot("norm", ARGUMENTS["measure"]),
    "add_noise": lambda: optax.add_noise(0.01, 0.55, key=0),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
}
# What an optimizer's update is given beside the parameters, where it is not "value", "grad" and "value_fn".
EXTRA_ARGS = {"sam": ("grad_fn",), "sophia": ("obj_fn",), "hutchinson_estimator_diag_hessian": ("obj_fn",)}
EXCLUDED = {
    "apply_every": "accumulates itself, without weights",
    "monitor": "the tree of its state changes at the first update, so it runs in no scan and in no cond",
    "lookahead": "its gradients have another tree than its parameters; accumulate inside: lookahead(accumulated, ...)",
    "differentially_private_aggregate": "takes the gradient of each example, with an axis for them, and not their mean",
    "dpsgd": "takes the gradient of each example, with an axis for them, and not their mean",
}


def exported():
    found = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            factory = getattr(module, name)
            if inspect.isfunction(factory) and not name.startswith("_") and name not in EXCLUDED:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # a deprecated optimizer counts as well
                    inner = build(name, factory)
                if isinstance(inner, optax.GradientTransformation):
                    found[f"{module.__name__}.{name}"] = inner
    return found


def build(name, factory):
    if name in SPECIAL:
        return SPECIAL[name]()
    signature = inspect.signature(factory)
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if "GradientTransformation" not in str(signature.return_annotation) and not set(required) <= {"learning_rate"}:
        return None  # some factories have no annotation; everything else without one is no factory
    return factory(**{argument: ARGUMENTS[argument] for argument in required})


OPTIMIZERS = exported()


def test_the_enumeration_finds_the_optimizers():
    assert len(OPTIMIZERS) >= 100
    assert {"optax.adamw", "optax.lbfgs", "optax.contrib.muon", "optax.contrib.dog"} <= set(OPTIMIZERS)
    annotated = [
        f"{module.__name__}.{name}"
        for module in (optax, optax.contrib)
        for name, factory in vars(module).items()
        if inspect.isfunction(factory)
        and "GradientTransformation" in str(inspect.signature(factory).return_annotation)
        and not name.startswith("_")
    ]
    assert {name for name in annotated if name.split(".")[-1] not in EXCLUDED} <= set(OPTIMIZERS)


def loss(params, x):
    return 0.5 * jnp.mean(
        jnp.sum((params["w"][None] - x[:, None, :]) ** 2, axis=(1, 2)) + jnp.sum((params["b"][None] - x) ** 2, 1)
    )


def train(inner, takes, batches):
    """WINDOWS updates of the whole batch, and the same through accumulation; one compilation for both."""
    start = {"w": jnp.arange(6.0).reshape(2, 3) / 4 + 1, "b": jnp.array([-1.0, 0.5, 2.0])}
    inner = optax.with_extra_args_support(inner)
    tx = optax_accum.accumulate_gradients(inner, every=K)

    def arguments(batch, value, grads):
        """As a user calls it: value and gradient are those of the micro-batch, a function that is called again of all."""
        whole = lambda p: loss(p, batch)
        given = {"value": value, "grad": grads, "value_fn": whole, "obj_fn": whole}
        given["grad_fn"] = lambda p, _: jax.grad(whole)(p)
        return {argument: given[argument] for argument in takes}

    def update(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = inner.update(grads, state, params, **arguments(batch, value, grads))
        return (optax.apply_updates(params, updates), state), None

    def micro_step(carry, xs):
        params, state = carry
        micro_batch, batch = xs
        value, grads = jax.value_and_grad(loss)(params, micro_batch)
        updates, state = tx.update(grads, state, params, **arguments(batch, value, grads))
        return (optax.apply_updates(params, updates), state), updates

    (whole, whole_state), _ = jax.lax.scan(update, (start, inner.init(start)), batches)
    micro_batches = batches.reshape(WINDOWS * K, -1, 3)
    (cut, state), updates = jax.lax.scan(
        micro_step, (start, tx.init(start)), (micro_batches, jnp.repeat(batches, K, axis=0))
    )
    return whole, whole_state, cut, state, updates


# One of each kind: of moments, of matrices, of a loss that is given, of a key, of a state that counts or of none; and
# wrapped in each way.
EACH = [
    *("optax.sgd", "optax.noisy_sgd", "optax.polyak_sgd", "optax.contrib.reduce_on_plateau", "optax.contrib.prodigy"),
    *("optax.contrib.muon", "optax.contrib.sam", "optax.contrib.schedule_free_adamw", "optax.contrib.dog"),
    *("optax.chain", "optax.masked", "optax.partition", "optax.inject_hyperparams", "optax.apply_if_finite"),
]


# What has an optimizer of its name is tested in it: `scale_by_adam` in `adam`.
TESTED = {name for name in OPTIMIZERS if "scale_by_" not in name or name.replace("scale_by_", "") not in OPTIMIZERS}


@pytest.mark.parametrize("name", sweep(sorted(TESTED), but=EACH))
def test_the_update_is_that_of_the_whole_batch(name):
    rng = np.random.default_rng(0)
    batches = jnp.asarray(rng.normal(size=(WINDOWS, 2 * K, 3)) + 4, jnp.float32)
    with jax.numpy_rank_promotion("allow"):  # Optax's own arithmetic
        whole, whole_state, cut, state, updates = jax.jit(train, static_argnums=(0, 1))(
            OPTIMIZERS[name], EXTRA_ARGS.get(name.split(".")[-1], ("value", "grad", "value_fn")), batches
        )
    chex.assert_trees_all_close(cut, whole, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(unkeyed(state.inner_opt_state), unkeyed(whole_state), rtol=1e-4, atol=1e-5)
    held = jax.tree.map(lambda u: u.reshape(WINDOWS, K, *u.shape[1:])[:, :-1], updates)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(held))
    assert state.gradient_step == WINDOWS


def unkeyed(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.parametrize("wrapped", [*sweep([True]), False])
def test_an_optimizer_that_takes_no_keyword_is_given_none_of_ours(wrapped):
    """Sharpness-aware minimisation, which takes the gradient at every second call to climb."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    tx = optax_accum.accumulate_gradients(sam, 2) if wrapped else sam
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    step, w, x = optax_accum.value_and_apply_gradients(loss, tx), jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
    now, state = w, tx.init(w)
    for index in range(4):
        _, now, state = step(now, state, x[index % 2 :: 2] if wrapped else x)
    want, state = w, sam.init(w)
    for _ in range(2 if wrapped else 4):
        updates, state = sam.update(jax.grad(loss)(want, x), state, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(now, want, rtol=1e-5)


def test_lookahead_goes_outside():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"Put optax.lookahead outside"):
        optax_accum.accumulate_gradients(optax.lookahead(optax.sgd(0.1), 2, 0.5), 2).init(params)
    tx = optax.lookahead(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), sync_period=4, slow_step_size=0.5)
    state = tx.init(params)
    for grad in (1.0, 3.0):
        updates, state = tx.update({"w": jnp.full(3, grad)}, state, params)
    np.testing.assert_allclose(updates.fast["w"], -0.2, rtol=1e-6)
