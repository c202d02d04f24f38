"""The contenders: our ways to accumulate, Optax's, what people write by hand, and those of other libraries."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from benchmarks._problems import EPSILON, MOMENTUM, RATE, Batch, Params, Problem

Tree = Any


class Way:
    """A way to make one update out of the k micro-batches of a batch; a subclass for each.

    Attributes:
      needs: packages that must be installed.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, problem: Problem):
        self.problem = problem

    @classmethod
    def refuses(cls, problem: Problem) -> str:
        """Returns why this way makes another update by design, or ""."""
        return ""

    def place(self, batch: Batch) -> Any:
        """Returns the batch as `update` takes it, where the model is."""
        raise NotImplementedError

    def update(self, data: Any) -> None:
        """Makes one update."""
        raise NotImplementedError

    def finish(self, data: Any) -> None:
        """Makes an update of what comes last, which may be fewer micro-batches."""
        self.update(data)

    def wait(self) -> None:
        """Waits for what runs."""

    def params(self) -> Params:
        """Returns the parameters."""
        raise NotImplementedError

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        """Returns the compiled programs of an update, and how often each runs in it, where they can be asked for."""
        return []


class _Compiled(Way):
    """Parameters and state go through one compiled step, `step(params, state, *arrays)`, which is given them back."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        params = jax.tree.map(jnp.array, problem.params)
        self.tx = self.transformation()
        self.carry = (params, self.init(params))
        self.jitted = jax.jit(self.step, donate_argnums=(0, 1))

    def transformation(self) -> Any:
        return self.problem.inner

    def init(self, params: Params) -> Tree:
        # Copied: what MultiSteps begins with is one array several times, which cannot be donated.
        return jax.tree.map(jnp.copy, self.tx.init(params))

    def step(self, params: Params, state: Tree, *arrays: jax.Array) -> tuple[Params, Tree]:
        return self.apply(self.gradient(params, *arrays), state, params)

    def gradient(self, params: Params, *arrays: jax.Array) -> Tree:
        return jax.grad(self.problem.loss)(params, *arrays)

    def apply(self, grads: Tree, state: Tree, params: Params) -> tuple[Params, Tree]:
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def wait(self) -> None:
        jax.block_until_ready(self.carry)

    def params(self) -> Params:
        return jax.tree.map(np.asarray, self.carry[0])


def held(program: Any) -> int:
    """Returns the bytes that a program holds: arguments, results and temporaries, as its compiler counts them."""
    sizes = program.memory_analysis()
    total = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return total - sizes.alias_size_in_bytes


class Whole(_Compiled):
    """The batch in one piece: what all are held to."""

    def place(self, batch: Batch) -> Any:
        return tuple(map(jnp.asarray, batch))

    def update(self, data: Any) -> None:
        self.carry = self.jitted(*self.carry, *data)

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        return [(self.jitted.lower(*self.carry, *data).compile(), 1)]


class Across(_Compiled):
    """One call for each micro-batch."""

    def place(self, batch: Batch) -> Any:
        return [tuple(map(jnp.asarray, micro_batch)) for micro_batch in self.problem.cut(batch)]

    def hold(self, data: Any) -> None:
        """Makes the micro-steps of an update but the last."""
        for micro_batch in data:
            self.carry = self.jitted(*self.carry, *micro_batch)

    def update(self, data: Any) -> None:
        self.hold(data)

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        return [(self.jitted.lower(*self.carry, *data[0]).compile(), len(data))]


class OursAcross(Across):
    """`accumulate_gradients` and `apply_gradients`."""

    def transformation(self) -> Any:
        policy = "skip" if self.problem.skip else "propagate"
        return optax_accum.accumulate_gradients(self.problem.inner, self.problem.k, nonfinite=policy)

    def step(self, params: Params, state: Tree, *arrays: jax.Array, flush: bool = False) -> tuple[Params, Tree]:
        grads, weight = self.gradient(params, *arrays), self.problem.weight
        counts = {"weight": weight(*arrays)} if weight else {}
        return optax_accum.apply_gradients(self.tx, grads, state, params, flush=flush, **counts)

    def finish(self, data: Any) -> None:
        self.update(data[:-1])
        self.carry = jax.jit(self.step, static_argnames="flush")(*self.carry, *data[-1], flush=True)


class OursByUpdate(OursAcross):
    """`accumulate_gradients` in the step of any optimizer of Optax."""

    def step(self, params: Params, state: Tree, *arrays: jax.Array) -> tuple[Params, Tree]:
        return self.apply(self.gradient(params, *arrays), state, params)


class OursInTwoPrograms(OursAcross):
    """The same, in the programs of `jit_step`."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.jitted = optax_accum.jit_step(self.step)

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        compiled = self.jitted.lower(*self.carry, *data[0]).compile()
        return [(compiled.adds, len(data) - 1), (compiled.updates, 1)]


class OursWithin(Whole):
    """`value_and_grad`, which cuts the batch itself."""

    def gradient(self, params: Params, *arrays: jax.Array) -> Tree:
        problem = self.problem
        rows = len(problem.batches[0][0]) // problem.k
        cut = optax_accum.value_and_grad(
            problem.loss, microbatch_size=rows, batch_argnums=tuple(range(1, len(arrays) + 1))
        )
        return cut(params, *arrays)[1]


