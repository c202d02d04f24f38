"""Trees, their dtypes and sums, the state, traced programs, what versions of JAX do: every other room stands on it."""
