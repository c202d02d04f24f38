"""What fits, before anything is allocated: the fewest micro-batches, asked of the compiler."""
