"""Find the fewest micro-batches that fit in memory.

The compiler reports memory before anything is allocated:

* `fit(step_of_k, *args)`: the step itself, planned from its arguments.
* `optax_accum.plan_microbatches(make_step, global_batch)`: the plan, of any
  step.
* `of_loss(loss, tx, params, batch)`, `of_step(step, state, batch)`: the
  `make_step` of usual steps.
"""

from optax_accum.plan._fitted import Fitted, fit
from optax_accum.plan._plan import NothingFitsError, Plan
from optax_accum.plan._planning import plan_microbatches
from optax_accum.plan._steps import Builder, of_loss, of_step

__all__ = ["Builder", "Fitted", "NothingFitsError", "Plan", "fit", "of_loss", "of_step", "plan_microbatches"]
