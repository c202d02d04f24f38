"""What looks at losses and programs: verify, compiled collectives, batches, checkpoints."""
