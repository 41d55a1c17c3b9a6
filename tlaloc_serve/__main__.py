"""`python3 -m tlaloc_serve`: the command line."""

from tlaloc_serve.app.cli import console

if __name__ == "__main__":
    console()
