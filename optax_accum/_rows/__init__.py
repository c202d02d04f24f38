"""The rows of a traced loss: which equations treat them one by one, which take sums of them, which couple them.

A loss is traced for n rows and for 2 n (for n / 2 where it raises for 2 n). **An axis of rows is an axis that is cut
into equal, contiguous blocks, one for each unit of the batch; block u belongs to unit u.** The type says a position,
not a meaning: two values may be combined entry by entry because both are cut by position. A value without such an axis
is the same for all micro-batches. One that grows along several axes, or not in proportion to the rows, is coupled:
nothing may cut it. A value has one type, where it is made and wherever it is taken: else the two traces are other
programs.

What an equation takes *and makes* decides its kind, and with it where it runs:

|            | takes rows                              | takes none                                             |
|------------|-----------------------------------------|--------------------------------------------------------|
| makes rows | LOCAL if a rule proves it, else WHOLE   | LOCAL if they can be made again by position, else MADE |
| makes none | PARTIAL if a rule proves it, else WHOLE | NO_ROWS                                                |

Let cut(v) be the blocks of a value that belong to some units, or the value itself if it has no rows. Then

* LOCAL, `tanh(x)`: f(cut(operands)) = cut(f(operands)), and the same for its derivative;
* PARTIAL, `sum(x, 0)`: the results for the parts of the batch, joined, are the result for the batch;
* MADE, `params[:n]`: runs as it is for n rows; each micro-batch takes the rows at its own places;
* WHOLE, `sort(x, 0)`, and NO_ROWS, `params ** 2`: run as they are. What the counter of a loop over layers decides is
  LOCAL: each micro-batch has the same one.

Loops over micro-batches have LOCAL equations alone, and take rows only as the cut of a whole array. Inside a body (of a
checkpoint, a scan over layers), equations that neither take nor make rows run as they are; a body that sees one row (of
a map over rows) must be the same program in both traces. So each value in a loop is the cut of the whole value, and by
the adjoint of the cut gradients add up: the engine is right if each LOCAL and PARTIAL rule is, and each rule is tested
alone (`tests/rows/test_primitives.py`).

What two traces do not tell is not divided: where they differ (`pairing`) the equations for n rows run as one; with
mutable arrays, or where a loss looks at values, all rows run at once (`_within/traced_call.py`).

`registry` has a row for each primitive, `jax_primitives` those of JAX, `locality` programs inside equations. `leveling`
decides kinds and divides a program into loops (`levels`). `denominators` tells what its sums over rows are divided by:
a count, or a function of one (`functions`).
"""

from optax_accum._rows import equinox as equinox
from optax_accum._rows import jax_primitives as jax_primitives
from optax_accum._rows import locality as locality
