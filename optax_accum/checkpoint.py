"""Save and resume a run, also in mid-window.

It may go on in the middle of a window, on another number of devices, in
several processes.
"""

from optax_accum._placement.resume import check_processes, checkpoint_target, redistribute

__all__ = ["check_processes", "checkpoint_target", "redistribute"]
