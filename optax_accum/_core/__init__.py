"""Trees, their dtypes, sums, the state, traced programs, JAX versions: every other room stands on it."""
