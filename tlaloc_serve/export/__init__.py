"""Half one: reads a checkpoint and writes an artifact. Never loads a plugin; half two never imports it."""
