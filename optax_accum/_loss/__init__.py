"""A loss: its results, how much it counts, its one backward pass, and the statistics of its gradients.

`weighing` says how much, `backward` differentiates, `_core/adding` adds gradients inside the backward pass, `meter`
measures them.
"""
