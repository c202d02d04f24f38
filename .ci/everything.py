#!/usr/bin/env python3
"""Everything that ci.yml and docs.yml do, on one machine: half an hour on two cores. Prints the seconds of each leg.

Lint and types come first, then the README's tests on the newest JAX, its quick ones first. The other legs run side by
side, one on each core: the environments of .ci/environments.toml, the notebooks in Colab's versions from their install
cell on, the docs with Equinox, Haiku and NumPyro, loops in PyTorch, wheel and sdist.

Needs Python with pip and nothing else, and 12 GB of disk. `--keep DIR` keeps the virtual environments and logs in DIR;
names of legs run these alone, `--list` prints them.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import environments

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEWEST, OLDEST = ((ROOT / ".ci" / name).read_text().strip() for name in ("python", "oldest_python"))
VERSIONS = """
import importlib.metadata as m, platform
has = {d.metadata["Name"]: d.version for d in m.distributions()}
print("Python", platform.python_version(), *(f"{p} {has[p]}" for p in ("jax", "jaxlib", "optax", "flax") if p in has))
"""
began = time.monotonic()
warnings: list[str] = []


def say(text: str) -> None:
    print(f"=== {time.monotonic() - began:.0f} s: {text}", flush=True)


def warn(text: str) -> None:
    warnings.append(text)
    say(f"WARNING: {text}")


class Leg:
    """What one leg installs and runs, in an environment of its own; its words go to a log."""

    def __init__(self, name: str, place: pathlib.Path) -> None:
        self.name, self.log, self.environment = name, place / f"{name}.log", place / name
        self.log.unlink(missing_ok=True)

    def run(self, command: str) -> None:
        """Runs a line of bash with the leg's Python first on the path."""
        path = os.pathsep.join([str(self.environment / "bin"), os.environ["PATH"]])
        with self.log.open("a") as log:
            print(f"$ {command}", file=log, flush=True)
            options = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "cwd": ROOT}
            bash = ["bash", "-euo", "pipefail", "-c", command]
            subprocess.run(bash, check=True, env={**os.environ, "PATH": path}, **options)

    def make(self, version: str) -> None:
        """Makes a fresh virtual environment of that Python, or of the oldest: older JAX has none for newer ones."""
        found = interpreters()
        if version not in found:
            warn(f"NO PYTHON {version} WAS FOUND. {self.name} IS TESTED ON {next(iter(found))}.")
        python = found.get(version, next(iter(found.values())))
        subprocess.run([python, "-m", "venv", "--clear", self.environment], check=True)

    def install(self, what: str) -> None:
        self.run(f"python -m pip install -q {what}")

    def says(self, program: str) -> str:
        """Returns what a program prints there."""
        python = self.environment / "bin/python"
        return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()

    def last_line(self) -> str:
        return self.log.read_text().strip().splitlines()[-1] if self.log.exists() else ""


