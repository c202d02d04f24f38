"""Trains on several processes, and goes on after a crash or on another number of them: copy what you need of it.

Run `python -m examples.processes --processes 2` here. Each process stands for one host: it sees its own rows of every
micro-batch and a device of its own. On a cluster start the same program once on each host, by `srun`, `mpirun` or a
JobSet: it finds its group by itself, and restarts are left to the cluster.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum.checkpoint import check_processes, checkpoint_target, redistribute
from optax_accum.sharding import state_sharding

Tree = Any
Group = list[subprocess.Popen[str]]
WIDTH = 64
STARTED_BY = (
    "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_RANK",
    "JOB_COMPLETION_INDEX",
)  # what clusters set for each process


def _option(default: Any, says: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": says})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is asked for; each is an option of the command line."""

    processes: int = _option(2, "how many to launch on this machine")
    data: str = _option("", ".npz file with `images` [n, 64] and `labels` [n]; by default scikit-learn's digits")
    global_batch: int = _option(200, "rows of one update")
    max_microbatch_size: int = _option(16, "rows that fit on one device")
    updates: int = _option(20, "updates to make")
    save_every: int = _option(0, "micro-steps between checkpoints; 0: none")
    checkpoints: str = _option("", "the folder to save to, and to go on from")
    restarts: int = _option(0, "how often the group starts again after a crash")
    timeout: float = _option(300.0, "seconds for the whole run, all attempts together")
    logs: str = _option("", "the folder for what each process says last; by default one that is kept after a failure")
    output: str = _option("", ".npz file for the parameters at the end")
    learning_rate: float = _option(3e-3, "of Adam")


def main(argv: Sequence[str] | None = None) -> int:
    """Launches the processes, or is one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.processes",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Settings):
        name, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        parser.add_argument(name, type=kind, default=field.default, help=field.metadata["help"])
    parser.add_argument("--process", type=int, help="be this process of a group, instead of launching it")
    parser.add_argument("--coordinator", help="address of process 0, host:port")
    options = vars(parser.parse_args(argv))
    process, coordinator = options.pop("process"), options.pop("coordinator")
    settings = Settings(**options)
    if process is None and not any(name in os.environ for name in STARTED_BY):
        return launch(settings)
    run_process(settings, process, coordinator)
    return 0


# The launcher, for one machine.


def launch(settings: Settings) -> int:
    """Runs the group of processes, again after a crash as often as `restarts` allows, and returns its exit status."""
    deadline = time.monotonic() + settings.timeout
    kept = pathlib.Path(settings.logs or tempfile.mkdtemp(prefix="processes-"))
    with _ended_by_signals():
        for attempt in range(1, settings.restarts + 2):
            logs = kept / f"attempt-{attempt}"
            logs.mkdir(parents=True, exist_ok=True)
            group: Group = []
            try:
                group = start(settings, logs)
                failed = wait(group, deadline)
            finally:
                kill(group)
                words = _last_words(group, logs)
            if failed is None:
                if not settings.logs:
                    shutil.rmtree(kept)
                print(_shown(settings, attempt), flush=True)
                return 0
            late = time.monotonic() > deadline
            why = f"longer than --timeout {settings.timeout:g} s" if late else f"process {failed} ended early"
            print(f"Attempt {attempt}: {why}.\n{words}", file=sys.stderr)
            if late:
                break
    return 1


def start(
    settings: Settings, logs: pathlib.Path | None = None, of_process: Mapping[int, Mapping[str, Any]] | None = None
) -> Group:
    """Starts one process for each number, with settings `of_process` of its own; process 0 prints here."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, os.path.abspath(__file__), "--coordinator", coordinator]
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}  # one device for each process
    group: Group = []
    try:
        for number in range(settings.processes):
            own = {**dataclasses.asdict(settings), **(of_process or {}).get(number, {}), "process": number}
            options = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
            with open(logs / f"{number}.log" if logs else os.devnull, "w") as error:
                out = None if number == 0 else subprocess.DEVNULL
                one = subprocess.Popen([*command, *options], env=environment, stdout=out, stderr=error, text=True)
            group.append(one)
    except BaseException:  # a signal among them
        kill(group)
        raise
    return group


def wait(group: Group, deadline: float) -> int | None:
    """Waits until all have ended well, or returns the number of the first that did not, or not in time."""
    while any(process.poll() is None for process in group) and time.monotonic() < deadline:
        failed = [number for number, process in enumerate(group) if process.poll() not in (None, 0)]
        if failed:
            return failed[0]
        time.sleep(0.02)
    return next((number for number, process in enumerate(group) if process.poll() != 0), None)


