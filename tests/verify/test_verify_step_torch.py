"""Is each planted fault found and named in loops of PyTorch and accelerate, and is nothing found in sound ones?"""

import copy
import dataclasses
import functools
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from optax_accum import verify_step  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.verify.planted import KINDS  # noqa: E402

K, N = 4, 16
torch.set_num_threads(1)
draw = np.random.default_rng(0)
BATCH = {
    "x": torch.tensor(draw.normal(size=(N, 6)), dtype=torch.float32),
    "y": torch.tensor(draw.normal(size=(N, 3)), dtype=torch.float32),
    "mask": torch.tensor(draw.uniform(0.2, 3, size=N), dtype=torch.float32),
}


def rows_of(batch):
    return len(batch["x"])


def tokens_of(batch):
    return batch["mask"].sum()


def squares(model, batch):
    """Returns the mean over rows."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def masked(model, batch):
    """Returns the mean over tokens."""
    each = ((model(batch["x"]) - batch["y"]) ** 2).mean(1)
    return (batch["mask"] * each).sum() / batch["mask"].sum()


def normalised(model, batch):
    """Returns a loss with advantages that are normalised in it."""
    gain = (batch["mask"] - batch["mask"].mean()) / batch["mask"].std()
    return (gain * model(batch["x"]).tanh().mean(1)).mean()


def multilayer(*between):
    return nn.Sequential(nn.Linear(6, 5), *between, nn.Tanh(), nn.Linear(5, 3))


def momentum(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, 1e-2)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of PyTorch as one writes it by hand, and the places where it can go wrong."""

    loss: object = squares
    between: tuple = ()  # layers between the first two
    optimizer: object = momentum
    weight: object = rows_of
    divisor: object = lambda n, total, k: total
    due: object = lambda n, k: n == k
    clip: object = lambda model: None  # at the window's end
    each: object = lambda model, grads: grads  # of each micro-batch's gradients
    join: object = torch.add
    dtype: object = torch.float32  # of sums
    held: object = lambda model: None
    empties: object = lambda model: model.zero_grad()
    guarded: bool = False
    scheduled: str = ""  # when the schedule steps: at each "micro-step", at each "update"
    stays: tuple = ()  # what an update does not set back to 0
    stale: bool = False  # whether gradients are those of a copy made before the update
    flushes: bool = True  # whether the last micro-batch of the data makes an update
    seeded: bool = False  # whether each micro-batch draws what the first one does

    def __call__(self, every):
        torch.manual_seed(0)
        model = multilayer(*copy.deepcopy(self.between))
        optimizer = self.optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        n, total, seed = 0, 0.0, 0
        before = copy.deepcopy(model)

        def step(carry, batch, last=False):
            nonlocal n, total, seed
            if self.seeded and n == 0:
                seed = int(torch.randint(2**31, ()))
            if self.seeded:
                torch.manual_seed(seed)
            n, total = n + 1, total + self.weight(batch)
            net = before if self.stale else model
            loss = self.loss(net, batch) * self.weight(batch)
            grads = self.each(model, torch.autograd.grad(loss, list(net.parameters())))
            for p, g in zip(model.parameters(), grads, strict=True):
                old = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self.join(old.to(self.dtype), g.to(self.dtype)).to(p.dtype)
            if self.scheduled == "micro-step":  # PyTorch warns of the first one, which is right; later it says nothing
                with warnings.catch_warnings(action="ignore"):
                    schedule.step()
            if not (self.due(n, every) or (last and self.flushes)):
                self.held(model)
                return carry
            before.load_state_dict(model.state_dict())
            for p in model.parameters():
                p.grad = p.grad / self.divisor(n, total, every)
            self.clip(model)
            if not self.guarded or all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
                self.empties(model)
            if self.scheduled == "update":
                schedule.step()
            n, total = n * ("n" in self.stays), total * ("total" in self.stays)
            return carry

        carry = (model, optimizer, schedule, torch.default_generator)
        return step, carry if self.between or self.seeded else carry[:3], functools.partial(step, last=True)


def in_windows(**fields):
    """A fault that make_step(1) has not."""
    return lambda every: (Loop(**fields) if every > 1 else Loop())(every)


def sliced(every):
    """A step that cuts its batch into slices of as many rows, and forgets what is left."""
    step, carry, _ = Loop()(every)

    def whole(carry, batch):
        size = rows_of(batch) // every
        for n in range(every):
            carry = step(carry, {name: leaf[n * size : (n + 1) * size] for name, leaf in batch.items()})
        return carry

    return whole, carry


@torch.no_grad()
def decay(model):
    for p in model.parameters():
        p *= 0.99


def clip_each(model, grads):
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g / norm for g in grads]


def zeroed_when_it_steps(every):
    """A NaN stays in `.grad`: what is not finite is skipped, and never zeroed."""
    empties = lambda model: model.zero_grad()
    if every > 1:
        return Loop(guarded=True, empties=empties)(every)
    return Loop(guarded=True, join=lambda old, new: new)(every)


