"""Lets `python -m lightning_zenflow.cli` do what `lightning-zenflow` does."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
