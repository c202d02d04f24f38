"""What the accumulator and the products beside it share: messages, checks, arrays. It imports neither."""
