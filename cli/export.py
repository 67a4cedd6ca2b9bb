"""`lightning-zenflow export CHECKPOINT OUT`: the weights of a checkpoint directory in one file."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from rich.table import Table

from lightning_zenflow import __version__
from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.manifest import Manifest
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from lightning_zenflow.checkpoint.verify import verify
from lightning_zenflow.wording import in_words

from .console import Parser, console, facts, quiet_deepspeed, size
from .export_bars import Bars
from .export_file import (
    Weights,
    client_state,
    collect,
    is_plain,
    own_name,
    replacing,
    write_safetensors,
    write_torch,
)
from .export_place import SAFETENSORS, TORCH_SUFFIXES, Refused, check_arguments, check_place, check_room, unwritten

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DESCRIPTION = """Writes the weights of a checkpoint directory, of ZenFlow or DeepSpeed, into one file: the fp32 masters of
what is trained, frozen weights and buffers.

It takes memory for the weights as they are exported, and for one parameter in fp32. Objects of your own in CHECKPOINT are
built, which runs their code: export only what you trust. For example:
lightning-zenflow export last.ckpt model.safetensors --dtype bf16

Exit code 0: written. 1: OUT could not be written; what was there is untouched. 2: CHECKPOINT or an argument cannot be used.
130: stopped."""

OUT = f"""The file. {", ".join(TORCH_SUFFIXES)}: for load_from_checkpoint, with the hyperparameters. {SAFETENSORS}: the
weights alone, tied ones under the first of their names; the metadata has the others as "tied:NAME": "FIRST NAME". Its
folder is made if need be"""


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand and returns its exit code.

    Args:
        args: Arguments after `export`; `None` takes them from `sys.argv`.
    """
    options = _parser().parse_args(args)
    quiet_deepspeed()
    try:
        with _stoppable():
            notes, summary = _export(options)
    except Refused as error:
        return _failed(str(error), error.code)
    except CheckpointError as error:
        return _failed(str(error), 2)
    except OSError as error:
        return _failed(f"`CHECKPOINT` must be a directory that can be read, got '{options.checkpoint}': {error}.", 2)
    except KeyboardInterrupt:
        return _failed("Stopped. Nothing was written.", 130)
    for note in notes:
        sys.stderr.write(f"warning: {note}\n")
    console().print(summary)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lightning-zenflow export", description=DESCRIPTION)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=str, help="Directory that the Trainer or ModelCheckpoint wrote")
    add("out", metavar="OUT", type=str, help=OUT)
    add("--dtype", type=Literal["fp32", "bf16", "fp16"], default="fp32", help="Of everything that is floating-point")
    add("--bare", action="store_true", help="The state dict alone, for load_state_dict(torch.load(OUT))")
    add("--force", action="store_true", help="Replace OUT if it exists")
    return parser


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code


def _export(options: Namespace) -> tuple[list[str], Table]:
    """Does it; returns what there is to warn of, and the summary."""
    begin = time.perf_counter()
    checkpoint, out, dtype = Path(options.checkpoint), Path(options.out), DTYPES[options.dtype]
    check_arguments(options)
    try:
        check_place(out, checkpoint, options.force)
    except OSError as error:
        raise unwritten(out, error) from error
    manifest = verify(checkpoint)
    stored = StoredCheckpoint.open(checkpoint)
    step = _step(stored, manifest)
    least_nbytes = _least_nbytes(stored, dtype)
    check_room(out, least_nbytes)
    with Bars() as bars:
        weights = collect(stored, dtype, bars.reading(least_nbytes))
        content, notes = _content(options, stored, weights)
        try:
            with replacing(out, force=options.force) as path:
                bars.writing(path.parent, weights.nbytes)
                if content is None:
                    write_safetensors(path, weights, _metadata(options, step))
                else:
                    write_torch(path, content)
        except OSError as error:
            raise unwritten(out, error) from error
        except ValueError as error:
            raise Refused(
                f"`OUT` must be of a format for these weights, got '{out}': {error} Write a .pt.", 1
            ) from error
    return notes, _summary(options, stored, manifest, weights, step, time.perf_counter() - begin)


