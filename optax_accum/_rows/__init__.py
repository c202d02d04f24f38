"""The rows of a traced loss: which equations treat them one by one, which take sums of them, which couple them.

`primitives` and `locality` judge one equation, `leveling` divides a program into loops over micro-batches (`levels`),
`denominators` tells what its sums over rows are divided by.
"""