class MultiSteps(Across):
    """`optax.MultiSteps`."""

    def transformation(self) -> Any:
        skip = {"should_skip_update_fn": optax.skip_not_finite} if self.problem.skip else {}
        return optax.MultiSteps(self.problem.inner, self.problem.k, **skip)


class ApplyEvery(Across):
    """`optax.apply_every`, which adds updates up: the same for an optimizer that is linear in the gradient."""

    @classmethod
    def refuses(cls, problem: Problem) -> str:
        return "" if problem.optimizer == "SGD" or problem.k == 1 else "adds up k updates of the optimizer"

    def transformation(self) -> Any:
        k = self.problem.k
        return optax.chain(self.problem.inner, optax.scale(1 / k), optax.apply_every(k))


class Microbatch(Whole):
    """`optax.microbatch`."""

    def gradient(self, params: Params, *arrays: jax.Array) -> Tree:
        mean, rows = optax.microbatching.AccumulationType.MEAN, len(self.problem.batches[0][0]) // self.problem.k
        batch = tuple(range(1, len(arrays) + 1))
        return optax.microbatch(jax.grad(self.problem.loss), batch, microbatch_size=rows, accumulator=mean)(
            params, *arrays
        )


class Scan(Whole):
    """The loop that people write: gradients are added in a scan and divided by k."""

    def place(self, batch: Batch) -> Any:
        rows = len(self.problem.batches[0][0]) // self.problem.k
        return tuple(jnp.asarray(x.reshape(-1, rows, *x.shape[1:])) for x in batch)

    def gradient(self, params: Params, *arrays: jax.Array) -> Tree:
        add = lambda acc, part: (jax.tree.map(jnp.add, acc, jax.grad(self.problem.loss)(params, *part)), None)
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), arrays, unroll=self.problem.unroll)
        return jax.tree.map(lambda leaf: leaf / len(arrays[0]), total)


class MaxText(Scan):
    """As MaxText has it: a scan over losses that are sums, and one division by all that counted."""

    def gradient(self, params: Params, *arrays: jax.Array) -> Tree:
        counted = self.problem.weight or (lambda x, *_: jnp.float32(len(x)))

        def summed(params: Params, *part: jax.Array) -> tuple[jax.Array, jax.Array]:
            weight = counted(*part)
            return weight * self.problem.loss(params, *part), weight

        def body(carry: Tree, part: Tree) -> tuple[Tree, None]:
            (loss, weight), grads = jax.value_and_grad(summed, has_aux=True)(params, *part)
            return jax.tree.map(jnp.add, carry, (grads, loss, weight)), None

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.zeros([]), jnp.zeros([])
        (total, _, weights), _ = jax.lax.scan(body, zeros, arrays)
        return jax.tree.map(lambda leaf: (leaf / weights).astype(leaf.dtype), total)


class HostLoop(Across):
    """A loop in Python over two compiled functions: one adds a gradient, one makes the update."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.total = jax.tree.map(jnp.zeros_like, self.carry[0])
        self.jitted = jax.jit(self.add, donate_argnums=0)
        self.close = jax.jit(self.closed, donate_argnums=(0, 1, 2))

    def add(self, total: Tree, params: Params, *arrays: jax.Array) -> Tree:
        return jax.tree.map(jnp.add, total, self.gradient(params, *arrays))

    def closed(self, params: Params, state: Tree, total: Tree) -> tuple[Params, Tree, Tree]:
        mean = jax.tree.map(lambda leaf: leaf / self.problem.k, total)
        return *self.apply(mean, state, params), jax.tree.map(jnp.zeros_like, total)

    def hold(self, data: Any) -> None:
        for micro_batch in data:
            self.total = self.jitted(self.total, self.carry[0], *micro_batch)

    def update(self, data: Any) -> None:
        self.hold(data)
        *self.carry, self.total = self.close(*self.carry, self.total)

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        add = self.jitted.lower(self.total, self.carry[0], *data[0]).compile()
        return [(add, len(data)), (self.close.lower(*self.carry, self.total).compile(), 1)]


class Tunix(Across):
    """As Tunix has it: an NNX optimizer around `optax.MultiSteps`, taken apart and put together at each micro-step."""

    needs = ("flax",)

    def __init__(self, problem: Problem):
        from flax import nnx

        Way.__init__(self, problem)

        class Model(nnx.Module):
            def __init__(self) -> None:
                self.leaves = nnx.data({name: nnx.Param(jnp.array(leaf)) for name, leaf in problem.params.items()})

        def loss(model: Any, *arrays: jax.Array) -> jax.Array:
            return problem.loss({name: leaf[...] for name, leaf in model.leaves.items()}, *arrays)

        def step(model: Any, optimizer: Any, *arrays: jax.Array) -> None:
            optimizer.update(model, nnx.grad(loss)(model, *arrays))

        self.model = Model()
        self.optimizer = nnx.Optimizer(self.model, optax.MultiSteps(problem.inner, problem.k), wrt=nnx.Param)
        self.jitted = nnx.jit(step)

    def update(self, data: Any) -> None:
        for micro_batch in data:
            self.jitted(self.model, self.optimizer, *micro_batch)

    def wait(self) -> None:
        jax.block_until_ready([leaf[...] for leaf in self.model.leaves.values()])

    def params(self) -> Params:
        return {name: np.asarray(leaf[...]) for name, leaf in self.model.leaves.items()}

    def programs(self, data: Any) -> list[tuple[Any, int]]:
        return []


# Of other libraries: each is loaded only when it is built.


class Keras(Across):
    """Keras's optimizer with `gradient_accumulation_steps`, in the loop that its guide for JAX shows."""

    needs = ("keras",)

    @classmethod
    def refuses(cls, problem: Problem) -> str:
        reasons = {"AdamW": "its epsilon stands elsewhere", "Muon": "its Muon has other coefficients"}
        return reasons.get(problem.optimizer, "")

    def transformation(self) -> Any:
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        momentum = MOMENTUM if "momentum" in self.problem.optimizer else 0.0
        steps = self.problem.k if self.problem.k > 1 else None
        optimizer = keras.optimizers.SGD(RATE, momentum, gradient_accumulation_steps=steps)
        if called := self.problem.called:
            update_step = optimizer.update_step
            optimizer.update_step = lambda *args: (jax.debug.callback(called), update_step(*args))[1]
        return optimizer

    def init(self, params: Params) -> Tree:
        import keras

        self.tx.build([keras.Variable(params[name], dtype=str(params[name].dtype)) for name in sorted(params)])
        return [variable.value for variable in self.tx.variables]

    def apply(self, grads: Tree, state: Tree, params: Params) -> tuple[Params, Tree]:
        names = sorted(params)
        new, state = self.tx.stateless_apply(state, [grads[n] for n in names], [params[n] for n in names])
        return dict(zip(names, new, strict=True)), state


