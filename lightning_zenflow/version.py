"""The version, where what imports neither Lightning nor torch finds it too."""

__version__ = "0.1.0"
