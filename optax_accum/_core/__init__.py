"""Trees, their dtypes, sums, the state, traced programs, JAX versions: every room of the accumulator stands on it.

`versions` says which JAX this is and what an older one lacks, `compilers` what compilers do differently, `traced` what
is known of a traced function.
"""
