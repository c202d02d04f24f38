"""Trees, their dtypes and sums, the state, traced programs and what JAX's versions do: every other room stands on it."""