class Torch(Way):
    """PyTorch's usual loop: `(loss / k).backward()`, and a step after k of them."""

    needs = ("torch",)

    @classmethod
    def refuses(cls, problem: Problem) -> str:
        if jax.default_backend() != "cpu":
            return "its CPU build, beside another device"
        return "its Muon computes in bfloat16" if problem.optimizer == "Muon" else ""

    def __init__(self, problem: Problem):
        import torch

        super().__init__(problem)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        names = sorted(problem.params)

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.leaves = torch.nn.ParameterList([_tensor(problem.params[name]) for name in names])

            def forward(self, *arrays: Any) -> Any:
                assert problem.torch_loss is not None
                return problem.torch_loss(dict(zip(names, self.leaves, strict=True)), *arrays)

        self.model = Model()
        leaves = list(self.model.parameters())
        self.optimizer: Any = {
            "SGD": lambda: torch.optim.SGD(leaves, RATE),
            "SGD, momentum": lambda: torch.optim.SGD(leaves, RATE, MOMENTUM),
            "AdamW": lambda: torch.optim.AdamW(leaves, RATE, eps=EPSILON, weight_decay=1e-4),
        }[problem.optimizer]()
        if called := problem.called:
            self.optimizer.register_step_post_hook(lambda *_: called())

    def place(self, batch: Batch) -> Any:
        return [tuple(map(_tensor, micro_batch)) for micro_batch in self.problem.cut(batch)]

    def update(self, data: Any) -> None:
        for micro_batch in data:
            (self.model(*micro_batch) / self.problem.k).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def params(self) -> Params:
        leaves = (leaf.detach().float().numpy().copy() for leaf in self.model.parameters())
        return dict(zip(sorted(self.problem.params), leaves, strict=True))


def _tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array.copy())


class Accelerate(Torch):
    """Hugging Face's `accelerator.accumulate`, around the same model."""

    needs = ("torch", "accelerate")

    def __init__(self, problem: Problem):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        super().__init__(problem)
        AcceleratorState._reset_state(reset_partial_state=True)  # one process, several of them
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=problem.k)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def update(self, data: Any) -> None:
        for micro_batch in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(*micro_batch))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def finish(self, data: Any) -> None:
        from torch.utils.data import DataLoader

        self.update(self.accelerator.prepare(DataLoader(data, batch_size=None)))  # it tells which is the last


WHOLE, OURS, UPDATE, TORCH = "whole batch", "ours: apply_gradients", "ours: update", "PyTorch"
JAX_WAYS: dict[str, type[Way]] = {
    WHOLE: Whole,
    OURS: OursAcross,
    UPDATE: OursByUpdate,
    "ours: value_and_grad": OursWithin,
    "optax.MultiSteps": MultiSteps,
    "optax.apply_every": ApplyEvery,
    "optax.microbatch": Microbatch,
    "hand-written scan": Scan,
    "host loop, two functions": HostLoop,
    "as in MaxText": MaxText,
    "as in Tunix (NNX)": Tunix,
}
WAYS: dict[str, type[Way]] = JAX_WAYS | {"Keras 3 on JAX": Keras, TORCH: Torch, "accelerate": Accelerate}
