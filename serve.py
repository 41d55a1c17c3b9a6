#!/usr/bin/env python3
"""Serve an artifact: the command line of tlaloc_serve from a checkout, with nothing installed."""

from tlaloc_serve.app.cli import console

if __name__ == "__main__":
    console()
