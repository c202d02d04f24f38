"""`explain`, and weights across calls: the lines of a traced loss that take rows together, and what they cost."""