def kill(group: Group) -> None:
    """Ends every process: a group of which one has died cannot go on."""
    for process in group:
        if process.poll() is None:
            process.kill()
    for process in group:
        process.wait()


def _last_words(group: Group, logs: pathlib.Path) -> str:
    """Notes how each process ended in its file, and returns a line for each."""
    lines = []
    for number, process in enumerate(group):
        code, path = process.returncode, logs / f"{number}.log"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        said = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {said[-1][:300]}" if said and code else ""
        lines.append(f"  process {number} {how}; its words are in {path}{last}")
        with contextlib.suppress(OSError), open(path, "a") as log:  # the disk may be full
            log.write(f"\nprocess {number} {how}\n")
    return "\n".join(lines)


def _shown(settings: Settings, attempts: int) -> str:
    """Says what a run has shown."""
    again = f", started {attempts} times," if attempts > 1 else ""
    updates = f"{settings.updates} update{'s' * (settings.updates != 1)}"
    return (
        f"{settings.processes} processes{again} made {updates} of {settings.global_batch} rows each, every one with "
        "one reduction: the updates that one process makes. Try other numbers, or kill one."
    )


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None, None, None]:
    """Lets SIGTERM end the group as an error does, and Ctrl-C with one line."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, end)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("Interrupted: all processes have been ended.") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# One process of the group.


def run_process(settings: Settings, process: int | None, coordinator: str | None) -> None:
    """Trains, and ends at once after an error: the usual end would wait for the others, who wait for this one."""
    if process is not None:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        train(settings, process, coordinator)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except BaseException:
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:  # where the disk is full, nothing can be said
            os._exit(1)


def end_with(launcher: int) -> None:
    """Ends this process when its launcher has gone, also one that SIGKILL left no time to end its group."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def train(settings: Settings, process: int | None = 0, coordinator: str | None = None) -> None:
    """Is one process: joins the group, goes on from the last checkpoint, trains, saves."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if process is None:
        jax.distributed.initialize(cluster_detection_method=asked_through(os.environ))
        settings = dataclasses.replace(settings, processes=jax.process_count())
    elif settings.processes > 1:
        # Otherwise JAX asks the cluster around this group which of this host's devices to use.
        jax.distributed.initialize(coordinator, settings.processes, process, cluster_detection_method="deactivate")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        Run(settings, mesh).train()


def asked_through(environment: Mapping[str, str]) -> str | None:
    """Returns how JAX is to find its group: Slurm, Open MPI 4 and Kubernetes it reads by itself.

    Open MPI 5 says less to its processes. `mpi4py` asks it, which JAX does by itself from 0.12 on only.
    """
    by_open_mpi = "OMPI_COMM_WORLD_RANK" in environment
    return "mpi4py" if by_open_mpi and "OMPI_MCA_orte_hnp_uri" not in environment else None


def split_rows(rows: int, most: int, devices: int) -> tuple[list[int], list[int]]:
    """Returns the rows of each micro-batch, and how many a device has of it: `most` at most, differing by one."""
    own = -(-rows // devices)
    count = -(-own // most)
    device_rows = [own // count + (index < own % count) for index in range(count)]
    sizes = [devices * each for each in device_rows]
    sizes[-1] -= devices * own - rows  # filled up with rows of weight zero
    return sizes, device_rows


class Run:
    """A training run as one process sees it: every method is called by all of them."""

    def __init__(self, settings: Settings, mesh: jax.sharding.Mesh):
        self.settings, self.mesh = settings, mesh
        facts = {name: value for name, value in dataclasses.asdict(settings).items() if name != "logs"}
        check_processes(**facts, devices=mesh.size)
        # The caller owns the window: it knows which micro-step is the last of a batch, however it was split.
        self.tx = optax_accum.accumulate_gradients(optax.adam(settings.learning_rate), every=None, devices="data")
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec("data"))
        self.params = jax.device_put(initial_params(), self.replicated)
        self.where = state_sharding(self.tx, self.params)
        self.state = jax.jit(self.tx.init, out_shardings=self.where)(self.params)
        self.sizes, self.device_rows = split_rows(settings.global_batch, settings.max_microbatch_size, mesh.size)
        self.seen = 0  # rows of the stream
        step = optax_accum.value_and_apply_gradients(loss, self.tx, weight_fn=lambda batch: batch["mask"].sum())
        out = (self.rows, self.replicated, self.where)
        self.step = jax.jit(step, static_argnames="flush", donate_argnums=(0, 1), out_shardings=out)
        self.mean = jax.jit(lambda losses: losses.mean(), out_shardings=self.replicated)
        self.checkpoints = Checkpoints(settings) if settings.checkpoints else None

    def train(self) -> None:
        """Takes the stream of rows from where the last checkpoint left it to the last update."""
        if self.checkpoints:
            self.restore(self.checkpoints)
        images, labels = read(self.settings.data)
        for micro_step, (rows, last) in enumerate(self.micro_batches(len(images)), start=1):
            batch = self.dealt_out(rows, images, labels)
            losses, self.params, self.state = self.step(self.params, self.state, batch, flush=last)
            self.seen += len(rows)
            if self.checkpoints and self.settings.save_every and micro_step % self.settings.save_every == 0:
                self.checkpoints.save(self.seen, self.params, self.state, self.mesh.size)
            if last:
                value = self.mean(losses)  # of the last micro-batch; every process has a part in it
                self.say(f"update {self.seen // self.settings.global_batch}: loss {value:.3f}")
        if self.checkpoints:
            self.checkpoints.close()
        if self.settings.output and jax.process_index() == 0:
            np.savez(self.settings.output, **jax.tree.map(np.asarray, self.params))
        accuracy = jnp.mean(jnp.argmax(predict(self.params, images), axis=-1) == labels)
        self.say(f"{self.state.gradient_step} updates, accuracy {accuracy:.3f}")

    def say(self, message: str) -> None:
        """Prints a message once, not in every process."""
        if jax.process_index() == 0:
            print(message, flush=True)

    def micro_batches(self, length: int) -> Iterator[tuple[np.ndarray, bool]]:
        """Yields which of `length` rows are in each micro-batch, and whether it closes its window.

        A run that goes on in the middle of a window on as many devices takes the micro-batches that it would have
        taken; on another number it splits what is left of the window anew.
        """
        batch, sizes = self.settings.global_batch, self.sizes
        while self.seen < batch * self.settings.updates:
            done = self.seen % batch
            starts = np.cumsum([0, *sizes])
            if done in starts:
                left = sizes[int(np.searchsorted(starts, done)) :]
            else:
                left, _ = split_rows(batch - done, max(self.device_rows), self.mesh.size)
            for number, size in enumerate(left, start=1):
                yield stream(self.seen, size, length), number == len(left)

    def dealt_out(self, rows: np.ndarray, images: np.ndarray, labels: np.ndarray) -> Tree:
        """Returns a micro-batch of which this process holds its own rows; rows of weight zero make it even."""
        size = max(self.device_rows) * self.mesh.size  # one shape for all micro-batches
        index, mask = np.resize(rows, size), np.arange(size) < len(rows)
        mine = slice(
            jax.process_index() * size // jax.process_count(), (jax.process_index() + 1) * size // jax.process_count()
        )
        local = {"x": images[index[mine]], "y": labels[index[mine]], "mask": mask[mine].astype(np.float32)}
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, self.rows), local)

    def restore(self, checkpoints: "Checkpoints") -> None:
        """Goes on from the last checkpoint, if there is one."""
        target = lambda devices: (
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.params
            ),
            checkpoint_target(self.tx, self.params, devices),
        )
        if found := checkpoints.restore(target):
            self.seen, self.params, state, devices = found
            if self.seen > self.settings.global_batch * self.settings.updates:
                raise ValueError(
                    f"The checkpoint must not be of more updates than asked for: --updates={self.settings.updates}, "
                    f"and it has {self.seen / self.settings.global_batch:g}. Pass more, or another folder to "
                    "--checkpoints."
                )
            moved = state if devices == self.mesh.size else redistribute(state, self.mesh.size)
            self.state = jax.device_put(moved, self.where)
            self.say(f"goes on after row {self.seen}, saved on {devices} devices")


class Checkpoints:
    """Orbax writes a checkpoint under another name and renames it at the end: one that was cut is not found.

    A disk may still lose or change part of it. So process 0 notes a digest of each file, and passes over a checkpoint
    that differs, and one that it had no time to take note of, if there is another that it had.
    """

    def __init__(self, settings: Settings):
        import orbax.checkpoint as ocp

        self.ocp, self.folder = ocp, pathlib.Path(settings.checkpoints).resolve()
        self.global_batch = settings.global_batch
        self.lock = self._locked() if jax.process_index() == 0 else None
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def _locked(self) -> int:
        """Returns the open file that keeps other runs, which would delete checkpoints, out of the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
        except BlockingIOError:
            os.close(lock)
            raise ValueError(
                f"One run writes to a folder of checkpoints: --checkpoints={self.folder}, and another run is there. "
                "Pass another folder, or end that run first."
            ) from None
        return lock

    def save(self, seen: int, params: Tree, state: Tree, devices: int) -> None:
        """Writes a checkpoint of which every process has a part."""
        args, tree = self.ocp.args, {"params": params, "state": state}
        info = {"devices": devices, "global_batch": self.global_batch}
        both = args.Composite(run=args.StandardSave(tree), info=args.JsonSave(info))
        self.manager.save(seen, args=both)
        if jax.process_index() == 0:
            note = self._note(seen)
            note.with_suffix(".new").write_text(json.dumps(self._digests(seen)))
            note.with_suffix(".new").replace(note)

    def restore(self, target: Any) -> tuple[int, Tree, Tree, int] | None:
        """Returns the rows seen, the parameters, the state and the devices it was saved on, of the newest whole one."""
        if (seen := self._newest_whole()) is None:
            return None
        args = self.ocp.args
        info = self.manager.restore(seen, args=args.Composite(info=args.JsonRestore()))["info"]
        if info["global_batch"] != self.global_batch:  # the rows seen say where in its window a run is
            raise ValueError(
                f"A run must go on with the global batch that it began with: --global-batch={self.global_batch}, and "
                f"the checkpoint of row {seen} in {self.folder} has {info['global_batch']}. Pass that, or another "
                "folder to --checkpoints."
            )
        devices = info["devices"]
        params, state = target(devices)
        tree = args.StandardRestore({"params": params, "state": state})
        run = self.manager.restore(seen, args=args.Composite(run=tree))["run"]
        return seen, run["params"], run["state"], devices

    def close(self) -> None:
        """Waits until all is written."""
        self.manager.close()
        if self.lock is not None:
            os.close(self.lock)

    def _newest_whole(self) -> int | None:
        """Returns the newest checkpoint of which nothing is missing, as process 0 sees it; drops what is newer."""
        newest, steps = -1, sorted(self.manager.all_steps())
        if jax.process_index() == 0:
            while steps and not self._is_whole(steps[-1]):
                before = f"goes on from that of row {steps[-2]}" if steps[:-1] else "begins anew, for there is no other"
                print(f"the checkpoint of row {steps.pop()} is not whole: {before}", flush=True)
            newest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            newest = int(multihost_utils.broadcast_one_to_all(np.int64(newest)))
        for step in self.manager.all_steps():
            if step > newest:
                self.manager.delete(step)
        return None if newest < 0 else newest

    def _is_whole(self, seen: int) -> bool:
        note = self._note(seen)
        if not note.exists():  # a crash came between the checkpoint and the note; or nobody takes notes
            return not any(self._note(step).exists() for step in self.manager.all_steps())
        with contextlib.suppress(ValueError):
            return json.loads(note.read_text()) == self._digests(seen)
        return False

    def _note(self, seen: int) -> pathlib.Path:
        return self.folder / str(seen) / "digests"

    def _digests(self, seen: int) -> dict[str, str]:
        folder = self.folder / str(seen)
        files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("digests")]
        digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()
        return {str(path.relative_to(folder)): digest(path) for path in sorted(files)}


