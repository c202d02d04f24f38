"""Primitives of other libraries: whole before they are registered, in the loop after; a name is registered once."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from optax_accum.primitives import Reduction, elementwise, leading_axes, register
from tests.rows.against import assert_whole, couplings, values, whole


def primitive(name, fun, shape_of=lambda x: x):
    """A primitive as a library makes it; its derivative is that of the function."""
    made = Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(shape_of)
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    ad.primitive_jvps[made] = lambda primals, tangents: jax.jvp(
        fun, primals, tuple(map(ad.instantiate_zeros, tangents))
    )
    return made


def assert_in_a_loop_once_registered(made, loss, **rules):
    assert made.name in whole(loss, *values())
    assert_whole(loss, *values(), tolerance=2e-6)
    register(made.name, **rules)
    assert whole(loss, *values()) == []
    assert_whole(loss, *values(), tolerance=2e-6)


@pytest.mark.sweep
def test_one_that_is_elementwise():
    made = primitive("other_cube", lambda x: x**3)
    loss = lambda p, b: jnp.mean(made.bind(b["x"] @ p["w"]))
    assert_in_a_loop_once_registered(made, loss, local=elementwise, is_cheap=True)


@pytest.mark.sweep
def test_one_of_the_last_axes():
    made = primitive("other_softmax", jax.nn.softmax)
    loss = lambda p, b: jnp.mean(made.bind(b["x"] @ p["w"]) ** 2)
    assert_in_a_loop_once_registered(made, loss, local=leading_axes(1))
    assert "other_softmax" in whole(lambda p, b: jnp.mean(made.bind((b["x"] @ p["w"]).T) ** 2), *values())


@pytest.mark.sweep
def test_one_that_reduces_rows():
    def of_some(equation, operands, wide, over):
        return over(jnp.abs(operands[0].astype(wide(operands[0].dtype))), axis=0)

    made = primitive("other_norm", lambda x: jnp.sum(jnp.abs(x), 0), lambda x: x.update(shape=x.shape[1:]))
    loss = lambda p, b: jnp.sum(made.bind(b["x"] @ p["w"]) ** 2)
    assert_in_a_loop_once_registered(made, loss, partial=Reduction(lambda view: view.ins == [0], part=of_some))
    assert couplings(loss, *values()) == ["other_norm"]


def test_a_rule_that_says_no_leaves_it_whole():
    made = primitive("other_sine", jnp.sin)
    register("other_sine", local=lambda view: False)
    assert "other_sine" in whole(lambda p, b: jnp.mean(made.bind(b["x"] @ p["w"])), *values())


def test_a_name_is_registered_once():
    register("other_a other_b", local=elementwise)
    for name in ("sin", "unvmap_any", "other_a", "other_b"):
        with pytest.raises(ValueError, match=f"registered once: '{name}' is registered already. Leave it out."):
            register(name, local=elementwise)
    register("other_c", local=elementwise)
