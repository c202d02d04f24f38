"""Real processes: they train what one process trains, survive SIGKILL, and go on in other numbers."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import optax_accum
from examples import processes
from examples.processes import Settings
from tests import ROOT
from tests.tiers import sweep

UPDATES = 8


@functools.cache
def digits():
    """The usual data as a file: a process that need not import scikit-learn starts in half the time."""
    file = tempfile.NamedTemporaryFile(suffix=".npz")  # noqa: SIM115
    images, labels = processes.read("")
    np.savez(file, images=images, labels=labels)
    file.flush()
    return file


def asked(**settings):
    return Settings(data=digits().name, **settings)


def launched(tmp_path, **settings):
    """The parameters at the end of a launched run."""
    output = tmp_path / "params.npz"
    assert processes.launch(asked(output=str(output), timeout=120, **settings)) == 0
    return dict(np.load(output))


@functools.cache
def alone(devices, updates=UPDATES):
    """The parameters at the end of the same run in this process, on some of its devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), jax.numpy_rank_promotion("allow"):
        run = processes.Run(Settings(processes=1, updates=updates), mesh)
        run.train()
    return jax.tree.map(np.asarray, run.params)


def close(got, want, tolerance):
    for name, leaf in want.items():
        assert_allclose(got[name], leaf, atol=tolerance, err_msg=name)


def test_several_processes_train_what_one_does(tmp_path):
    got = launched(tmp_path, processes=3, updates=UPDATES)
    start = processes.initial_params()
    assert all(np.max(np.abs(got[name] - start[name])) > 1e-2 for name in got)
    close(got, alone(3), 1e-5)  # as many devices, in one process
    close(got, alone(1), 1e-4)  # one device: other micro-batches, the same updates


