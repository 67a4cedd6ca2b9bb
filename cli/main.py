"""Entry point of the script `lightning-zenflow`."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from .trainer import ZenFlowCLI

DESCRIPTION = """Train Lightning modules whose optimizer state lives in host memory. For example:
lightning-zenflow fit --model my_module.MyModel --trainer.strategy zenflow --zenflow.topk_ratio 0.05
or lightning-zenflow fit --config my.yaml. All settings of a subcommand: lightning-zenflow fit --help"""


def main(args: list[str] | None = None) -> None:
    """Runs `lightning-zenflow`.

    Args:
        args: Arguments after the program's name; `None` takes them from `sys.argv`.
    """
    # DeepSpeed's one line about it goes to stdout, in front of what --print_config prints for a class path.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    # An installed script does not look for modules where the user stands, and `--model my_module.MyModel` is there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    ZenFlowCLI(
        parser_kwargs={
            "prog": "lightning-zenflow",
            "description": DESCRIPTION,
            "version": version("lightning-zenflow"),
        },
        args=args,
    )
