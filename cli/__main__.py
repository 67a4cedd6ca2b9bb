"""Lets `python -m lightning_zenflow.cli` do what `lightning-zenflow` does."""

from .main import main

if __name__ == "__main__":
    main()
