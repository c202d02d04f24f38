"""The rows of a traced loss: which equations treat them one by one, which take sums of them, which couple them."""
