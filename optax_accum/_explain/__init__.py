"""Reads a traced loss: the lines that take rows together, their cost, the weight of a micro-batch."""
