"""Serve a compiled language model from a directory and one PJRT plugin, with the standard library only."""