def by_hand(each=lambda model: None, zeroed=lambda n, k: n % k == 0):
    """The usual loop: `each` follows each backward(), `zeroed` says after which micro-steps zero_grad() is called."""

    def make_step(every):
        torch.manual_seed(0)
        model = multilayer()
        optimizer = momentum(model.parameters())
        n = 0

        def step(carry, batch):
            nonlocal n
            n += 1
            (squares(model, batch) / every).backward()
            each(model)
            if n % every == 0:
                optimizer.step()
            if zeroed(n, every):
                optimizer.zero_grad()
            return carry

        return step, (model, optimizer)

    return make_step


FAULTS = {
    "never closes": in_windows(due=lambda n, k: False),
    "closes at another micro-step": in_windows(due=lambda n, k: n > k),
    "only the first gradient": Loop(join=lambda old, new: old if old.any() else new),
    "only the last gradient": Loop(join=lambda old, new: new, divisor=lambda n, total, k: total / n),
    "divided twice": Loop(divisor=lambda n, total, k: n * total),
    "divided by the full k": Loop(divisor=lambda n, total, k: total / n * k),
    "sum for a mean": Loop(divisor=lambda n, total, k: total / n),
    "wrong divisor": in_windows(divisor=lambda n, total, k: total / 0.6),
    "mean of means": Loop(masked, weight=lambda batch: 1.0),
    "clipping at each micro-step": Loop(each=clip_each),
    "optimizer at each micro-step": Loop(due=lambda n, k: True),
    "moves while held": Loop(held=decay),
    "shared key": Loop(between=(nn.Dropout(0.5),), seeded=True),
    "low-precision sum": Loop(dtype=torch.bfloat16),
    "NaN poison": zeroed_when_it_steps,
    "coupled examples": Loop(between=(nn.BatchNorm1d(5),)),
    "not emptied": in_windows(empties=lambda model: None, divisor=lambda n, total, k: total),
    "rows left out": sliced,
    "short window dropped": Loop(flushes=False),
    "emptied in mid-window": by_hand(zeroed=lambda n, k: n % k == 1 % k),
    "wrong weights": Loop(weight=lambda batch: batch["mask"][0]),
    "weighed by place": Loop(join=lambda old, new: 0.7 * old + new),
    "clipping the running sum": by_hand(each=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
    "counter not emptied": in_windows(stays=("total",)),
    "stale parameters": in_windows(stale=True),
}
OPTIONS = {"rows left out": {"within_call": True}}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_planted_fault_is_named(kind):
    report = verify_step(FAULTS[kind], BATCH, **OPTIONS.get(kind, {}))
    assert [cause.kind for cause in report.causes] == [kind], str(report)
    assert not report.holds


def test_every_kind_is_planted():
    assert sorted(FAULTS) == sorted(KINDS)


AGAIN = {
    "a schedule that counts micro-steps": (Loop(scheduled="micro-step"), "optimizer at each micro-step"),
    "advantages": (Loop(normalised), "coupled examples"),
    "a sum under Adam": (Loop(optimizer=adamw, divisor=lambda n, total, k: total / n), "sum for a mean"),
    "tokens under Adam": (Loop(masked, optimizer=adamw, weight=lambda batch: 1.0), "mean of means"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_other_ways_to_a_fault(name):
    make_step, kind = AGAIN[name]
    report = verify_step(make_step, BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == [kind], str(report)


SOUND = {
    "momentum": Loop(),
    "AdamW, tokens": Loop(masked, optimizer=adamw, weight=tokens_of),
    "Adafactor": Loop(optimizer=lambda params: torch.optim.Adafactor(params, 1e-2)),
    "NAdam, a schedule": Loop(optimizer=lambda params: torch.optim.NAdam(params, 1e-2), scheduled="update"),
    "clipped": Loop(clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
    "dropout": Loop(between=(nn.Dropout(0.5),)),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_loop(name):
    report = verify_step(SOUND[name], BATCH)
    report.check()
    assert report.random == (name == "dropout")
    assert any("state/" in path for path in report.errors)  # moments, which AdamW makes at its first update


# Other ways to write a loop.


def of_state_dicts(every):
    """A carry of tensors, as from `model.state_dict()`, and a step that puts them into the model and returns new ones."""
    torch.manual_seed(0)
    model = multilayer()
    zeros = {name: torch.zeros_like(of) for name, of in model.state_dict().items()}

    def step(carry, batch):
        model.load_state_dict(carry["params"])
        grads = torch.autograd.grad(squares(model, batch) * rows_of(batch), list(model.parameters()))
        acc = {name: old + new for (name, old), new in zip(carry["acc"].items(), grads, strict=True)}
        n, rows = carry["n"] + 1, carry["rows"] + rows_of(batch)
        if n < every:
            return carry | {"acc": acc, "n": n, "rows": rows}
        params = {name: of - 0.1 * acc[name] / rows for name, of in carry["params"].items()}
        return {"params": params, "acc": zeros, "n": 0, "rows": 0}

    params = {name: of.clone() for name, of in model.state_dict().items()}
    return step, {"params": params, "acc": zeros, "n": 0, "rows": 0}


def in_bfloat16(every):
    """A model of narrow parameters, whose gradients PyTorch adds in its dtype."""
    torch.manual_seed(0)
    model = multilayer().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    n = 0

    def step(carry, batch):
        nonlocal n
        n += 1
        (squares(model, {name: of.to(torch.bfloat16) for name, of in batch.items()}) / every).backward()
        if n % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return carry

    return step, (model, optimizer)


@pytest.mark.parametrize("make_step", [of_state_dicts, in_bfloat16])
def test_a_sound_loop_in_other_words(make_step):
    report = verify_step(make_step, BATCH, uneven=make_step is of_state_dicts)
    assert report.holds, str(report)


@pytest.mark.usefixtures("rank_promotion")
def test_the_loss_may_be_written_in_jax_instead():
    """Then make_step(1) is not asked."""
    import jax.numpy as jnp
    import optax

    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["0.weight"].T + params["0.bias"])
        return jnp.mean((h @ params["2.weight"].T + params["2.bias"] - batch["y"]) ** 2)

    options = {"optimizer": optax.sgd(0.1, 0.9), "loss": loss, "uneven": False}
    assert verify_step(Loop(), BATCH, **options).holds
    report = verify_step(Loop(divisor=lambda n, total, k: total / k), BATCH, **options)
    assert [cause.kind for cause in report.causes] == ["sum for a mean"], str(report)


def test_a_tensor_that_requires_a_gradient_is_refused():
    """Gradients stand in its `.grad`, which is not carried. The remedies work."""
    step, (model, *_), _ = Loop()(K)
    named = lambda every: (step, {"params": dict(model.named_parameters())})
    with pytest.raises(
        ValueError, match=r"the carry must not require a gradient: \['params'\]\['0.bias'\] does.*detach"
    ):
        verify_step(named, BATCH)
    with pytest.raises(ValueError, match=r"the batch must not require a gradient: \['x'\]"):
        verify_step(Loop(), BATCH | {"x": torch.ones(N, 6, requires_grad=True)})

    def detached(every):
        step, carry, _ = Loop()(every)
        seen = lambda: {"params": {name: of.detach() for name, of in carry[0].named_parameters()}}
        return lambda _, batch: (step(carry, batch), seen())[1], seen()

    assert verify_step(detached, BATCH, uneven=False).holds


def test_dropout_without_a_generator_is_told_where_to_put_one():
    without = lambda every: (lambda step, carry, last: (step, carry[:3], last))(
        *Loop(between=(nn.Dropout(0.5),))(every)
    )
    with pytest.raises(ValueError, match="put the key into the carry .in PyTorch torch.default_generator"):
        verify_step(without, BATCH)


def test_a_step_that_returns_nothing_is_told_what_to_return():
    with pytest.raises(TypeError, match="it returned None.*as NNX and PyTorch do, return that"):
        verify_step(lambda every: (lambda *_: None, Loop()(every)[1]), BATCH)


# accelerate.


def usual(loss):
    """The loop of the documentation of accelerate."""

    def make_step(every):
        accelerate = pytest.importorskip("accelerate")
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=every)
        model = multilayer()
        optimizer = adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, _ = accelerator.prepare(model, optimizer, schedule)

        def step(carry, batch):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            return carry

        return step, (model, optimizer)

    return make_step


def token_weighted(every):
    """That of its guide for sequences of unequal length: the tokens of all micro-batches are counted beforehand."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=every)
    model, optimizer = accelerator.prepare(multilayer(), None)[0], None
    optimizer = accelerator.prepare(adamw(model.parameters()))

    def step(carry, batch):
        cuts = zip(*(of.tensor_split(every) for of in batch.values()), strict=True)
        parts = [dict(zip(batch, cut, strict=True)) for cut in cuts]
        tokens = sum(tokens_of(part) for part in parts)
        for part in parts:
            with accelerator.accumulate(model):
                each = ((model(part["x"]) - part["y"]) ** 2).mean(1)
                accelerator.backward((part["mask"] * each).sum() * accelerator.gradient_accumulation_steps / tokens)
                optimizer.step()
                optimizer.zero_grad()
        return carry

    return step, (model, optimizer)


def test_the_usual_loop_of_accelerate():
    assert verify_step(usual(squares), BATCH, uneven=False).holds
    report = verify_step(usual(masked), BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["mean of means"], str(report)


def test_the_token_weighted_loop_of_accelerate():
    report = verify_step(token_weighted, BATCH, within_call=True)
    assert report.holds, str(report)


def test_the_page_of_the_docs_runs():
    pytest.importorskip("accelerate")
    page = (ROOT / "docs" / "check_a_pytorch_loop.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), "check_a_pytorch_loop.md", "exec"), {})
    assert len(blocks) == 3
    assert all(f"`{kind}`" in page for kind in KINDS)
