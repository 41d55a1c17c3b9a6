"""Turns an artifact and a client into tokens: pages, schedule, step, pick."""
