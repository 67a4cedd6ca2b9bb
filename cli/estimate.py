"""`lightning-zenflow estimate MODEL`: memory, step time and intervals, before anybody rents a machine."""

from __future__ import annotations

import json
import reprlib
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from lightning_zenflow.config import MAX_UPDATE_INTERVAL_STEPS
from lightning_zenflow.work import Work

from .console import Parser, quiet_deepspeed, write
from .estimate_config import FAMILIES
from .estimate_view import as_dict, show
from .estimation import Estimate, estimate
from .machine import DTYPES, Given, by_name, here
from .presets import LINK_RATIO, MEMORY_RATIO, UTILISATION_RATIO, PresetName
from .sizes import size_of

DESCRIPTION = f"""What a model takes with ZenFlow, with DeepSpeed's ZeRO-Offload, and with AdamW on the device.

Rates are measured on this machine in some 8 seconds, or those of a --preset: data sheet peaks, of which
{UTILISATION_RATIO:.0%} count for compute, {LINK_RATIO:.0%} for the link and {MEMORY_RATIO:.0%} for memory. For example:
lightning-zenflow estimate 7B --preset h100 --batch-tokens 8192"""

MOST = {"devices": 10**6, "batch_tokens": 10**12, "update_interval": MAX_UPDATE_INTERVAL_STEPS, "cores": 10**4}
"""Far above every machine and run there is; what is larger is a slip, and formulas in floats need not bear it."""

RATES, LEAST_RATE, MOST_RATE = ("device_flops", "link_bandwidth", "host_bandwidth"), 1e3, 1e21
"""Whoever means GB/s and leaves out the e9 is told so."""


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand and returns the exit code 0; an argument that is refused ends the program with 2.

    Args:
        args: Arguments after `estimate`; `None` takes them from `sys.argv`.
    """
    quiet_deepspeed()
    parser = _parser()
    options = parser.parse_args(args)
    try:
        found = _estimate(options)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        write(json.dumps(as_dict(found), indent=2, allow_nan=False) + "\n")
    else:
        show(found)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lightning-zenflow estimate", description=DESCRIPTION)
    add = parser.add_argument
    model = f"Number of parameters (7e9, 7B, 350M), Hugging Face config.json ({', '.join(FAMILIES)}), or class path"
    add("model", type=str, help=model)
    add("--model-args", type=dict[str, Any], default={}, help="Arguments of the class, as JSON")
    add("--devices", type=PositiveInt, default=1, help="Devices, each with a rank of its own")
    add("--stage", type=Literal[2, 3], default=2, help="ZeRO stage: 3 cuts the weights over the devices as well")
    add("--offload-parameters", action="store_true", help="With --stage 3: weights lie in host memory between two uses")
    tokens = "Tokens per device and optimizer step, over all its micro-batches"
    add("--batch-tokens", type=PositiveInt, default=4096, help=tokens)
    add("--accumulate-grad-batches", type=PositiveInt, default=1, help="Micro-batches of an optimizer step")
    add("--checkpointing", action="store_true", help="Backward computes the forward pass again")
    add("--precision", type=Literal["bf16", "fp16", "fp32"], default="bf16", help="Of weights and gradients")
    add("--topk-ratio", type=ClosedUnitInterval, default=0.1, help="Share of each matrix's columns on the device")
    moments = "What the host keeps moments in: bf16 takes 4 bytes less per parameter; times are those of fp32"
    add("--moments", type=Literal["fp32", "bf16"], default="fp32", help=moments)
    interval = "Steps in which every deferred element is updated once; default: the fewest with which the host keeps up"
    add("--update-interval", type=PositiveInt | None, help=interval)
    add("--preset", type=PresetName, default="here", help="This machine, measured, or another one by name")
    add("--device-flops", type=PositiveFloat | None, help="FLOP/s of forward and backward, as achieved")
    add("--link-bandwidth", type=PositiveFloat | None, help="Host to device, bytes/s per direction, as achieved")
    add("--host-bandwidth", type=PositiveFloat | None, help="Host memory for one rank, bytes/s, as achieved")
    add("--cores", type=PositiveInt | None, help="Cores of each rank's background process")
    add("--json", action="store_true", help="Print JSON, in seconds and bytes")
    return parser


def _check_ranges(options: Namespace) -> None:
    for name, most in MOST.items():
        value = options[name]
        if value is not None and value > most:
            raise ValueError(f"{_written(name)} must be at most {most}, got {reprlib.repr(value)}. Give a smaller one.")
    if options.accumulate_grad_batches > options.batch_tokens:
        raise ValueError(
            f"`--accumulate-grad-batches` must be at most `--batch-tokens` {options.batch_tokens}, got"
            f" {reprlib.repr(options.accumulate_grad_batches)}. Give the tokens of all micro-batches together."
        )
    if options.offload_parameters and options.stage != 3:
        raise ValueError(
            f"`--offload-parameters` must be left out with `--stage` {options.stage}, which keeps all weights on every device."
            " Give --stage 3."
        )
    for name in RATES:
        rate = options[name]
        if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
            unit = "FLOP/s" if name == "device_flops" else "bytes/s"
            raise ValueError(
                f"{_written(name)} must be from {LEAST_RATE:.0e} to {MOST_RATE:.0e} {unit}, got {rate:g}. Write for example"
                " 2e10."
            )


def _written(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _estimate(options: Namespace) -> Estimate:
    _check_ranges(options)
    size = size_of(options.model, options.model_args)
    work = Work(
        numel=size.numel,
        selected_numel=size.selected_numel(options.topk_ratio),
        tokens=options.batch_tokens,
        ranks=options.devices,
        wire_bytes=DTYPES[options.precision].itemsize,
        micro_batches=options.accumulate_grad_batches,
        checkpointing=options.checkpointing,
        largest_numel=size.largest_numel,
        columns=size.columns,
        stage=options.stage,
        offload_parameters=options.offload_parameters,
    )
    given = Given(options.device_flops, options.link_bandwidth, options.host_bandwidth)
    if options.preset == "here":
        tokens = max(1, work.tokens // work.micro_batches)
        machine = here(tokens, options.precision, options.topk_ratio, work.ranks, options.cores, given)
    else:
        machine = by_name(options.preset, options.precision, options.cores, given)
    return estimate(
        size, work, options.precision, options.topk_ratio, machine, options.update_interval, options.moments
    )
