"""Offloaded training on two cores: one plays the accelerator, the other the host.

    python examples/two_core.py                      # all modes, three repeats, ratios
    python examples/two_core.py --stage 3            # the same under ZeRO-3
    python examples/two_core.py --mode zenflow       # one mode in this process

Modes: `compute` (forward and backward alone, the limit), `zero` (DeepSpeed's ZeRO without offload, torch's AdamW),
`zero_offload` (the same with DeepSpeed's CPU Adam, needs a compiler), `ds_zenflow` (DeepSpeed's own ZenFlow, overlapped;
speed only), `zenflow` (this package). A 67 M-parameter MLP, 32 tokens a step, bf16, update interval 4. Run it on an idle
machine and compare ratios of one run only.

Under ZeRO-3 `zenflow` and `zero` are also run under ZeRO-2 (`zenflow_2`, `zero_2`). What DeepSpeed's ZeRO-3 itself adds to
forward and backward is taken from `zero`, and ZenFlow must add no more to that than it adds under ZeRO-2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

MODES = ("compute", "zero_2", "zero", "zero_offload", "ds_zenflow", "zenflow_2", "zenflow")
USUAL_MODES = {
    2: ("compute", "zero_offload", "ds_zenflow", "zenflow"),
    3: ("compute", "zero_2", "zero", "zero_offload", "zenflow_2", "zenflow"),
}
"""What is compared if nothing else is asked for, by stage. DeepSpeed's own ZenFlow asks for CUDA under ZeRO-3."""

WARM_UP_STEPS = 8


def build_model(width: int = 1024, depth: int = 8) -> torch.nn.Sequential:
    blocks = [
        (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)) for _ in range(depth)
    ]
    return torch.nn.Sequential(*[layer for block in blocks for layer in block])


