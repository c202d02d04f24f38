"""The environment that JAX is imported in: a CPU as eight devices, and a compiler that is asked for little.

Most of the suite's time is the compiler's. So a program is compiled once, with few optimizations, and kept for the next
run (`conftest.py`); tests that ask what a program is compile it with `programs.compiled`.
"""

import importlib.metadata
import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent

JAX = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:3])

# Below JAX 0.11, XLA can still do without its new emitters for CPUs, which take 40 % of the suite's time.
OLD_EMITTERS = JAX < (0, 11)
# As `versions.warn_of_stale_products` tells users to.
STALE_PRODUCTS = JAX < (0, 8, 2)

# A worker has one core to compile on, so programs are not split among threads.
flags = ["--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1"]
flags += ["--xla_cpu_use_fusion_emitters=false"] * OLD_EMITTERS + ["--xla_cpu_use_xnnpack=false"] * STALE_PRODUCTS
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # in the processes that tests start, too

# However small a program is, and however soon compiled, it is kept.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
