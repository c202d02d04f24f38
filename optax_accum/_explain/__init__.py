"""What is found in a traced loss: where it takes rows together, what that costs, how much a micro-batch counts."""