def keep_no_program(monkeypatch):
    """For processes that are killed: JAX would not replace a program that one has left half-written in the cache."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1000")


def crash(group, checkpoints, seed, *, saving=False):
    """Waits for a new checkpoint, and at a random moment after it, or while the next is being written (`saving`), ends
    one process with SIGKILL; the rest cannot go on. Returns whether a checkpoint was left unfinished."""
    before = saved(checkpoints)
    chance = random.Random(seed)
    being_written = lambda: any("tmp" in path.name for path in checkpoints.glob("*"))
    while saved(checkpoints) <= before or (saving and not being_written()):
        assert all(process.poll() is None for process in group), "the run ended before it was killed"
        time.sleep(0.002)
    if not saving:
        time.sleep(chance.uniform(0, 0.6))
    chance.choice(group).kill()
    processes.kill(group)
    return being_written()


def saved(checkpoints):
    steps = [int(path.name) for path in pathlib.Path(checkpoints).glob("*") if path.name.isdigit()]
    return max(steps, default=-1)


@pytest.mark.sweep
def test_a_group_that_is_killed_again_and_again_ends_bit_identical(tmp_path, monkeypatch, capfd):
    """Once its newest checkpoint has lost a part, too; and the launcher starts again after the last."""
    settings = asked(processes=2, updates=24, save_every=2, output=str(tmp_path / "params.npz"))
    undisturbed = launched(tmp_path, processes=2, updates=24)
    keep_no_program(monkeypatch)
    checkpoints = tmp_path / "checkpoints"
    settings = dataclasses.replace(settings, checkpoints=str(checkpoints), restarts=1)
    crash(processes.start(settings), checkpoints, 0)
    while not crash(processes.start(settings), checkpoints, 1, saving=True):
        pass  # the checkpoint was finished before the process was ended
    largest = max((checkpoints / str(saved(checkpoints))).rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:10])
    assert 0 < saved(checkpoints) < 24 * settings.global_batch
    start, groups = processes.start, []

    def start_and_crash(settings, logs):
        last = bool(groups)  # it goes on to the end, and saving would take most of its time
        groups.append(start(dataclasses.replace(settings, save_every=0) if last else settings, logs))
        if not last:
            crash(groups[0], checkpoints, 9)
        return groups[-1]

    monkeypatch.setattr(processes, "start", start_and_crash)
    assert processes.launch(settings) == 0
    assert len(groups) == 2
    out, err = capfd.readouterr()
    assert "is not whole: goes on from that of row" in out
    assert "2 processes, started 2 times, made 24 updates" in out
    assert "was ended by SIGKILL" in err
    got = dict(np.load(tmp_path / "params.npz"))
    for name, leaf in undisturbed.items():
        assert_array_equal(got[name], leaf)


@pytest.mark.sweep
def test_another_number_of_processes_goes_on_in_the_middle_of_a_window(tmp_path):
    checkpoints = tmp_path / "c"
    # 7 micro-batches to an update on 2 devices: the last checkpoint of 4 updates, at 27, is in the middle of a window.
    launched(tmp_path, processes=2, updates=4, save_every=27, checkpoints=str(checkpoints))
    assert saved(checkpoints) % 200
    for number in (1, 3):
        again = shutil.copytree(checkpoints, tmp_path / str(number))
        got = launched(tmp_path, processes=number, updates=UPDATES, checkpoints=str(again))
        close(got, alone(1), 1e-4)


# How a group ends


def launcher(*options, limit=""):
    """The launcher as a user starts it, with the output of all in one file."""
    command = shlex.join([sys.executable, "-m", "examples.processes", "--data", digits().name, *options])
    return subprocess.Popen(
        ["bash", "-c", f"{limit} exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.sweep
def test_a_full_disk_ends_the_group_with_the_words_of_each(tmp_path):
    """A limit on the size of a file is to a process what a full disk is: an ordinary exception.

    What XLA writes of programs that come from the cache would fill the log, and of what is written into the cache, too.
    """
    options = ["--checkpoints", str(tmp_path / "c"), "--save-every", "2", "--logs", str(tmp_path), "--restarts", "1"]
    began = time.monotonic()
    group = launcher(*options, limit="export JAX_ENABLE_COMPILATION_CACHE=0; ulimit -f 20;")
    out = group.communicate(timeout=150)[0]
    assert group.returncode == 1
    assert time.monotonic() - began < 120  # of 300 seconds
    assert "Attempt 2: process" in out
    for attempt in (1, 2):
        words = [(tmp_path / f"attempt-{attempt}" / f"{number}.log").read_text() for number in (0, 1)]
        assert "File too large" in "".join(words)
        assert str(tmp_path / f"attempt-{attempt}" / "0.log") in out
    assert len(re.findall(r"process \d (?:ended with status 1|was ended by SIG\w+); its words are in", out)) == 4


def training(logs):
    """A launcher whose processes train, and their numbers."""
    group = launcher("--updates", "100000", "--logs", str(logs))
    for line in group.stdout:
        if line.startswith("update"):
            break
    children = pathlib.Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split()
    assert len(children) == 2
    return group, children


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, *sweep([signal.SIGINT])])
def test_a_signal_to_the_launcher_ends_all(tmp_path, monkeypatch, number):
    keep_no_program(monkeypatch)
    group, children = training(tmp_path)
    group.send_signal(number)
    out = group.communicate(timeout=60)[0]
    assert group.returncode == (143 if number == signal.SIGTERM else 1)
    assert not any(pathlib.Path(f"/proc/{child}").exists() for child in children)
    assert "Traceback" not in out
    if number == signal.SIGINT:
        assert out.splitlines()[-1] == "Interrupted: all processes have been ended."


@pytest.mark.sweep
def test_processes_end_with_a_launcher_that_was_killed(tmp_path, monkeypatch):
    """They went on training and saving."""
    keep_no_program(monkeypatch)
    group, children = training(tmp_path)
    group.kill()
    group.communicate(timeout=60)
    running = lambda: [child for child in children if pathlib.Path(f"/proc/{child}/exe").exists()]
    end = time.monotonic() + 30
    while running() and time.monotonic() < end:
        time.sleep(0.2)
    assert not running()


@pytest.mark.sweep
def test_a_timeout_says_so_and_nothing_starts_after_it(tmp_path, capfd):
    assert processes.launch(Settings(timeout=0.5, restarts=5, logs=str(tmp_path))) == 1
    err = capfd.readouterr().err
    assert "Attempt 1: longer than --timeout 0.5 s" in err
    assert "Attempt 2" not in err


@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_a_group_that_open_mpi_started_trains_what_one_process_does(tmp_path):
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"Open MPI\) v?(\d+)", said)
    if version is None or (int(version[1]) >= 5 and importlib.util.find_spec("mpi4py") is None):
        pytest.skip("the MPI that is installed is another, or one that JAX asks through mpi4py")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "examples.processes"]
    options = ["--data", digits().name, "--updates", str(UPDATES), "--output", str(tmp_path / "params.npz")]
    one_device_each = {**os.environ, "XLA_FLAGS": re.sub(r"--\S*device_count=8", "", os.environ["XLA_FLAGS"])}
    done = subprocess.run(
        [*mpirun, *options], capture_output=True, text=True, cwd=ROOT, timeout=120, env=one_device_each, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{UPDATES} updates, accuracy") == 1
    close(dict(np.load(tmp_path / "params.npz")), alone(3), 1e-5)


@pytest.mark.parametrize(
    ("says", "method"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, None),  # Open MPI 4
        ({"OMPI_COMM_WORLD_RANK": "1"}, "mpi4py"),  # Open MPI 5
        ({"SLURM_STEP_NODELIST": "a[1-2]"}, None),
    ],
)
def test_open_mpi_5_is_asked_through_mpi4py(says, method):
    assert processes.asked_through(says) == method


def test_the_help_names_each_option_and_its_default(capsys):
    with pytest.raises(SystemExit):
        processes.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "rows that fit on one device (default: 16)" in out


def restored_from(folder, params, state):
    """The checkpoint that a run goes on from."""
    with contextlib.closing(processes.Checkpoints(Settings(checkpoints=str(folder)))) as checkpoints:
        return checkpoints.restore(lambda devices: (params, state))


def test_a_checkpoint_that_was_cut_is_not_picked_up(tmp_path):
    manager = processes.Checkpoints(Settings(checkpoints=str(tmp_path)))
    params, state = {"w": jnp.ones(3)}, {"s": jnp.zeros(3)}
    manager.save(100, params, state, 1)
    manager.close()
    whole, half = tmp_path / "100", tmp_path / "200.orbax-checkpoint-tmp"
    half.mkdir()
    for path in list(whole.rglob("*"))[:3]:
        if path.is_file():
            (half / path.name).write_bytes(path.read_bytes()[:10])
    seen, restored, _, devices = restored_from(tmp_path, params, state)
    assert (seen, devices) == (100, 1)
    assert_array_equal(restored["w"], params["w"])


def test_a_run_goes_on_with_the_global_batch_that_it_began_with(tmp_path):
    tree = {"w": jnp.ones(3)}
    manager = processes.Checkpoints(Settings(checkpoints=str(tmp_path), global_batch=200))
    manager.save(100, tree, tree, 1)
    manager.close()
    other = processes.Checkpoints(Settings(checkpoints=str(tmp_path), global_batch=100))
    with pytest.raises(ValueError, match="--global-batch=100, and the checkpoint of row 100 in .* has 200. Pass that"):
        other.restore(lambda devices: (tree, tree))


def test_one_run_at_a_time_writes_to_a_folder(tmp_path):
    """The second deleted what the first was writing, and the first died."""
    first = processes.Checkpoints(Settings(checkpoints=str(tmp_path)))
    with pytest.raises(ValueError, match="--checkpoints=.*, and another run is there. Pass another folder"):
        processes.Checkpoints(Settings(checkpoints=str(tmp_path)))
    first.close()
    processes.Checkpoints(Settings(checkpoints=str(tmp_path))).close()


def test_a_checkpoint_of_more_updates_than_asked_for(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    run = lambda updates: processes.Run(
        asked(processes=1, updates=updates, save_every=13, checkpoints=str(tmp_path)), mesh
    )
    with jax.set_mesh(mesh), jax.numpy_rank_promotion("allow"):
        run(2).train()
        with pytest.raises(ValueError, match="--updates=1, and it has 2. Pass more, or another folder"):
            run(1).train()
    assert "made 1 update of" in processes._shown(Settings(updates=1), 1)


def test_a_checkpoint_without_a_note_is_taken_where_no_other_has_one(tmp_path):
    """A crash between a checkpoint and the note of its digests: nobody knows what the disk has lost of it."""
    params, state = {"w": jnp.ones(3)}, {"s": jnp.zeros(3)}
    manager = processes.Checkpoints(Settings(checkpoints=str(tmp_path)))
    for seen in (100, 200):
        manager.save(seen, params, state, 1)
    manager.close()
    for seen, noted in ((200, 100), (100, 100)):
        (tmp_path / str(seen) / "digests").unlink()
        found = restored_from(tmp_path, params, state)
        assert found[0] == noted


def test_a_checkpoint_whose_bytes_have_changed_is_passed_over(tmp_path):
    """Of the same size: every attempt ended there, where the older one is good."""
    params, state = {"w": jnp.ones(300)}, {"s": jnp.zeros(300)}
    manager = processes.Checkpoints(Settings(checkpoints=str(tmp_path)))
    for seen in (100, 200):
        manager.save(seen, params, state, 1)
    manager.close()
    largest = max(
        (path for path in (tmp_path / "200").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(bytes(byte ^ 255 for byte in largest.read_bytes()))
    found = restored_from(tmp_path, params, state)
    assert found[0] == 100
    assert_array_equal(found[1]["w"], params["w"])


@pytest.mark.sweep
@pytest.mark.parametrize("other", [{"max_microbatch_size": 8}, *sweep([{"global_batch": 100}])], ids=str)
def test_processes_that_disagree_say_so(tmp_path, other):
    """Another `every`, another shape of the batch: a message in bounded time, not a hang."""
    begun = time.monotonic()
    group = processes.start(asked(updates=2), tmp_path, of_process={1: other})
    failed = processes.wait(group, begun + 60)
    processes.kill(group)
    assert failed is not None
    assert time.monotonic() - begun < 60
    words = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    name, value = next(iter(other.items()))
    assert "The processes of a run must agree" in words
    assert f"'{name}': '{value}'" in words


def test_one_process_agrees_with_itself_without_asking(monkeypatch):
    said = []
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", said.append)
    optax_accum.checkpoint.check_processes(every=3, shape=(4, 5))
    assert not said


def test_facts_of_any_length_are_compared_to_their_end(monkeypatch):
    """The first 4000 bytes were."""
    said = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    gather = "jax.experimental.multihost_utils.process_allgather"
    monkeypatch.setattr(gather, lambda row: said.append(row) or [row, row])
    optax_accum.checkpoint.check_processes(shapes="x" * 9000 + "one")
    monkeypatch.setattr(gather, lambda row: [said[0], row])
    with pytest.raises(ValueError, match="The processes of a run must agree.*same settings"):
        optax_accum.checkpoint.check_processes(shapes="x" * 9000 + "another")


# Orbax, in one process


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [4, *sweep([8])])
@pytest.mark.parametrize("kind", ["Explicit", *sweep(["Auto"])])
def test_a_window_in_flight_is_saved_and_goes_on(tmp_path, devices, kind):
    """On as many devices with the same bits, on half as many with the same numbers."""
    fun = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) - 1) ** 2)
    tx = optax_accum.accumulate_gradients(optax.adam(1e-2, eps=1e-3), every=4, devices="data")
    data = np.random.default_rng(0).normal(size=(8, 16, 5)).astype(np.float32)

    def placed(number):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:number]), ("data",), axis_types=(getattr(AxisType, kind),))
        params = jax.device_put({"w": np.full((5, 3), 0.1, np.float32)}, NamedSharding(mesh, P()))
        return mesh, params

    def train(mesh, params, state, batches):
        where = optax_accum.sharding.state_sharding(tx, params)
        step = jax.jit(optax_accum.value_and_apply_gradients(fun, tx), out_shardings=(None, None, where))
        for x in batches:
            _, params, state = step(params, state, jax.device_put(x, NamedSharding(mesh, P("data"))))
        return params, state

    mesh, params = placed(8)
    with jax.set_mesh(mesh):
        params, state = train(mesh, params, tx.init(params), data[:6])  # two micro-steps into the second window
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", {"params": params, "state": state})
        undisturbed, _ = train(mesh, params, state, data[6:])
    mesh, fresh = placed(devices)
    with jax.set_mesh(mesh):
        target = {
            "params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh),
            "state": optax_accum.checkpoint.checkpoint_target(tx, fresh, num_devices=8),
        }
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "c", target)
        state = optax_accum.checkpoint.redistribute(restored["state"], devices)
        state = jax.device_put(state, optax_accum.sharding.state_sharding(tx, fresh))
        got, state = train(mesh, restored["params"], state, data[6:])
    assert optax_accum.has_updated(state)
    if devices == 8:
        assert_array_equal(got["w"], undisturbed["w"])
    else:
        assert_allclose(got["w"], undisturbed["w"], atol=1e-6)


counts = st.integers(1, 4000)


@given(counts, st.integers(1, 300), st.integers(1, 64))
def test_no_device_gets_more_than_fits_and_no_row_is_lost(rows, most, devices):
    sizes, device_rows = processes.split_rows(rows, most, devices)
    padding = [own * devices - size for own, size in zip(device_rows, sizes, strict=True)]
    assert sum(sizes) == rows
    assert min(sizes) >= 1
    assert max(device_rows) <= most
    assert max(device_rows) - min(device_rows) <= 1
    assert (len(sizes) - 1) * most * devices < rows  # one less would not fit
    assert 0 <= padding[-1] < devices
    assert not any(padding[:-1])


def test_a_thousand_rows_of_at_most_64():
    sizes, _ = processes.split_rows(1000, 64, 1)
    assert (len(sizes), max(sizes), min(sizes)) == (16, 63, 62)
