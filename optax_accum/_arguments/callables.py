"""Checks of functions and optimizers that users pass, and of the arguments that these take."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import optax

from optax_accum._arguments.roles import Roles
from optax_accum._arguments.signature import signature_of
from optax_accum._shared.arrays import short
from optax_accum._shared.checks import as_function, counted

P = ParamSpec("P")
R = TypeVar("R")


def as_step(step: Any) -> Any:
    """A train step as a plain function: if it is jitted, the function inside."""
    as_function(step, "step", "Pass the train step, not what it returns.")
    is_jitted = hasattr(step, "lower") and hasattr(step, "__wrapped__")
    return step.__wrapped__ if is_jitted else step


def as_optimizer(tx: Any) -> Any:
    if isinstance(tx, type) or not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(f"tx must be an optimizer, with init and update: tx={short(tx)}. {_remedy(tx)}")
    return tx


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner` with support for extra arguments; it need not take `value`."""
    if not isinstance(inner, optax.GradientTransformation):
        remedy = _remedy(inner)
        if isinstance(inner, int):
            remedy = "The optimizer comes first: accumulate_gradients(optax.adam(1e-3), every=4)."
        if isinstance(inner, optax.MultiSteps):
            remedy = "Pass the optimizer that optax.MultiSteps wraps."
        raise TypeError(f"inner must be an optax.GradientTransformation: inner={short(inner)}. {remedy}")
    return ignoring(optax.with_extra_args_support(inner), "value")


def ignoring(tx: Any, *names: str) -> Any:
    """Makes an optimizer ignore these keyword arguments if it does not take them."""
    takes = signature_of(tx.update).takes
    ignored = [name for name in names if not takes(name)]
    if not ignored or not isinstance(tx, optax.GradientTransformationExtraArgs):
        return tx

    @functools.wraps(tx.update)
    def update(*args: Any, **extra_args: Any) -> tuple[Any, Any]:
        return tx.update(*args, **{name: arg for name, arg in extra_args.items() if name not in ignored})

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _remedy(passed: Any) -> str:
    """The remedy for an argument that is no optimizer."""
    if isinstance(getattr(passed, "tx", None), optax.GradientTransformation):
        return "Pass its tx."
    if callable(passed):
        return "Call it: optax.adam(1e-3), say, returns an optimizer."
    return "Pass an optimizer, such as optax.adam(1e-3)."


def as_weight_fn(weight_fn: Any, roles: Roles) -> Callable[..., Any] | None:
    """Raises unless `weight_fn` can be called with the arguments that hold the batch, or is None."""
    if weight_fn is None:
        return None
    example = 'Pass lambda batch: batch["mask"].sum(), say.'
    as_function(weight_fn, "weight_fn", example)
    count = len(roles.named["batch_argnums"])
    if not _takes(weight_fn, count):
        raise TypeError(
            f"weight_fn gets the batch alone ({counted(count, 'argument')}, those of batch_argnums), but takes "
            f"{_signature(weight_fn)}. {example if count == 1 else f'Give it {count} parameters, in that order.'}"
        )
    return weight_fn


def check_called_with(fun: Any, *names: str) -> None:
    """Raises unless `fun` takes the arguments that a train step gives it."""
    if not _takes(as_function(fun), len(names)):
        raise TypeError(
            f"A train step calls fun({', '.join(names)}): it takes {_signature(fun)}. Give it these "
            f"{len(names)} parameters, in this order."
        )


_NUMBERS = ("every", "num_microbatches", "gradient_accumulation_steps", "accumulation_steps", "accum_steps")


def renamed(number: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuses keywords of another library, and names ours: `number` for the number of micro-steps."""
    names = {name: f"Pass it as {number}=." for name in _NUMBERS if name != number} | names

    def decorate(fun: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fun)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in names.keys() & kwargs.keys():
                raise TypeError(f"{fun.__name__} has no {name}=: {name}={short(kwargs[name])}. {names[name]}")
            return fun(*args, **kwargs)

        return checked

    return decorate


def _signature(fun: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fun, follow_wrapped=False)  # of the function that is called, not of one that it wraps


def _takes(fun: Callable[..., Any], count: int) -> bool:
    """Whether a function takes `count` arguments; True if it has no signature."""
    try:
        signature = _signature(fun)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
