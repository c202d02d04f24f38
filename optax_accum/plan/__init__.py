"""Find the fewest micro-batches that fit in memory.

The compiler reports memory before anything is allocated:

* `fit(step_of_k, *args)`: the step itself, planned from its arguments.
* `fit(step_of_k, *args, run=False)`: its plan, from shapes alone, also for
  an accelerator that is not here.
* `of_loss(loss, tx)`: the `step_of_k` of a loss and an optimizer.
"""

from optax_accum.plan._fit import fit
from optax_accum.plan._fitted import Fitted
from optax_accum.plan._plan import NothingFitsError, Plan
from optax_accum.plan._steps import of_loss

__all__ = ["Fitted", "NothingFitsError", "Plan", "fit", "of_loss"]
