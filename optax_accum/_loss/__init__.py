"""A loss: what it returns, how much it counts, its one backward pass, and what is measured of its gradients."""
