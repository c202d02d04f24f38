"""Owns the list of what compilers and versions of JAX get otherwise, for docs; tests fail if one may go."""

from typing import NamedTuple

from optax_accum._core.compilers import DEVICES, HOST, REFERENCES


class Quirk(NamedTuple):
    """What versions of JAX do differently, or a compiler where one would not expect it."""

    where: str  # what owns it: of `compilers`, or a module and its name
    happens: str
    instead: str
    evidence: str  # a figure that a compiler gave, or a thread
    until: tuple[int, ...] | None = None  # the first JAX without it
    test: str = ""  # without `until`: fails on the newest JAX once it is gone


QUIRKS = (
    Quirk(
        "branch",
        "A GPU's compiler copies all that passes through a `lax.cond`",
        "`lax.switch` of the same branches",
        "H100, JAX 0.10.0: 15 P moved in a held micro-step of AdamW, 3 P with `switch`",
        until=(0, 11, 1),
    ),
    Quirk(
        "warn_of_stale_products",
        "From 0.7.1 on, a CPU can multiply by what a matrix was before a program updated it in place",
        "a warning names the flag of XLA that helps",
        "JAX 0.7.2: a linear model of 512 x 512 whose parameters are donated never trains",
        until=(0, 8, 2),
    ),
    Quirk(
        "extremes",
        "A CPU's compiler writes the magnitudes of an array before it reduces them",
        "two reductions, of the largest and of the smallest number",
        'JAX 0.10.0: 1 P of temporary memory for "skip", 0 P with two',
        until=(0, 10, 2),
    ),
    Quirk(
        "why_not_in_place",
        "There is no `jax.vjp(...).with_refs`",
        "gradients are added after the backward pass",
        "the table of support",
        until=REFERENCES,
    ),
    Quirk(
        "ADDS_IN_CHECKPOINTS",
        "A backward pass cannot add to a reference inside `jax.checkpoint`",
        "a gradient is added where the checkpoint ends, inside the loop that it is in",
        "JAX 0.9.2: a NotImplementedError",
        until=(0, 10, 0),
    ),
    Quirk(
        "ADDS_TO_SLICES",
        "A backward pass cannot add to a slice of a reference",
        "a gradient is added where all slices of the parameter come together",
        "JAX 0.10.0: a NotImplementedError",
        until=(0, 11, 0),
    ),
    Quirk(
        "ADDS_IN_BRANCHES",
        "With references, JAX 0.11 differentiates some loops wrongly, so it is not trusted with those in branches",
        "a gradient is added where the branches of `cond` or `switch` end, as a whole",
        "CPU, a `switch` over 8 layers: 0.10 instead of 0.60 P of temporary memory; JAX 0.11.2 would gain as much",
        until=(0, 12, 0),
    ),
    Quirk(
        "OVERLAPS",
        "A `custom_vjp` that takes a reference mixes up the cotangents of its other arguments",
        "gradients are added over the devices after the backward pass",
        "JAX 0.10.0: Expected cotangent type float32[], but got float32[16]",
        until=(0, 11, 0),
    ),
    Quirk(
        "sizes_of_scan",
        "A `scan` has `num_consts` and `num_carry`, not `ft_in`",
        "the library reads those",
        "JAX 0.10.2",
        until=(0, 11, 2),
    ),
    Quirk(
        "ready_together",
        "An `optimization_barrier` gives its undifferentiated arrays a derivative of zeros",
        "the library defines the barrier's derivative without them",
        "JAX 0.10.0: a `Ratio` whose count comes from data is refused, as if it depended on the parameters",
        until=(0, 11, 2),
    ),
    Quirk(
        "on_host",
        "Inside `jit`, a `device_put` to host memory leaves nothing in the compiled program",
        "`offload` is refused",
        "H100, JAX 0.7.2: 0 P to and fro where 4 P are sent",
        until=HOST,
    ),
    Quirk("varying_axes", "A type has `.vma`, not `.manual_axis_type`", "that is read", "JAX 0.9.2", until=(0, 10, 0)),
    Quirk("as_varying", "`jax.lax.pcast` was `jax.lax.pvary`", "that is called", "JAX 0.8.1", until=(0, 8, 2)),
    Quirk("each_leaf", "There is no `jax.tree.broadcast`", "leaves are repeated by hand", "JAX 0.6.1", until=(0, 6, 2)),
    Quirk(
        "running_on",
        "There is no `jax.set_mesh` or no `jax.sharding.use_abstract_mesh`",
        "several devices are refused",
        "JAX 0.7.1",
        until=DEVICES,
    ),
    Quirk(
        "check_concrete",
        "`jit` cannot place arrays on a mesh that only `jax.set_mesh` names",
        "an error asks for parameters on the mesh",
        'JAX 0.7.2: "only AbstractMesh exists in a jitted computation"',
        until=(0, 8, 0),
    ),
    Quirk(
        "_compiled.absent.check_absent",
        "JAX 0.8 cannot compile a program of one device for an absent GPU",
        "it is refused",
        'JAX 0.8.3: "Could not find memory addressable by device"',
        until=(0, 9, 0),
    ),
    Quirk(
        "_compiled.absent.known_fields",
        "The description of a GPU that is not here has fewer fields",
        "the new ones are left out",
        'JAX 0.7.2: no field named "thread_dim_limit_x"',
        until=(0, 10, 0),
    ),
    Quirk(
        "_compiled.absent.CUDA",
        "Colab's image has CUDA 12",
        "its plugin is named in errors",
        "JAX 0.7.2",
        until=(0, 8, 0),
    ),
    Quirk(
        "_compiled.absent.compiled",
        "A program that was compiled for a GPU that is not here has no text",
        "its compiler writes it to a file",
        "JAX 0.7.2: `as_text()` is None",
        until=(0, 10, 0),
    ),
    Quirk(
        "_compiled.absent.libtpu_of_jax",
        "A libtpu that is older than the one that JAX names crashes Python as it compiles",
        "it is refused by name",
        "JAX 0.7.2 with libtpu 0.0.21.1: a segmentation fault; 0.0.23 works",
        until=(0, 10, 0),
    ),
    Quirk(
        "returned",
        "A TPU's scheduler reads an array early if a branch reads and does not return it",
        "the branch returns it",
        "v5e: 0.75 P of temporary memory for Muon, which alone has 0.5 P",
        test="compiled/test_facts.py::test_a_tpu_still_reads_early_what_a_branch_reads",
    ),
    Quirk(
        "NOTHING",
        "XLA merges a program's zeros with those that start a loop, and keeps them until the loop ends",
        "-0.0, which is not merged",
        "H100, a decoder's `update`: 5.26 against 5.15 P",
        test="compiled/test_facts.py::test_zeros_still_lie_beside_a_loop",
    ),
    Quirk(
        "zeroed",
        "XLA fuses nothing with references: a select reads and writes the accumulator each micro-step",
        "a loop of at most one iteration",
        "H100: 6.29 against 4.29 P in a held micro-step",
        test="compiled/test_facts.py::test_a_select_over_references_still_moves_them",
    ),
    Quirk(
        "ready_together",
        "Gradients wait for the accumulator in a row; unrolled micro-batches run side by side",
        "a barrier",
        "H100, 12 layers: 0.08 against 0.05 P of temporary memory",
        test="compiled/test_facts.py::test_gradients_still_wait_for_the_accumulator",
    ),
    Quirk(
        "_core.sinks.breaks",
        "With references, JAX cannot differentiate a scan that scans over an array and also closes over it",
        "the parameter is used before the scan",
        "JAX 0.12: a NotImplementedError; 0.11.2: a wrong gradient",
        test="core/test_in_place.py::test_jax_still_adds_no_array_that_a_scan_takes_twice",
    ),
    Quirk(
        "_core.sinks.is_barrier",
        "With references, JAX cannot differentiate an `optimization_barrier`",
        "the parameter is used before the barrier",
        "JAX 0.12: an AssertionError",
        test="core/test_in_place.py::test_jax_still_adds_nothing_behind_a_barrier",
    ),
    Quirk(
        "_core.tracing.is_batched",
        "`vmap` cannot batch a scan or a `cond` over references",
        "gradients are added after the backward pass",
        "JAX 0.12: a NotImplementedError",
        test="core/test_in_place.py::test_jax_still_batches_no_scan_over_references",
    ),
    Quirk(
        "scatter_stages",
        "A TPU turns a reduce-scatter over a square of chips (4x4, 8x8) into an all-reduce and a slice",
        "two stages, of at most eight chips",
        "v5e:4x4: 1 P all-reduced and 1.25 P of temporary memory, against 1.12 P scattered and 1 P",
        test="compiled/test_facts.py::test_a_reduce_scatter_over_a_square_is_still_an_all_reduce",
    ),
    Quirk(
        "by_slices",
        "A TPU's all-reduce is not in place",
        "a large leaf is reduced slice by slice, in its place",
        "v5e:4x4: 1 P of temporary memory, against 0 P",
        test="compiled/test_facts.py::test_an_all_reduce_of_a_tpu_is_still_not_in_place",
    ),
    Quirk(
        "_space.mapped.over_axes",
        "A `shard_map` over Auto axes gathers its arguments over the mesh's Explicit axes",
        "the axes are Explicit while it runs",
        "CPU, JAX 0.12",
        test="space/test_sharded.py::test_a_shard_map_beside_explicit_axes_still_gathers",
    ),
    Quirk(
        "_space.mapped.gathered",
        "Inside a `shard_map`, JAX cannot reduce-scatter beside Explicit axes",
        "another `shard_map` over these axes",
        "CPU, JAX 0.12: an error while tracing",
        test="space/test_sharded.py::test_a_shard_map_still_scatters_nothing_beside_explicit_axes",
    ),
    Quirk(
        "_space.partials.sum_in_place",
        "XLA cannot partition an all-reduce over an axis of one device if the array is sharded over other axes",
        "none is made",
        'CPU, JAX 0.12: "Cross-partition allreduce must be in (partial) manual partitioning mode"',
        test="space/test_sharded.py::test_an_all_reduce_of_one_device_is_still_not_partitioned",
    ),
)
