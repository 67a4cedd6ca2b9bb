"""Entry point of the script `lightning-zenflow`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_zenflow import __version__

from .console import quiet_deepspeed
from .trainer import ZenFlowCLI

TOOLS = {
    "bench": "Measures ZenFlow on this machine, side by side with what you would pick instead.",
    "doctor": "Tells what this machine can do, and whether ZenFlow will run on it.",
    "estimate": "Tells memory, step time and intervals of a model, before a machine is rented.",
    "export": "Writes the weights of a checkpoint into one file, for load_from_checkpoint or as safetensors.",
    "growth": "Measures how ZenFlow's own cost grows with parameters, tensors, cores and ranks on this machine.",
    "report": "Draws where the time of a recorded run went.",
    "simulate": "Compares ZenFlow with other schedules on a simulated device, beside this machine's real host.",
}
"""Subcommands that train nothing: each is a module of this package with a function `main`."""

DESCRIPTION = """Train Lightning modules whose optimizer state lives in host memory. For example:
lightning-zenflow fit --model my_module.MyModel --trainer.strategy zenflow --zenflow.topk_ratio 0.05
or lightning-zenflow fit --config my.yaml. All settings of a subcommand: lightning-zenflow fit --help"""


class _Command(ZenFlowCLI):
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Lists the tools in `--help` as well; they are called before anything is parsed here."""
        super()._add_subcommands(parser, **kwargs)
        action = parser._subcommands_action
        assert action is not None
        for name, what in TOOLS.items():
            action.add_subcommand(name, LightningArgumentParser(add_help=False), help=what)


def main(args: list[str] | None = None) -> int | None:
    """Runs `lightning-zenflow`.

    Args:
        args: Arguments after the program's name; `None` takes them from `sys.argv`.

    Returns:
        The exit code, where a tool has one of its own; `None` is success.
    """
    quiet_deepspeed()
    # An installed script does not look for modules where the user stands, and `--model my_module.MyModel` is there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    words = sys.argv[1:] if args is None else args
    if words and words[0] in TOOLS:
        return import_module(f".{words[0]}", __package__).main(words[1:])

    _Command(
        parser_kwargs={
            "prog": "lightning-zenflow",
            "description": DESCRIPTION,
            "version": __version__,
        },
        args=args,
    )
    return None
