"""A loss: its results, how much it counts, its one backward pass, and the statistics of its gradients."""