def read(data: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns images [n, 64] and labels [n] of a file, or the 1797 handwritten digits that ship with scikit-learn."""
    if data:
        with np.load(data) as file:
            return file["images"], file["labels"]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int32)


def stream(start: int, size: int, length: int) -> np.ndarray:
    """Returns which rows of the data set are rows `start` to `start + size` of an endless, shuffled stream."""
    positions = np.arange(start, start + size)
    orders = {epoch: np.random.default_rng(epoch).permutation(length) for epoch in np.unique(positions // length)}
    return np.array([orders[position // length][position % length] for position in positions])


def initial_params() -> Tree:
    """Returns the same weights of a small network in every process."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), np.float32)
    return {"w": draw(64, WIDTH), "b": np.zeros(WIDTH, np.float32), "v": draw(WIDTH, 10)}


def predict(params: Tree, x: Any) -> jax.Array:
    """Returns logits [n, 10] of images [n, 64]."""
    return jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]


def loss(params: Tree, batch: Tree) -> jax.Array:
    """The mean over the rows that count; a device that has none of them is not asked."""
    each = optax.softmax_cross_entropy_with_integer_labels(predict(params, batch["x"]), batch["y"])
    return jnp.sum(batch["mask"] * each) / jnp.sum(batch["mask"])


if __name__ == "__main__":
    sys.exit(main())
