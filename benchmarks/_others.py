"""The ways of other libraries: Keras 3 on JAX, PyTorch, and accelerate. Each is loaded only when it is built."""

import os
from typing import Any

import jax
import numpy as np

from benchmarks._problems import EPSILON, MOMENTUM, RATE, Batch, Params, Problem
from benchmarks._ways import JAX_WAYS, Across, Tree, Way


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


KERAS, TORCH, ACCELERATE = "Keras 3 on JAX", "PyTorch", "accelerate"
WAYS: dict[str, type[Way]] = JAX_WAYS | {KERAS: Keras, TORCH: Torch, ACCELERATE: Accelerate}
