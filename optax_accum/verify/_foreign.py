"""What a step may carry beside JAX's arrays: NumPy's arrays, PyTorch's tensors, objects."""

import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._shared.arrays import Tree


class Kept(NamedTuple):
    """The state of a PyTorch optimizer or schedule: a NamedTuple with a `count`, like Optax's states."""

    count: int  # type: ignore[assignment]  # updates: hides tuple.count
    state: dict[str, dict[str, np.ndarray]]  # "exp_avg", say -> name of the parameter -> as the parameter


def is_jax(carry: Tree) -> bool:
    """Whether a step is JAX's, by its carry: no NumPy array in it, and nothing of PyTorch's."""
    foreign = lambda leaf: isinstance(leaf, np.ndarray) or is_tensor(leaf) or is_held(leaf)
    return not any(map(foreign, jax.tree.leaves(carry)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX, NumPy or PyTorch."""
    return isinstance(leaf, jax.Array | np.ndarray) or is_tensor(leaf)


def is_held(leaf: Any) -> bool:
    """Whether a leaf is an object that changes in place: a module, an optimizer, a schedule, a generator."""
    return is_generator(leaf) or _is_module(leaf) or _is_optimizer(leaf) or _is_schedule(leaf)


def is_generator(leaf: Any) -> bool:
    """Whether a leaf is a source of random numbers that changes in place."""
    return isinstance(leaf, np.random.Generator) or _is_torch_generator(leaf)


def seeded(generator: Any, number: int) -> Any:
    """Seeds a generator in place: all who hold it draw from the new seed."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
        return generator
    return generator.manual_seed(number)


def opened(what: str, tree: Tree) -> Tree:
    """Replaces arrays that are not JAX's by copies in NumPy, also those inside objects.

    A module becomes its "params" and "buffers", by name, an optimizer its moments, by the parameters' names.
    """
    modules = filter(_is_module, jax.tree.leaves(tree))
    names = {id(of): name for module in modules for name, of in module.named_parameters()}

    def open_(path: Any, leaf: Any) -> Any:
        if is_tensor(leaf) and leaf.requires_grad:
            raise ValueError(
                f"A tensor in the {what} must not require a gradient: {jax.tree_util.keystr(path) or 'it'} does, and "
                "what stands in its .grad is not carried. Return tensor.detach(), or the module itself, as in "
                "(model, optimizer)."
            )
        return next((opens(leaf, names) for of, opens in _OPENS if of(leaf)), leaf)

    return jax.tree.map_with_path(open_, tree)


def begun(first: Tree, later: Tree) -> Tree:
    """The first values of an opened carry in its later structure and dtypes.

    Arrays that came later, as PyTorch's moments do, begin as zeros.
    """
    known, present = (dict(jax.tree.leaves_with_path(tree)) for tree in (first, later))
    if not known.keys() <= present.keys():
        return first

    def put(path: Any, leaf: Any) -> Any:
        began = known[path] if path in known else np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf
        return np.asarray(began, leaf.dtype) if isinstance(began, np.ndarray) and is_array(leaf) else began

    return jax.tree.map_with_path(put, later)


def cuttable(batch: Tree, of_jax: bool) -> Tree:
    """An opened batch in NumPy, but for keys; with `of_jax` in the dtypes that JAX has."""

    def cut(leaf: Any) -> Any:
        if (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)) or not is_array(leaf):
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype) if of_jax else leaf.dtype)

    return jax.tree.map(cut, batch)


def given(batch: Tree, like: Tree) -> Tree:
    """A batch of NumPy arrays in the kinds and dtypes of the arrays of `like`."""
    return ordered_like(jax.tree.map(_as, batch, like), like)


def ordered_like(tree: Tree, like: Tree) -> Tree:
    """Gives dicts the order that they have in `like`: JAX sorts them, and a step may unpack `batch.values()`."""
    if type(like) is dict:
        return {key: ordered_like(tree[key], node) for key, node in like.items()}
    if type(like) in (list, tuple):
        return type(like)(map(ordered_like, tree, like))
    return tree


def as_jax(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def copied(leaf: Any) -> Any:
    """A copy of a NumPy array or a tensor; any other leaf itself."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if is_tensor(leaf) else leaf


def _as(array: Any, like: Any) -> Any:
    if is_tensor(like):  # PyTorch knows not all of NumPy's dtypes, and none of JAX's
        return like.new_tensor(array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array)
    if isinstance(like, jax.Array) and isinstance(array, np.ndarray):
        return jnp.asarray(array, like.dtype)
    return np.asarray(array, like.dtype) if isinstance(like, np.ndarray) else array


def _numbers(tensor: Any) -> np.ndarray:
    """A copy of a tensor in NumPy, in JAX's dtype of that name where NumPy has none."""
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    return np.array((tensor if dtype.isbuiltin == 1 else tensor.float()).numpy(force=True), dtype)


def _read_module(module: Any, _: dict[int, str]) -> Tree:
    of = lambda pairs: {name: _numbers(tensor) for name, tensor in pairs}
    return {"params": of(module.named_parameters()), "buffers": of(module.named_buffers())}


def _read_optimizer(optimizer: Any, names: dict[int, str]) -> Kept:
    """The moments of an optimizer, by parameter, and the number of its updates, if it counts them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments: dict[str, dict[str, np.ndarray]] = {}
    for number, param in enumerate(params):
        for key, value in optimizer.state.get(param, {}).items():
            if is_tensor(value) and value.ndim:
                moments.setdefault(key, {})[names.get(id(param), str(number))] = _numbers(value)
    return Kept(max((int(optimizer.state.get(param, {}).get("step", 0)) for param in params), default=0), moments)


def _is_of_torch(kind: str) -> Callable[[Any], bool]:
    """A test for a type of PyTorch's, which is not imported here: somebody with such a leaf has imported it."""
    kind_of = operator.attrgetter(kind)
    return lambda leaf: (torch := sys.modules.get("torch")) is not None and isinstance(leaf, kind_of(torch))


is_tensor, _is_module, _is_optimizer = map(_is_of_torch, ("Tensor", "nn.Module", "optim.Optimizer"))
_is_schedule, _is_torch_generator = map(_is_of_torch, ("optim.lr_scheduler.LRScheduler", "Generator"))
_OPENS = (  # a test of a leaf, and its values in NumPy
    (lambda leaf: isinstance(leaf, np.ndarray), lambda array, _: array.copy()),
    (is_tensor, lambda tensor, _: _numbers(tensor)),
    (_is_module, _read_module),
    (_is_optimizer, _read_optimizer),
    (_is_schedule, lambda schedule, _: Kept(schedule.last_epoch, {})),
)
