"""A loss: its results, how much it counts, and the statistics of its gradients.

`weighing` says how much, `meter` measures.
"""
