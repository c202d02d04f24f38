"""The list of what compilers and versions of JAX get otherwise, for docs; tests fail if one may go."""

from typing import NamedTuple

from tests.engine import versions


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
        "On a GPU, XLA copies every array that passes through a `lax.cond`",
        "`lax.switch` with the same branches",
        "H100, JAX 0.10.0: 15 P moved in a held micro-step of AdamW, 3 P with `switch`",
        until=(0, 11, 1),
    ),
    Quirk(
        "_core.versions.warn_of_stale_products",
        "On some CPUs a product uses the old values of a matrix that was updated in place",
        "a warning names the XLA flag that helps",
        "JAX 0.7.2, AMD EPYC: a linear model of 512 x 512 whose parameters are donated never trains",
        until=(0, 8, 2),
    ),
    Quirk(
        "extremes",
        "On a CPU, XLA writes absolute values to memory before it takes the largest",
        "the library takes the largest and the smallest number",
        'JAX 0.10.0: 1 P of temporary memory for "skip", instead of 0 P',
        until=(0, 10, 2),
    ),
    Quirk(
        "sizes_of_scan",
        "A traced `scan` has `num_consts` and `num_carry`, not `ft_in`",
        "the library reads `num_consts` and `num_carry`",
        "JAX 0.10.2",
        until=(0, 11, 2),
    ),
    Quirk(
        "ready_together",
        "Behind an `optimization_barrier`, an array without a derivative gets one of zeros",
        "the library defines the barrier's derivative itself",
        "JAX 0.10.0: a `Ratio` whose count comes from data is refused, as if it depended on the parameters",
        until=(0, 11, 2),
    ),
    Quirk(
        "on_host",
        "Inside `jit`, a `device_put` to host memory does nothing",
        "`offload` is refused",
        "H100, JAX 0.7.2: 0 P sent to the host and back, instead of 4 P",
        until=versions.HOST,
    ),
    Quirk(
        "varying_axes",
        "A type has `.vma`, not `.manual_axis_type`",
        "the library reads `.vma`",
        "JAX 0.9.2",
        until=(0, 10, 0),
    ),
    Quirk("as_varying", "`jax.lax.pcast` is named `pvary`", "the library calls `pvary`", "JAX 0.8.1", until=(0, 8, 2)),
    Quirk(
        "check_concrete",
        "`jit` cannot place arrays on a mesh that is set with `jax.set_mesh` alone",
        "an error asks you to put the parameters on the mesh",
        'JAX 0.7.2: "only AbstractMesh exists in a jitted computation"',
        until=(0, 8, 0),
    ),
    Quirk(
        "accelerators._absent.check_absent",
        "JAX 0.8 cannot compile a one-device program for a GPU that you do not have",
        "the library raises an error",
        'JAX 0.8.3: "Could not find memory addressable by device"',
        until=(0, 9, 0),
    ),
    Quirk(
        "accelerators._absent.known_fields",
        "XLA's description of a GPU that you do not have lacks some fields",
        "the library leaves them out",
        'JAX 0.7.2: no field named "thread_dim_limit_x"',
        until=(0, 10, 0),
    ),
    Quirk(
        "accelerators._absent.CUDA",
        "Colab's image has CUDA 12",
        "errors name the plugin for CUDA 12",
        "JAX 0.7.2",
        until=(0, 8, 0),
    ),
    Quirk(
        "accelerators._absent.compiled",
        "A program compiled for a GPU that you do not have cannot be printed",
        "XLA writes it to a file",
        "JAX 0.7.2: `as_text()` is None",
        until=(0, 10, 0),
    ),
    Quirk(
        "accelerators._absent.libtpu_of_jax",
        "A libtpu older than JAX asks for crashes Python while it compiles",
        "the library raises an error that names the version",
        "JAX 0.7.2 with libtpu 0.0.21.1: a segmentation fault; 0.0.23 works",
        until=(0, 10, 0),
    ),
    Quirk(
        "returned",
        "If a branch reads an array and does not return it, a TPU reads it early and keeps it",
        "the branch returns it",
        "v5e: 0.75 P of temporary memory for Muon, instead of 0.5 P",
        test="accelerators/test_facts.py::test_a_tpu_still_reads_early_what_a_branch_reads",
    ),
    Quirk(
        "NOTHING",
        "XLA merges constant zeros with those that start a loop, and keeps them until the loop ends",
        "the constant is -0.0, which XLA does not merge",
        "H100, a decoder's `update`: 5.26 P of memory, instead of 5.15 P",
        test="accelerators/test_facts.py::test_zeros_still_lie_beside_a_loop",
    ),
    Quirk(
        "zeroed",
        "A select that clears the accumulator reads and writes it at every micro-step",
        "a loop clears it, of one iteration or none",
        "H100: 6.29 P moved in a held micro-step, instead of 4.29 P",
        test="accelerators/test_facts.py::test_a_select_over_references_still_moves_them",
    ),
    Quirk(
        "ready_together",
        "XLA may start a backward pass before its accumulator is ready: gradients then pile up in memory",
        "an `optimization_barrier` between the two",
        "H100, 12 layers: 0.08 P of temporary memory, instead of 0.05 P",
        test="accelerators/test_facts.py::test_gradients_still_wait_for_the_accumulator",
    ),
    Quirk(
        "_core.convolutions.fast_in_loops",
        "On a CPU, XLA has a fast kernel for convolutions of one form, and brings others to it outside of loops alone",
        "the library writes convolutions and their gradients in this form",
        "JAX 0.12, a CNN on 64 images: gradients by a scan take 20 times the CPU time of the whole batch "
        "(jax-ml/jax#12868)",
        test="core/test_convolutions.py::test_in_a_loop_xla_still_leaves_a_gradient_of_a_convolution_as_it_is",
    ),
    Quirk(
        "as_written",
        "On a CPU, XLA compiles a float32 product of bfloat16 arrays that is transposed, and cannot run it",
        "a barrier behind the product",
        'JAX 0.7.2 to 0.12, AMD EPYC: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"',
        test="rows/test_primitives.py::test_xla_still_runs_no_transposed_product_of_bfloat16_arrays",
    ),
    Quirk(
        "_space.collectives.scatter_stages",
        "On a square of TPU chips (4x4, 8x8), a reduce-scatter becomes an all-reduce and a slice",
        "two reduce-scatters, each over at most eight chips",
        "v5e:4x4: 1 P all-reduced, 1.25 P of temporary memory; in two stages 1.12 P scattered, 1 P",
        test="accelerators/test_facts.py::test_a_reduce_scatter_over_a_square_is_still_an_all_reduce",
    ),
    Quirk(
        "_space.collectives.by_slices",
        "A TPU's all-reduce writes its result to a second buffer",
        "a large leaf is reduced slice by slice, each in place",
        "v5e:4x4: 1 P of temporary memory, instead of 0 P",
        test="accelerators/test_facts.py::test_an_all_reduce_of_a_tpu_is_still_not_in_place",
    ),
    Quirk(
        "_space.mapped.over_axes",
        "A `shard_map` over Auto axes all-gathers arguments that are sharded over Explicit axes",
        "the Auto axes become Explicit while it runs",
        "CPU, JAX 0.12",
        test="space/test_sharded.py::test_a_shard_map_beside_explicit_axes_still_gathers",
    ),
    Quirk(
        "_space.mapped.gathered",
        "Inside a `shard_map`, a reduce-scatter fails if other axes of the mesh are Explicit",
        "a nested `shard_map` over those axes",
        "CPU, JAX 0.12: an error while tracing",
        test="space/test_sharded.py::test_a_shard_map_still_scatters_nothing_beside_explicit_axes",
    ),
    Quirk(
        "_space.here.sum_in_place",
        "XLA cannot compile an all-reduce over an axis of one device if other axes shard the array",
        "the library makes none: one device has the whole sum",
        'CPU, JAX 0.12: "Cross-partition allreduce must be in (partial) manual partitioning mode"',
        test="space/test_sharded.py::test_an_all_reduce_of_one_device_is_still_not_partitioned",
    ),
    Quirk(
        "_space.collectives.add_wide",
        "On a CPU, an all-reduce of constant complex numbers, such as for an unused parameter, crashes Python",
        "real and imaginary parts are added separately",
        "JAX 0.12: Check failed: buffer != nullptr; JAX 0.7.2 is right",
        test="space/test_sharded.py::test_an_all_reduce_of_complex_constants_still_ends_python",
    ),
)
