"""Whether accumulation changes an update, and why: of a loss, and of anyone's train step."""