@functools.cache
def interpreters() -> dict[str, str]:
    """Returns every Python from the oldest on that can be found, by version, oldest first."""
    folders = [pathlib.Path(each) for each in os.environ["PATH"].split(os.pathsep) if each]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        folders += [path / "bin" for path in pathlib.Path(root, "versions").glob("*")]
    names = [path for folder in folders if folder.is_dir() for path in folder.glob("python3*")]
    found = {}
    for path in names:
        if re.fullmatch(r"python3(\.\d+)?", path.name):
            asks = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([path, "-c", asks], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[done.stdout.strip()] = str(path)
    number = lambda version: tuple(map(int, version.split(".")))
    usable = {each: found[each] for each in sorted(found, key=number) if number(each) >= number(OLDEST)}
    return usable or sys.exit(f"No Python from {OLDEST} on was found.")


# The legs.


def quick(leg: Leg) -> None:
    """Lint and types; of the quick tests, with which the next leg begins, no second run."""
    leg.make(NEWEST)
    leg.install("-U pip")  # what a Python brings knows no groups yet
    leg.install("-e '.[test]' --group lint")
    leg.run("ruff check . && ruff format --check . && pyright")


def newest(leg: Leg) -> None:
    """The README's command, as it stands there."""
    (command,) = re.findall(r"^```bash\n(.*pytest.*)\n```", (ROOT / "README.md").read_text(), re.MULTILINE)
    (row,) = (row for row in environments.rows("tests") if row["name"] == "newest")
    leg.make(row["python"])
    leg.run(f"{command} -q {row['tests']}")


def tested(row: dict[str, str], leg: Leg) -> None:
    leg.make(row["python"])
    leg.install(row["install"])
    leg.run(f"python -m pytest -q {row['tests']}")


def facts(row: dict[str, str], leg: Leg) -> None:
    leg.make(row["python"])
    leg.install(row["install"])
    try:
        leg.install(f"--no-deps {row['compiler'].format(jax=leg.says('import jax; print(jax.__version__)'))}")
    except subprocess.CalledProcessError:
        warn(f"THE COMPILER OF {leg.name} COULD NOT BE INSTALLED. NOTHING WAS COMPILED FOR IT.")
        return
    # Without its compiler, its tests would be skipped.
    asks = "import sys; from optax_accum.accelerators import target; target(sys.argv[1])"
    leg.run(f"python -c '{asks}' {row['target']}")
    leg.run("python -m pytest -q -r fEs tests/accelerators/test_accelerators.py tests/accelerators/test_facts.py")


def notebooks(leg: Leg) -> None:
    leg.make(NEWEST)
    leg.install("-r .ci/colab.txt nbclient nbformat")
    leg.run("python .ci/in_colab.py")


def docs(leg: Leg) -> None:
    leg.make(NEWEST)
    leg.install("-U pip")
    leg.install("-e '.[test]' --group docs --group ecosystem")
    large = "convnext or densenet or efficientnet or inception or nasnet or xception"  # at night
    named = f"-k '(other_libraries or equinox or public_trainers) and not ({large})'"
    leg.run(f"python -m pytest -q tests/pages tests/rows/test_equinox.py --sweep {named}")
    leg.run("python -m sphinx -q -W -n docs build/docs")


def pytorch(leg: Leg) -> None:
    leg.make(OLDEST)
    leg.install("-e '.[test]'")
    try:  # for CPUs alone: the other is 20 times as large, and brings CUDA
        leg.install("--only-binary :all: accelerate 'torch==2.13.0+cpu'")
    except subprocess.CalledProcessError:
        warn("NO PYTORCH FOR CPUS WAS FOUND. NO LOOP OF PYTORCH WAS CHECKED.")
        return
    leg.run("python -m pytest -q tests/verify/test_verify_step_torch.py --sweep")


def wheel(leg: Leg) -> None:
    leg.make(OLDEST)
    leg.run(".ci/wheel")


FIRST: dict[str, Callable[[Leg], None]] = {"quick": quick, "newest": newest}  # each has all cores
BESIDE: dict[str, Callable[[Leg], None]] = {  # the longest first
    "notebooks": notebooks,
    **{row["name"]: functools.partial(facts, row) for row in environments.rows("facts")},
    **{row["name"]: functools.partial(tested, row) for row in environments.rows("tests") if row["name"] != "newest"},
    "docs": docs,
    "pytorch": pytorch,
    "wheel": wheel,
}


def timed(name: str, leg: Leg) -> tuple[str, float]:
    """Runs a leg; says how long it took, or ends with its log."""
    say(f"{name} begins")
    start = time.monotonic()
    try:
        (FIRST | BESIDE)[name](leg)
    except subprocess.CalledProcessError:
        say(f"{name} FAILED after {time.monotonic() - start:.0f} s:")
        print(leg.log.read_text(), flush=True)
        raise
    seconds = time.monotonic() - start
    say(f"{name} passed in {seconds:.0f} s, with {leg.says(VERSIONS)}: {leg.last_line()}")
    return name, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("legs", nargs="*", metavar="LEG", help="these alone")
    parser.add_argument("--list", action="store_true", help="print the names of the legs, and run nothing")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="where environments and logs are kept")
    options = parser.parse_args()
    if unknown := set(options.legs) - {*FIRST, *BESIDE}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join([*FIRST, *BESIDE])}")
    if options.list:
        print(*FIRST, *BESIDE)
        return
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    place = (options.keep or pathlib.Path(tempfile.mkdtemp())).resolve()
    place.mkdir(parents=True, exist_ok=True)
    try:
        run(options.legs or [*FIRST, *BESIDE], place)
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)


def run(names: list[str], place: pathlib.Path) -> None:
    """Runs the legs, and prints the seconds of each and all warnings; none begins after one that failed."""
    done = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as cores:
        try:
            done += [timed(name, Leg(name, place)) for name in FIRST if name in names]
            beside = [cores.submit(timed, name, Leg(name, place)) for name in BESIDE if name in names]
            done += [leg.result() for leg in concurrent.futures.as_completed(beside)]
        except subprocess.CalledProcessError as error:
            cores.shutdown(cancel_futures=True)
            sys.exit(f"FAILED: {shlex.join(map(str, error.cmd))}")
    print("\n".join(["", *(f"{seconds:6.0f} s  {name}" for name, seconds in done), *warnings]))
    say("all passed")


if __name__ == "__main__":
    main()
