"""A way in a process of its own, which makes an update whenever it is told to: its memory and threads are its own.

`python -m benchmarks._process` is what such a process runs; it is not for people.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

Facts = dict[str, Any]


class Process:
    """A way that runs elsewhere.

    Attributes:
      facts: `seconds` of the first update; at the end `peak` and `program`, bytes.
      params: the parameters after the problem's batches, by name.
      seconds: of each update that was timed.
      host: CPU seconds of the calling thread in each.
    """

    def __init__(self, way: str, problem: str, k: int, size: int | None):
        self.name, self.seconds, self.host = way, list[float](), list[float]()
        self._folder = tempfile.TemporaryDirectory()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        told = json.dumps([way, problem, k, size, str(self._path)])
        command = [sys.executable, "-m", "benchmarks._process", told]
        root = str(pathlib.Path(__file__).parent.parent)
        paths = os.pathsep.join([root, *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU is shared
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    @property
    def _path(self) -> pathlib.Path:
        return pathlib.Path(self._folder.name) / "params.npz"

    def begin(self) -> None:
        """Makes the updates that are compared; the libraries were loaded while others began."""
        self.facts = self._heard("begin")
        self.params = dict(np.load(self._path))

    def update(self) -> None:
        """Times one update."""
        facts = self._heard("update")
        self.seconds.append(facts["seconds"])
        self.host.append(facts["host"])

    def end(self) -> None:
        """Asks for its memory, and lets it go."""
        self.facts |= self._heard("end")
        self.close()

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe
            with contextlib.suppress(BrokenPipeError):  # what it was told last may not have reached it
                pipe.close()
        self._folder.cleanup()

    def _heard(self, told: str) -> Facts:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(f"{told}\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (json.JSONDecodeError, BrokenPipeError) as error:
            self._errors.seek(0)
            last = (self._errors.read().strip() or "it said nothing").splitlines()[-1]
            raise SystemExit(f"{self.name}: its process ended: {last}") from error


def main(arguments: Sequence[str]) -> None:
    """Makes updates as it is told on stdin, and answers on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    way, problem, k, size, path = json.loads(arguments[0])
    from benchmarks import _contenders, _problems

    made = _problems.make(problem, k, size)
    runs = _contenders.WAYS[way](made)
    first, *others = [runs.place(batch) for batch in made.batches]
    for told in map(str.strip, sys.stdin):
        if told == "end":
            peak = _peak()  # before its programs are asked for
            say(
                peak=peak, program=max((_contenders.held(program) for program, _ in runs.programs(first)), default=None)
            )
            return
        start, host = time.perf_counter(), time.thread_time()
        runs.update(first)
        host = time.thread_time() - host
        runs.wait()
        seconds = time.perf_counter() - start
        if told == "begin":
            for data in others:
                runs.update(data)
            np.savez(path, **runs.params())
        say(seconds=seconds, host=host)


def _peak() -> int:
    """Returns the largest resident memory so far; `ru_maxrss` would begin with that of the process that asks."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[0])


if __name__ == "__main__":
    main(sys.argv[1:])
