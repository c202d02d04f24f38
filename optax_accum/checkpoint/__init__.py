"""Save and resume a run, even in mid-window.

A resumed run may have another number of devices, or several processes.
"""

from optax_accum.checkpoint._resume import check_processes, checkpoint_target, redistribute

__all__ = ["check_processes", "checkpoint_target", "redistribute"]
