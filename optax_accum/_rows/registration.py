"""How a library says what it knows of its primitives."""

from collections.abc import Sequence

from optax_accum._rows import registry
from optax_accum._rows.registry import Group, Reduction, Rule


def register(
    names: str,
    *,
    local: Rule | None = None,
    partial: Reduction | None = None,
    linear: Sequence[Group] = (),
    is_cheap: bool = False,
) -> None:
    """Tells how primitives treat rows.

    With cut(v) the rows of some units of a batch, or v if it has no rows, a
    primitive f is local if

        f(cut(x), cut(y)) = cut(f(x, y))

    and so is its derivative. Call it where your library is imported: a
    function that is compiled already stays as it is.

    Args:
      names: of primitives, divided by spaces.
      local: whether an equation is local. It is asked of equations whose
        operands and results have rows along known axes, and whose parameters
        do not depend on the number of rows, but for sizes.
      partial: how an equation that takes rows and makes none is joined from
        its parts.
      linear: groups of operands, by their places: the primitive is linear in
        each group if the other operands are fixed. `((0,), (1,))` for a
        product, `((0, 1),)` for a sum of two. It lets a derivative that a
        user wrote add up rows.
      is_cheap: whether to run it again costs less than to keep its result.

    Raises:
      ValueError: a name is registered already.

    Guarantees:
      * A primitive without rules runs on all rows, and so does an equation for
        which its rule says False.
      * Of a primitive that is local, each micro-batch runs its own rows, with
        sizes among the parameters (`shape`, `sizes`, `length`) in proportion.

    Example: a primitive before and after.
      >>> import jax.numpy as jnp, optax_accum
      >>> from jax.extend.core import Primitive
      >>> from jax.interpreters import ad, mlir
      >>> triple_p = Primitive("my_triple")
      >>> triple_p.def_impl(lambda x: 3 * x) and None
      >>> triple_p.def_abstract_eval(lambda x: x) and None
      >>> ad.deflinear2(triple_p, lambda ct, x: [triple_p.bind(ct)])
      >>> lowering = mlir.lower_fun(lambda x: 3 * x, multiple_results=False)
      >>> _ = mlir.register_lowering(triple_p, lowering)
      >>> def loss(w, x):
      ...     return jnp.mean(triple_p.bind(jnp.tanh(x @ w)) ** 2)
      >>> w, x = jnp.ones((2, 3)), jnp.ones((8, 2))
      >>> "my_triple" in str(optax_accum.explain(loss, w, x))
      True
      >>> from optax_accum.primitives import elementwise, register
      >>> register("my_triple", local=elementwise, linear=((0,),))
      >>> "my_triple" in str(optax_accum.explain(loss, w, x))
      False
    """
    rules = {"local": local, "partial": partial}
    given = {key: rule for key, rule in rules.items() if rule is not None}
    registry.register(names, **given, linear=linear, is_cheap=is_cheap)
