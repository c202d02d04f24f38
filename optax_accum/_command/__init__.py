"""The command line: arguments in, text out. Computes nothing."""
