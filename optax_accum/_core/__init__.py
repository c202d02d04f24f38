"""Arithmetic, arguments, state, and the one backward pass: what every other room stands on."""