def _step(stored: StoredCheckpoint, manifest: Manifest | None) -> int:
    """Optimizer steps done: without moments, what the writer noted."""
    noted = manifest.facts.get("step") if manifest is not None else None
    return next(step for step in (stored.step, noted, stored.counters["global_steps"]) if step is not None)


def _least_nbytes(stored: StoredCheckpoint, dtype: torch.dtype) -> int:
    """Bytes of what is certain to be read; frozen weights under ZeRO-3 are put together only when they are read."""
    numel = sum(math.prod(shape) for shape in stored.shapes.values())
    known = [*stored.buffers.values(), *(stored.frozen.values() if isinstance(stored.frozen, dict) else ())]
    nbytes = [tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize) for tensor in known]
    return numel * dtype.itemsize + sum(nbytes)


def _metadata(options: Namespace, step: int) -> dict[str, str]:
    return {"step": str(step), "dtype": options.dtype, "lightning_zenflow": __version__}


def _content(options: Namespace, stored: StoredCheckpoint, weights: Weights) -> tuple[dict[str, Any] | None, list[str]]:
    """What a file of torch holds, `None` for one of safetensors, and what there is to warn of."""
    notes = _overflows(options, weights)
    if Path(options.out).suffix.lower() == SAFETENSORS:
        if weights.others:
            notes.append(f"Left out, since safetensors holds tensors alone: {', '.join(weights.others)}.")
        return None, notes
    content: dict[str, Any] = {**weights.tensors, **weights.others}
    unsafe = [name for name, value in weights.others.items() if not is_plain(value)]
    if not options.bare:
        client = client_state(stored)
        content = {**client.kept, "state_dict": content}
        unsafe = [*client.unsafe, *unsafe]
        if client.left_out:
            notes.append(f"Left out, since only code could build it again: {', '.join(client.left_out)}.")
    if unsafe:
        notes.append(
            f"Kept, though not of plain types: {', '.join(unsafe)}. Loading the file takes `weights_only=False`, and the"
            " code that trained."
        )
    return content, notes


def _overflows(options: Namespace, weights: Weights) -> list[str]:
    if not weights.infinite:
        return []
    count, tensors = sum(weights.infinite.values()), len(weights.infinite)
    remedy = {"fp16": " Export with --dtype bf16 or fp32.", "bf16": " Export with --dtype fp32."}.get(options.dtype, "")
    said = (
        f"{count:,} finite value{'s' if count > 1 else ''} in {tensors} tensor{'s' if tensors > 1 else ''} became infinite"
        f" in {options.dtype}, first in `{next(iter(weights.infinite))}`.{remedy}"
    )
    return [said]


def _summary(
    options: Namespace,
    stored: StoredCheckpoint,
    manifest: Manifest | None,
    weights: Weights,
    step: int,
    secs: float,
) -> Table:
    ranks = f"{stored.world_size} rank{'s' if stored.world_size > 1 else ''}"
    writer = f"lightning-zenflow {manifest.version}" if manifest else f"DeepSpeed {stored.written_by}"
    trained = [weights.tensors[own_name(name)].numel() for name in stored.shapes]
    frozen = [weights.tensors[own_name(name)].numel() for name in stored.frozen]
    rows = [
        ("written", f"{options.out}, {size(Path(options.out).stat().st_size)}"),
        ("from", f"{options.checkpoint}, ZeRO stage {stored.stage}, {ranks}, by {writer}"),
        ("step", f"{step:,}"),
        ("dtype", options.dtype),
        ("trained", f"{len(trained):,} parameters, {sum(trained):,} elements"),
        ("frozen", f"{len(frozen):,} parameters, {sum(frozen):,} elements" if frozen else "none"),
        ("buffers", f"{len(stored.buffers):,}" if stored.buffers else "none"),
        ("tied", ", ".join(f"{name} = {first}" for name, first in weights.tied.items()) or "none"),
        ("took", in_words(secs)),
    ]
    return facts(rows)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Whoever ends the program by SIGTERM or by closing the terminal leaves as little behind as with Ctrl-C."""
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
