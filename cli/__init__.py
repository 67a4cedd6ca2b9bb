"""Command line `lightning-zenflow`: Lightning's own subcommands, with ZenFlow's settings beside them."""

from .main import main
from .trainer import ZenFlowCLI

__all__ = ["ZenFlowCLI", "main"]
