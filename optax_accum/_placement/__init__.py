"""Where a state lives, and how it moves: its shardings, and runs that go on elsewhere."""
