"""What an older JAX or Flax lacks is refused by name; other versions are played by `versions.JAX`."""

import importlib.metadata
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_accum
from optax_accum import accelerators
from optax_accum.accelerators import _absent as absent
from tests import programs
from tests.engine import compilers, versions

REFUSED = {  # by an older JAX
    "offload": (
        (0, 9, 2),
        lambda: optax_accum.sharding.state_sharding(optax.sgd(1.0), jnp.ones(2), offload="inner_opt_state"),
        "offload needs JAX 0.10 or later.*Leave out offload",
    ),
    "a GPU": (
        (0, 8, 3),
        lambda: accelerators.target("h100"),
        "lacks, which JAX 0.8 cannot.*0.9 and later.*takes this machine",
    ),
    "a mesh without devices": (
        (0, 7, 2),
        lambda: compilers.check_concrete(jax.sharding.AbstractMesh((2,), ("data",))),
        "needs JAX 0.8 or later.*Pass parameters that lie on it",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_older_jax_lacks_is_refused_by_the_version_that_has_it(what, monkeypatch):
    version, ask, message = REFUSED[what]
    for module in (versions, absent):
        monkeypatch.setattr(module, "JAX", version)
    with pytest.raises(NotImplementedError, match=message):
        ask()


def test_a_libtpu_that_would_crash_is_refused(monkeypatch):
    monkeypatch.setattr(absent, "JAX", (0, 7, 2))
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy", "libtpu==0.0.23; extra == 'tpu'"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.21.1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(RuntimeError, match=r"libtpu 0.0.21.1 is too old.*Run pip install libtpu==0.0.23"):
        accelerators.target("v5e:2x2")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.23")
    assert absent.too_old_libtpu() is None


@pytest.mark.parametrize("version", [(0, 7, 2), versions.JAX])
def test_a_nightly_libtpu_is_taken_as_it_is(version, monkeypatch):
    """It is distributed under another name."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(absent, "JAX", version)
    monkeypatch.setattr("importlib.metadata.version", missing)
    assert absent.too_old_libtpu() is None


@pytest.mark.sweep
def test_a_release_candidate_of_flax_is_taken():
    program = 'import flax; flax.__version__ = "99.0.0rc1"; import optax_accum.flax'
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OLD_JAX = 'import jax; jax.__version_info__, jax.__version__ = (0, 7, 1), "0.7.1"; import optax_accum'
OLD_FLAX = 'import flax; flax.__version__ = "0.10.6"; import optax_accum.flax'


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "message"),
    [(OLD_JAX, "needs JAX 0.7.2 or later: this is JAX 0.7.1"), (OLD_FLAX, "needs Flax 0.11.2 or later.*Flax 0.10.6")],
)
def test_too_old_a_version_says_so_when_imported(program, message):
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode
    assert re.search(message, done.stderr.splitlines()[-1])


def test_the_forms_for_an_older_jax_compute_the_same(monkeypatch):
    """`switch` for `cond`, two extremes for one."""
    both = []
    for version in (versions.JAX, versions.FLOOR):
        monkeypatch.setattr(versions, "JAX", version)
        chosen = [compilers.branch(jnp.array(flag), lambda: 1, lambda: 2) for flag in (True, False)]
        arrays = jnp.array([-jnp.inf, 1]), jnp.ones(2)
        finite = [bool(jnp.isfinite(jnp.stack(compilers.extremes(array))).all()) for array in arrays]
        both.append((list(map(int, chosen)), finite))
    assert both[0] == both[1] == ([1, 2], [False, True])


TRAINS = """
import jax, jax.numpy as jnp, optax, optax_accum

def step(params, state, x):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((x @ params - 1) ** 2))(params)
    params, state = optax_accum.apply_gradients(tx, grads, state, params)
    return params, state, loss

tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
x = jax.random.normal(jax.random.key(0), (512, 512))
for donated in (), (0, 1):
    params, step_again = jnp.zeros((512, 512)), jax.jit(step, donate_argnums=donated)
    state = tx.init(params)
    for _ in range(3):
        params, state, loss = step_again(params, state, x)
    print(float(loss))
"""


def trains(flags):
    """Returns the last losses of a training, without and with donation, and what it warned of."""
    as_shipped = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    environment = {**os.environ, **as_shipped}
    done = subprocess.run([sys.executable, "-c", TRAINS], env=environment, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.sweep
def test_with_the_flag_parameters_that_are_updated_in_place_train_as_others():
    (copied, donated), warned = trains(versions.WITHOUT_XNNPACK)
    assert copied < 0.99
    assert donated == pytest.approx(copied, rel=1e-5)
    assert warned == ""


@pytest.mark.sweep
def test_where_they_may_not_train_a_warning_names_the_flag():
    """JAX 0.7.2 to 0.8.1 multiply on some CPUs by what the parameters were before: here for ever by zeros."""
    (copied, donated), warned = trains("")
    assert copied < 0.99
    may_fail = versions.JAX < (0, 8, 2)
    assert donated == pytest.approx(copied, rel=1e-5) or (may_fail and donated == 1.0)
    assert (versions.WITHOUT_XNNPACK in warned) == may_fail


def test_the_warning_is_for_cpus_without_the_flag(monkeypatch):
    monkeypatch.setattr(versions, "JAX", (0, 7, 2))
    warns = versions.warn_of_stale_products
    monkeypatch.setattr(versions, "warn_of_stale_products", warns.__wrapped__)  # once is enough
    monkeypatch.setenv("XLA_FLAGS", f"--xla_some_flag {versions.WITHOUT_XNNPACK}")
    versions.warn_of_stale_products()
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    with pytest.warns(UserWarning, match='os.environ.*= "--xla_cpu_use_xnnpack=false".*or install JAX 0.8.2'):
        optax_accum.value_and_grad(jnp.vdot, num_microbatches=1)(jnp.ones(2), jnp.ones(2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    versions.warn_of_stale_products()


def test_the_text_of_a_program_that_has_none_is_read_from_what_its_compiler_wrote():
    text = absent.WithText(programs.compiled(jax.jit(jnp.sin).lower(1.0)), "HloModule m")
    assert text.as_text() == "HloModule m"
    assert text.memory_analysis() is not None
