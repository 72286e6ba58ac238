"""`python -m penstock`, the same as `penstock`."""

from penstock.cli import run

run()