def build_engine(mode: str, model: torch.nn.Module, topk_ratio: float, stage: int) -> Any:
    import deepspeed

    from lightning_zenflow.zero.install import without_compiling

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1"
    )
    with without_compiling():
        deepspeed.init_distributed("gloo", verbose=False)
    zero: dict[str, Any] = {
        "stage": 2 if mode.endswith("_2") else stage,
        "reduce_bucket_size": 20_000_000,
        "allgather_bucket_size": 20_000_000,
    }
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    if mode.startswith("zenflow"):
        from lightning_zenflow import ZenFlowConfig, ds_config
        from lightning_zenflow.optimizer import ZenFlowAdamW
        from lightning_zenflow.zero.install import installed
        from lightning_zenflow.zero.settings import RunSettings

        settings = ZenFlowConfig(
            topk_ratio=topk_ratio, select_strategy="step", select_interval=1000, update_interval=4, worker_cores=[1]
        )
        ds_config.complete(config)
        optimizer = ZenFlowAdamW(model.parameters(), lr=1e-5)
        with installed(RunSettings(settings, 1000, worker_cores=[1])):
            return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    if mode in ("zero", "zero_2"):
        config["optimizer"]["params"]["torch_adam"] = True
    else:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if mode == "ds_zenflow":
        zero["zenflow"] = {
            "topk_ratio": topk_ratio,
            "select_strategy": "step",
            "select_interval": 1000,
            "update_interval": 4,
            "overlap_step": True,
            "full_warm_up_rounds": 0,
        }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def measure(mode: str, tokens: int, steps: int, topk_ratio: float, stage: int = 2) -> dict[str, float]:
    """Step times of one mode, in milliseconds, without the first eight steps.

    `passes` is the mean of forward and backward alone.
    """
    torch.set_num_threads(1)
    if mode.startswith("zenflow"):
        os.sched_setaffinity(
            0, {0}
        )  # core 0 plays the accelerator, core 1 the host, as DeepSpeed's ZenFlow does itself
    torch.manual_seed(0)
    model = build_model()
    engine: Any = model.bfloat16() if mode == "compute" else build_engine(mode, model, topk_ratio, stage)
    x = torch.randn(tokens, 1024).bfloat16()
    times, passes, stalls = [], [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = engine(x).float().pow(2).mean()
        if mode == "compute":
            model.zero_grad(set_to_none=True)
            loss.backward()
        else:
            engine.backward(loss)
        passes.append(1e3 * (time.perf_counter() - start))
        if mode != "compute":
            engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        if mode.startswith("zenflow"):
            stalls.append(1e3 * engine.optimizer.shard.stats.update_stall_secs)
    if mode == "ds_zenflow":
        engine.optimizer.process.kill()
    if mode.startswith("zenflow"):
        engine.destroy()
    counted = times[WARM_UP_STEPS:]
    median = statistics.median(counted)
    stall = statistics.fmean(stalls[WARM_UP_STEPS:]) if stalls else 0.0
    return {
        "mean": statistics.fmean(counted),
        "median": median,
        "max_to_median": max(counted) / median,
        "stall": stall,
        "passes": statistics.fmean(passes[WARM_UP_STEPS:]),
    }


def compare(modes: list[str], repeats: int, arguments: list[str]) -> dict[str, dict[str, float]]:
    """Runs every mode in a process of its own, in turn, and takes medians over the repeats."""
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for _ in range(repeats):
        for mode in modes:
            command = [sys.executable, __file__, "--mode", mode, "--json", *arguments]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            if done.returncode:
                raise RuntimeError(f"mode {mode} failed:\n{done.stderr[-3000:]}")
            runs[mode].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {
        mode: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for mode, results in runs.items()
    }


def overhead_of_stage_3(table: dict[str, dict[str, float]]) -> str | None:
    """Whether ZenFlow adds no more to ZeRO-3 than to ZeRO-2, in words; `None` without the modes that tell."""
    if not {"compute", "zero_2", "zero", "zenflow_2", "zenflow"} <= table.keys():
        return None
    compute = table["compute"]["mean"]
    ours, under_2 = table["zenflow"]["mean"] - compute, table["zenflow_2"]["mean"] - compute
    own = table["zero"]["passes"] - compute
    verdict = "no more than" if ours <= under_2 + own else "MORE THAN"
    return (
        f"Beyond compute, a step of ZenFlow takes {ours:.0f} ms under ZeRO-3: {verdict} the {under_2 + own:.0f} ms of its"
        f" {under_2:.0f} ms under ZeRO-2 and the {own:.0f} ms that DeepSpeed's ZeRO-3 adds to forward and backward (of which"
        f" {table['zero']['passes'] - table['zero_2']['passes']:.0f} ms more than its ZeRO-2)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help="measure one mode in this process")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="modes to compare")
    parser.add_argument("--stage", type=int, choices=USUAL_MODES, default=2, help="ZeRO stage")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    if args.mode:
        result = measure(args.mode, args.tokens, args.steps, args.topk_ratio, args.stage)
        print(json.dumps(result) if args.json else result, flush=True)
        return
    passed_on = ["--tokens", str(args.tokens), "--steps", str(args.steps), "--topk-ratio", str(args.topk_ratio)]
    passed_on += ["--stage", str(args.stage)]
    table = compare(args.modes or list(USUAL_MODES[args.stage]), args.repeats, passed_on)
    ours = table.get("zenflow", {}).get("mean")
    print(f"{'mode':14}{'mean ms':>9}{'median ms':>11}{'max/median':>12}{'stall ms':>10}{'to zenflow':>12}")
    for mode, row in table.items():
        ratio = f"{row['mean'] / ours:.2f}x" if ours else ""
        print(
            f"{mode:14}{row['mean']:9.0f}{row['median']:11.0f}{row['max_to_median']:12.2f}{row['stall']:10.1f}{ratio:>12}"
        )
    overhead = overhead_of_stage_3(table) if args.stage == 3 else None
    if overhead:
        print(overhead)


if __name__ == "__main__":
    main()
