"""`StoredCheckpoint` on real checkpoints of plain DeepSpeed, compared with its memory and with `zero_to_fp32`."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.layouts import partitioned
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from tests.conftest import _RANK_PROGRAM, REPO, _free_port, _join, _kill, _rank_environment
from tests.plain_checkpoints import BETAS, CASES, CLIENT_STATE, GROUPS, RATES, Net

# Three interpreters write the checkpoints first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
# On one rank only those in which something is stored differently there.
WRITTEN = {1: [name for name in CASES if name.endswith(("fp32", "bf16", "aligned", "sub-groups", "0"))], 2: list(CASES)}
ZERO_CASES = [(ranks, name) for ranks, names in WRITTEN.items() for name in names if name != "0"]
FIRST, SECOND = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
MODEL = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Saved:
    """A checkpoint and what was in memory when it was written."""

    path: Path
    memory: dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Saved]:
    folders = {ranks: tmp_path_factory.mktemp(f"{ranks}-ranks") for ranks in WRITTEN}
    processes: dict[int, list[subprocess.Popen[bytes]]] = {ranks: [] for ranks in WRITTEN}
    try:
        for ranks, folder in folders.items():
            port = _free_port()
            processes[ranks] = [_start(rank, ranks, port, folder) for rank in range(ranks)]
        for ranks, folder in folders.items():
            _join(processes[ranks], folder, 120)
    finally:
        for process in chain.from_iterable(processes.values()):
            if process.poll() is None:
                _kill(psutil.Process(process.pid))
            process.wait(5)
    found: dict[tuple[int, str], Saved] = {}
    for ranks, folder in folders.items():
        memory = torch.load(folder / "0.pt", weights_only=False)
        found |= {(ranks, name): Saved(folder / name.replace(" ", "_"), memory[name]) for name in WRITTEN[ranks]}
    return found


def _start(rank: int, world_size: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    arguments = json.dumps({"folder": str(folder), "names": WRITTEN[world_size]})
    command = [
        sys.executable,
        "-c",
        _RANK_PROGRAM,
        "tests.plain_checkpoints:write",
        arguments,
        str(folder / f"{rank}.pt"),
    ]
    environment = {**os.environ, **_rank_environment(rank, world_size, port)}
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)


@pytest.fixture
def copied(saved: dict[tuple[int, str], Saved], tmp_path: Path) -> Callable[[int, str], Path]:
    """A function that copies a checkpoint to where a test may damage it."""

    def copy(ranks: int, name: str) -> Path:
        return Path(shutil.copytree(saved[ranks, name].path, tmp_path / "run.ckpt"))

    return copy


def change(path: Path, edit: Callable[[dict[str, Any]], Any], **options: Any) -> None:
    """Writes the dict in the file anew after `edit`."""
    stored = torch.load(path, weights_only=False)
    edit(stored)
    torch.save(stored, path, **options)


def differing(checkpoint: StoredCheckpoint, memory: dict[str, Any]) -> list[tuple[str, str]]:
    expected = ((kind, name, tensor) for kind in KINDS for name, tensor in memory[kind].items())
    return [
        (kind, name)
        for kind, name, tensor in expected
        if not torch.equal(checkpoint.read(name, kind), tensor.flatten())
    ]


# -- values ------------------------------------------------------------------------------------------------------------


# In round-robin order DeepSpeed itself reports them at the wrong places: that case is compared with another run below.
@pytest.mark.parametrize(("ranks", "name"), [case for case in ZERO_CASES if case != (2, "2 round robin")])
def test_masters_and_moments_are_those_that_the_optimizer_had(saved, ranks, name):
    case = saved[ranks, name]
    assert set(case.memory["fp32"]) == {name for group in GROUPS for name in group}
    assert not differing(StoredCheckpoint.open(case.path, weights_only=True), case.memory)


def test_with_round_robin_order_the_numbers_are_those_of_the_run_in_plain_order(saved):
    checkpoint, memory = StoredCheckpoint.open(saved[2, "2 round robin"].path), saved[2, "2 fp32"].memory
    assert checkpoint.groups[0] != GROUPS[0]
    assert sorted(checkpoint.groups[0]) == sorted(GROUPS[0])
    for kind in KINDS:
        for name, tensor in memory[kind].items():
            torch.testing.assert_close(checkpoint.read(name, kind), tensor.flatten(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("ranks", "name"), [case for case in ZERO_CASES if case[1] != "1 fp32 gradients"])
def test_the_state_dict_is_that_of_zero_to_fp32_and_has_frozen_weights_in_stage_1_too(saved, ranks, name):
    case = saved[ranks, name]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        expected = get_fp32_state_dict_from_zero_checkpoint(str(case.path))
    found = dict(StoredCheckpoint.open(case.path).state_dict())
    frozen = {"frozen.weight", "frozen.bias"}
    assert found.keys() - expected.keys() == (frozen if name.startswith("1") else set())
    assert not expected.keys() - found.keys()
    for name_, tensor in expected.items():
        assert torch.equal(found[name_], tensor.float() if tensor.is_floating_point() else tensor), name_
        assert found[name_].shape == tensor.shape
    for name_ in frozen & found.keys():
        assert torch.equal(found[name_], case.memory["module"][name_].float())


@pytest.mark.parametrize(("ranks", "name"), [(2, "1 fp16"), (2, "2 bf16"), (2, "2 aligned"), (2, "3 many sub-groups")])
def test_slices_that_begin_and_end_anywhere_are_parts_of_the_whole(saved, ranks, name):
    case = saved[ranks, name]
    checkpoint = StoredCheckpoint.open(case.path)
    for kind in KINDS:
        for parameter in ("up.weight", "down.weight", "norm.bias"):
            whole = case.memory[kind][parameter].flatten()
            for start in range(whole.numel() + 1):
                assert torch.equal(checkpoint.read(parameter, kind, start), whole[start:])
                for numel in {0, 1, (whole.numel() - start) // 2}:
                    if start + numel <= whole.numel():
                        assert torch.equal(checkpoint.read(parameter, kind, start, numel), whole[start : start + numel])


@pytest.mark.parametrize(("ranks", "name"), [(2, "1 bf16"), (2, "2 fp16"), (2, "3 bf16")])
def test_the_state_dict_loads_into_the_module_with_tied_weights_as_one(saved, ranks, name):
    case = saved[ranks, name]
    checkpoint = StoredCheckpoint.open(case.path)
    found = dict(checkpoint.state_dict())
    assert list(found) == list(Net().state_dict())
    assert found["head.weight"] is found["tokens.weight"]
    assert checkpoint.shared == {"head.weight": "tokens.weight"}
    assert torch.equal(checkpoint.read("head.weight", "exp_avg"), checkpoint.read("tokens.weight", "exp_avg"))
    Net().load_state_dict(found, strict=True)
    assert found["batches.num_batches_tracked"].dtype == torch.int64
    assert found["batches.num_batches_tracked"] == 4
    assert torch.equal(found["batches.running_var"], case.memory["module"]["batches.running_var"].float())
    assert {tensor.dtype for name, tensor in found.items() if "tracked" not in name} == {torch.float32}


def test_the_state_dict_comes_in_the_dtype_that_is_asked_for(saved):
    checkpoint = StoredCheckpoint.open(saved[2, "2 fp32"].path)
    whole, half = dict(checkpoint.state_dict()), dict(checkpoint.state_dict(torch.bfloat16))
    assert half["batches.num_batches_tracked"].dtype == torch.int64
    for name in ("up.weight", "frozen.weight", "batches.running_var"):
        assert torch.equal(half[name], whole[name].bfloat16())
    assert half["head.weight"] is half["tokens.weight"]


@pytest.mark.parametrize(("ranks", "name"), [(2, "2 bf16"), (2, "3 bf16"), (1, "3 bf16")])
def test_frozen_weights_are_read_but_have_no_moments(saved, ranks, name):
    checkpoint, memory = StoredCheckpoint.open(saved[ranks, name].path), saved[ranks, name].memory["module"]
    assert set(checkpoint.frozen) == {"frozen.weight", "frozen.bias"}
    assert checkpoint.frozen["frozen.weight"].dtype == torch.bfloat16
    assert torch.equal(checkpoint.frozen["frozen.weight"], memory["frozen.weight"])
    assert torch.equal(checkpoint.read("frozen.weight", "fp32", 5, 20), memory["frozen.weight"].float().flatten()[5:25])
    with pytest.raises(CheckpointError, match=r"`kind` must be one that is stored, got 'exp_avg' of `frozen.weight`"):
        checkpoint.read("frozen.weight", "exp_avg")


def test_the_module_is_stored_as_it_was_and_under_zero_3_without_placeholders(saved):
    checkpoint, memory = StoredCheckpoint.open(saved[2, "2 bf16"].path), saved[2, "2 bf16"].memory["module"]
    assert list(checkpoint.module) == list(memory)
    for name, tensor in memory.items():
        assert checkpoint.module[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.module[name], tensor)
    partitioned = StoredCheckpoint.open(saved[2, "3 bf16"].path)
    assert (
        set(partitioned.module) == set(partitioned.buffers) == {name for name in memory if name.startswith("batches")}
    )


def flattened(
    groups: list[dict[str, torch.Tensor]], paddings: list[list[int]], world_size: int, lean: bool
) -> list[list[torch.Tensor]]:
    """By rank and group, what ZeRO-1 and 2 keep: the last ranks hold padding, which is stored or not."""
    ranks: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    for named, padding in zip(groups, paddings, strict=True):
        parts = [
            torch.cat([named[name].flatten(), torch.full((pad,), -1.0)])
            for name, pad in zip(named, padding, strict=True)
        ]
        flat = torch.cat(parts)
        whole = torch.cat([flat, torch.full((-flat.numel() % (2 * world_size),), -2.0)])
        size = whole.numel() // world_size
        for rank in range(world_size):
            end = min((rank + 1) * size, flat.numel()) if lean else (rank + 1) * size
            ranks[rank].append(whole[rank * size : max(end, rank * size)].clone())
    return ranks


def evenly(groups: list[dict[str, torch.Tensor]], world_size: int) -> list[list[torch.Tensor]]:
    """By rank and sub-group, what ZeRO-3 keeps."""
    ranks: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    for named in groups:
        parts = [torch.cat([t.flatten(), torch.full((-t.numel() % world_size,), -1.0)]) for t in named.values()]
        for rank in range(world_size):
            ranks[rank].append(torch.cat([part.view(world_size, -1)[rank] for part in parts]))
    return ranks


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 16])
def test_parameters_are_found_over_any_number_of_ranks(stage, world_size):
    generator = random.Random(world_size)
    for _ in range(20):
        groups: list[dict[str, torch.Tensor]] = []
        for group in range(generator.randint(1, 3)):
            shapes = [
                [generator.randint(1, 9) for _ in range(generator.randint(0, 3))]
                for _ in range(generator.randint(1, 6))
            ]
            groups.append({f"{group}.{index}": torch.rand(shape) for index, shape in enumerate(shapes)})
        moments = [{name: tensor + 1 for name, tensor in named.items()} for named in groups]
        paddings = [[generator.randint(0, 3) for _ in named] for named in groups]
        lean = generator.random() < 0.5
        if stage == 3:
            masters, first = evenly(groups, world_size), evenly(moments, world_size)
        else:
            masters = flattened(groups, paddings, world_size, lean)
            first = flattened(moments, paddings, world_size, lean=False)
        files = []
        for rank in range(world_size):
            state = {index: {"step": 2, "exp_avg": t, "exp_avg_sq": 2 * t} for index, t in enumerate(first[rank])}
            base = {"state": state, "param_groups": [{"params": [index]} for index in state]}
            shared = {"zero_stage": stage, "partition_count": [world_size] * len(groups)}
            if stage == 3:
                files.append({**shared, "fp32_flat_groups": masters[rank], "optimizer_state_dict": base})
            else:
                partition = {"single_partition_of_fp32_groups": masters[rank], "param_alignment_paddings": paddings}
                files.append({**shared, **partition, "base_optimizer_state": base})
        layout, facts = partitioned([{name: tuple(t.shape) for name, t in named.items()} for named in groups], files)
        assert (facts.step, facts.world_size, layout.has_moments) == (2, world_size, True)
        for name, tensor in (item for named in groups for item in named.items()):
            flat = tensor.flatten()
            for kind, expected in (("fp32", flat), ("exp_avg", flat + 1), ("exp_avg_sq", 2 * (flat + 1))):
                start = generator.randrange(flat.numel())
                out = torch.full((generator.randint(0, flat.numel() - start),), torch.nan)
                layout.copy(name, kind, start, out)
                assert torch.equal(out, expected[start : start + out.numel()])


# -- facts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "name"), ZERO_CASES)
def test_everything_that_is_stored_once_is_found(saved, ranks, name):
    checkpoint, memory = StoredCheckpoint.open(saved[ranks, name].path), saved[ranks, name].memory
    trained = name != "2 before the first step"
    assert (checkpoint.stage, checkpoint.world_size) == (int(name[0]), ranks)
    assert (checkpoint.step, checkpoint.has_moments) == ((4, True) if trained else (None, False))
    assert checkpoint.counters == memory["counters"]
    assert checkpoint.counters["global_samples"] == (4 * 8 * ranks if trained else 0)
    assert checkpoint.written_by == deepspeed.__version__
    assert checkpoint.client_state == CLIENT_STATE
    if not name.endswith("round robin"):
        assert checkpoint.groups == GROUPS
    assert list(checkpoint.shapes) == [parameter for group in checkpoint.groups for parameter in group]
    parameters = dict(Net().named_parameters())
    assert checkpoint.shapes == {parameter: tuple(parameters[parameter].shape) for parameter in checkpoint.shapes}
    if name == "2 elastic":  # DeepSpeed leaves them out
        assert checkpoint.param_groups == [{}, {}]
    else:
        assert [group["lr"] for group in checkpoint.param_groups] == list(RATES)
        assert [tuple(group["betas"]) for group in checkpoint.param_groups] == list(BETAS)
        assert all("params" not in group for group in checkpoint.param_groups)


@pytest.mark.parametrize(("ranks", "name"), ZERO_CASES)
def test_the_loss_scale_is_plain_numbers_or_none_where_it_is_always_one(saved, ranks, name):
    checkpoint, memory = StoredCheckpoint.open(saved[ranks, name].path), saved[ranks, name].memory
    if "fp16" in name or name == "2 static scale":
        assert checkpoint.loss_scaler == memory["scaler"]
        assert memory["scaler"]["cur_scale"] == (64.0 if name == "2 static scale" else 512.0)
    else:
        assert checkpoint.loss_scaler is None


def test_no_moments_are_claimed_before_the_first_step_but_masters_are_read(saved):
    case = saved[2, "2 before the first step"]
    checkpoint = StoredCheckpoint.open(case.path)
    assert torch.equal(checkpoint.read("up.weight", "fp32"), case.memory["fp32"]["up.weight"].flatten())
    with pytest.raises(CheckpointError, match=r"got 'exp_avg_sq' of `up.weight`.*before the first step"):
        checkpoint.read("up.weight", "exp_avg_sq")


def as_cpu_adam(stored: dict[str, Any]) -> None:
    for state in stored["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = int(state["step"])


def as_fused_adam(stored: dict[str, Any]) -> None:
    base = stored["optimizer_state_dict"]["base_optimizer_state"]
    for state, group in zip(base["state"].values(), base["param_groups"], strict=True):
        group["step"] = int(state.pop("step"))


def as_tensor_rate(stored: dict[str, Any]) -> None:
    for group in stored["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["lr"] = torch.tensor(group["lr"])


def as_without_paddings_told(stored: dict[str, Any]) -> None:
    del stored["optimizer_state_dict"]["param_alignment_paddings"]


@pytest.mark.parametrize("edit", [as_cpu_adam, as_fused_adam, as_tensor_rate, as_without_paddings_told])
def test_other_optimizers_and_versions_keep_the_same_numbers_in_other_places(saved, copied, edit):
    path = copied(2, "2 fp32")
    for file in (FIRST, SECOND):
        change(path / "checkpoint" / file, edit)
    checkpoint = StoredCheckpoint.open(path, weights_only=True)
    assert not differing(checkpoint, saved[2, "2 fp32"].memory)
    assert type(checkpoint.step) is int
    assert checkpoint.step == 4
    assert [group["lr"] for group in checkpoint.param_groups] == pytest.approx(RATES)
    assert type(checkpoint.param_groups[0]["lr"]) is float


def test_the_step_is_that_of_the_group_that_has_done_most(copied):
    path = copied(2, "2 fp32")

    def edit(stored: dict[str, Any]) -> None:
        stored["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = torch.tensor(1.0)

    for file in (FIRST, SECOND):
        change(path / "checkpoint" / file, edit)
    assert StoredCheckpoint.open(path).step == 4


# -- other directories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["2 bf16", "3 many sub-groups", "1 fp32", "2 aligned"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_universal_checkpoint_has_the_same_numbers(saved, tmp_path, ranks, name):
    case = saved[ranks, name]
    folder = tmp_path / "universal" / "step4"
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(case.path / "checkpoint"),
                output_folder=str(folder),
                inject_missing_state=True,
                **arguments,
            )
        )
    for path in (folder.parent, folder):
        checkpoint = StoredCheckpoint.open(path, weights_only=True)
        assert not differing(checkpoint, case.memory)
        assert (checkpoint.stage, checkpoint.world_size, checkpoint.step) == (int(name[0]), ranks, 4)
        assert checkpoint.has_moments
        assert checkpoint.groups == GROUPS
        assert [group["lr"] for group in checkpoint.param_groups] == list(RATES)
    assert torch.equal(
        checkpoint.read("up.weight", "exp_avg", 7, 30), case.memory["exp_avg"]["up.weight"].flatten()[7:37]
    )
    plain = dict(StoredCheckpoint.open(case.path).state_dict())
    found = dict(checkpoint.state_dict())
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    (folder / "zero" / "up.bias" / "exp_avg.pt").unlink()
    assert not StoredCheckpoint.open(folder).has_moments
    (folder / "zero" / "up.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"must hold `fp32.pt` of 6 parameters, got 5: `up.bias` is missing"):
        StoredCheckpoint.open(folder)


@pytest.mark.parametrize(("name", "stage"), [("1 bf16", 1), ("2 bf16", 2)])
def test_without_the_optimizers_files_the_weights_are_the_models(saved, copied, name, stage):
    path = copied(2, name)
    for file in path.glob("checkpoint/*_optim_states.pt"):
        file.unlink()
    checkpoint, module = StoredCheckpoint.open(path), saved[2, name].memory["module"]
    assert (checkpoint.stage, checkpoint.world_size, checkpoint.step) == (stage, 2, None)
    assert (checkpoint.has_moments, checkpoint.groups, checkpoint.param_groups) == (False, GROUPS, [{}, {}])
    assert torch.equal(checkpoint.read("up.weight", "fp32", 3, 9), module["up.weight"].float().flatten()[3:12])
    found = dict(checkpoint.state_dict())
    assert found["head.weight"] is found["tokens.weight"]
    for key, tensor in module.items():
        assert torch.equal(found[key], tensor.float() if tensor.is_floating_point() else tensor)
    with pytest.raises(CheckpointError, match=r"got 'exp_avg' of `up.weight`.*without the optimizer"):
        checkpoint.read("up.weight", "exp_avg")


def test_without_the_optimizers_files_zero_3_has_no_weights(copied):
    path = copied(2, "3 fp32")
    for file in path.glob("checkpoint/*_optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"must hold the optimizer's files, got none of them. Under ZeRO-3"):
        StoredCheckpoint.open(path)


def test_a_save_by_an_engine_that_only_evaluated_has_all_its_weights(saved, copied):
    path = copied(1, "2 fp32")
    (path / "checkpoint" / FIRST).unlink()
    nothing = dict.fromkeys(["param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"])
    change(path / "checkpoint" / MODEL, lambda stored: stored.update(nothing))
    checkpoint, module = StoredCheckpoint.open(path), saved[1, "2 fp32"].memory["module"]
    assert not checkpoint.has_moments
    found = dict(checkpoint.state_dict())
    assert list(found) == list(module)
    assert all(torch.equal(found[name], tensor) for name, tensor in module.items())
    assert found["head.weight"] is found["tokens.weight"]


def test_what_modules_store_themselves_is_neither_parameter_nor_buffer(copied):
    path = copied(1, "2 fp32")
    change(
        path / "checkpoint" / MODEL,
        lambda stored: stored["module"].update({"a._extra_state": torch.ones(2).byte(), "b._extra_state": {"x": 1}}),
    )
    checkpoint = StoredCheckpoint.open(path)
    assert "a._extra_state" not in checkpoint.frozen
    assert checkpoint.module["b._extra_state"] == {"x": 1}
    found = dict(checkpoint.state_dict(torch.bfloat16))
    assert found["a._extra_state"].tolist() == [1, 1]
    assert "b._extra_state" not in found


def test_parameters_that_are_empty_are_not_taken_for_tied(copied):
    path = copied(1, "2 fp32")

    def edit(stored: dict[str, Any]) -> None:
        stored["module"].update({"none": torch.empty(0), "void": torch.empty(0, 3)})
        stored["shared_params"]["void"] = "none"

    change(path / "checkpoint" / MODEL, edit)
    checkpoint = StoredCheckpoint.open(path)
    assert checkpoint.shared == {"head.weight": "tokens.weight"}
    assert dict(checkpoint.state_dict())["void"].shape == (0, 3)


# -- loading -----------------------------------------------------------------------------------------------------------


class Settings:
    """An object of the user in Lightning's client state."""

    def __init__(self, width: int) -> None:
        self.width = width


def test_objects_of_the_user_are_built_unless_it_is_forbidden(copied):
    path = copied(1, "2 fp32")
    change(path / "checkpoint" / MODEL, lambda stored: stored.update(hyper_parameters=Settings(7)))
    for weights_only in (None, False):
        stored = StoredCheckpoint.open(path, weights_only=weights_only)
        assert stored.client_state["hyper_parameters"].width == 7
    with pytest.raises(CheckpointError, match=rf"`{MODEL}` .*got objects of \S*Settings. .*`weights_only=False`"):
        StoredCheckpoint.open(path, weights_only=True)
    with torch.serialization.safe_globals([Settings]):
        assert StoredCheckpoint.open(path, weights_only=True).client_state["hyper_parameters"].width == 7


def test_values_that_torchs_safe_loader_does_not_know_are_read(copied):
    path = copied(1, "2 fp32")
    change(path / "checkpoint" / MODEL, lambda stored: stored.update(large=2**3000))
    assert StoredCheckpoint.open(path).client_state["large"] == 2**3000
    with pytest.raises(CheckpointError, match=rf"`{MODEL}` .*cannot be read \(UnpicklingError"):
        StoredCheckpoint.open(path, weights_only=True)


def test_objects_in_the_optimizers_files_are_built_only_on_demand(copied):
    path = copied(1, "2 fp32")
    change(path / "checkpoint" / FIRST, lambda stored: stored.update(user=Settings(7)))
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match=rf"`{FIRST}` .*got objects of \S*Settings"):
            StoredCheckpoint.open(path, weights_only=weights_only)
    assert StoredCheckpoint.open(path, weights_only=False).has_moments


def test_objects_whose_class_is_gone_are_named(copied, monkeypatch):
    path = copied(1, "2 fp32")
    change(path / "checkpoint" / MODEL, lambda stored: stored.update(hyper_parameters=Settings(7)))
    monkeypatch.delattr(sys.modules[Settings.__module__], "Settings")
    with pytest.raises(CheckpointError, match=r"objects that can be built here, got \S*Settings and AttributeError"):
        StoredCheckpoint.open(path)


def test_what_the_user_allows_to_load_stays_allowed_and_nothing_else(saved):
    from deepspeed.runtime.zero.config import ZeroStageEnum

    before = set(torch.serialization.get_safe_globals())
    StoredCheckpoint.open(saved[1, "2 fp32"].path)
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([ZeroStageEnum]):
        StoredCheckpoint.open(saved[1, "2 fp32"].path)
        assert ZeroStageEnum in torch.serialization.get_safe_globals()


def test_files_in_torchs_old_format_are_read_as_well(saved, copied):
    path = copied(2, "2 bf16")
    files = [path / "checkpoint" / f"bf16_{name}" for name in (FIRST, SECOND)]
    for file in (*files, path / "checkpoint" / MODEL):
        change(file, lambda stored: None, _use_new_zipfile_serialization=False)
    assert not differing(StoredCheckpoint.open(path, weights_only=True), saved[2, "2 bf16"].memory)
    change(files[0], lambda stored: stored.update(user=Settings(7)), _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"got objects of \S*Settings"):
        StoredCheckpoint.open(path)


def _anonymous_and_mapped_bytes() -> tuple[int, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def test_only_what_is_read_takes_memory(copied):
    path, numel = copied(1, "2 fp32"), 1 << 24  # 64 MiB

    def edit(stored: dict[str, Any]) -> None:
        optimizer = stored["optimizer_state_dict"]
        optimizer["single_partition_of_fp32_groups"][0] = torch.arange(numel, dtype=torch.float32)
        for kind in ("exp_avg", "exp_avg_sq"):
            optimizer["base_optimizer_state"]["state"][0][kind] = torch.ones(numel)

    change(path / "checkpoint" / FIRST, edit)
    change(path / "checkpoint" / MODEL, lambda stored: stored["param_shapes"][0].update({"up.bias": (numel - 200,)}))
    anonymous, mapped = _anonymous_and_mapped_bytes()
    checkpoint = StoredCheckpoint.open(path)
    first = checkpoint.groups[0].index("up.bias") and 11 * 6 + 13 * 6
    part = checkpoint.read("up.bias", "fp32", 1 << 23, 1000)
    now_anonymous, now_mapped = _anonymous_and_mapped_bytes()
    assert torch.equal(part, torch.arange(first + (1 << 23), first + (1 << 23) + 1000, dtype=torch.float32))
    assert now_anonymous - anonymous < 8 << 20
    assert now_mapped - mapped < 8 << 20
    whole = checkpoint.read("up.bias", "exp_avg")
    assert whole.untyped_storage().nbytes() == 4 * (numel - 200)
    assert _anonymous_and_mapped_bytes()[0] - now_anonymous < (64 + 8) << 20


def test_what_was_read_is_a_copy_of_its_own(saved):
    checkpoint = StoredCheckpoint.open(saved[2, "2 fp32"].path)
    checkpoint.read("up.weight", "fp32").zero_()
    assert not differing(checkpoint, saved[2, "2 fp32"].memory)


def test_importing_the_reader_does_not_import_deepspeed():
    # Without the package's own imports, which take seconds and are tested elsewhere.
    program = """
import sys, types
package = types.ModuleType("lightning_zenflow")
package.__path__ = ["lightning_zenflow"]
sys.modules["lightning_zenflow"] = package
import lightning_zenflow.checkpoint.reader
print([name for name in sys.modules if name.startswith(("deepspeed", "lightning."))])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def refusal() -> Callable[[Path], str]:
    """A function that opens a checkpoint and returns the error."""

    def open_it(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            StoredCheckpoint.open(path)
        return str(caught.value)

    return open_it


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("name", ["2 fp32", "3 fp32"])
def test_a_missing_rank_is_named_with_the_numbers(copied, refusal, missing, name):
    path = copied(2, name)
    (path / "checkpoint" / (FIRST, SECOND)[missing]).unlink()
    message = refusal(path)
    assert "must hold 2 optimizer files, one for each rank, got 1" in message
    assert f"`{(FIRST, SECOND)[missing]}` is missing. Copy the files that the ranks wrote" in message


def test_a_missing_model_file_is_named(copied, refusal):
    path = copied(2, "2 fp32")
    (path / "checkpoint" / MODEL).unlink()
    assert "must hold a model file of DeepSpeed" in refusal(path)
    path = path / "checkpoint"
    (path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert f"must hold `{MODEL}`, which it does not. Copy all files" in refusal(path)


def test_a_missing_part_of_frozen_weights_is_named(copied, refusal):
    path = copied(2, "3 fp32")
    (path / "checkpoint" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    message = refusal(path)
    assert (
        "must hold 2 model files, one for each rank, got 1: `zero_pp_rank_1_mp_rank_00_model_states.pt` is" in message
    )


@pytest.mark.parametrize("file", [MODEL, SECOND])
@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_a_file_that_is_cut_off_is_named(copied, refusal, file, keep):
    path = copied(2, "2 fp32") / "checkpoint" / file
    content = path.read_bytes()
    length = int(len(content) * keep) if isinstance(keep, float) else len(content) - 1 if keep < 0 else keep
    path.write_bytes(content[:length])
    message = refusal(path.parent.parent)
    assert f"`{file}` in '{path.parent}' must be a whole file of a DeepSpeed checkpoint, got {length} bytes" in message
    assert "copy it again or take another checkpoint" in message


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("file", [MODEL, SECOND])
def test_a_file_that_holds_something_else_is_named(copied, refusal, file, old_format):
    path = copied(2, "2 fp32")
    torch.save([1, 2], path / "checkpoint" / file, _use_new_zipfile_serialization=not old_format)
    assert f"`{file}`" in (message := refusal(path))
    assert "it holds a list" in message
    torch.save({"state_dict": {}}, path / "checkpoint" / file)
    assert f"`{file}`" in (message := refusal(path))
    assert "must be the " in message
    (path / "checkpoint" / file).write_bytes(pickle.dumps("no torch file", protocol=2))
    assert f"`{file}`" in refusal(path)


def test_a_checkpoint_without_zero_is_refused(saved, refusal):
    for ranks in (1, 2):
        message = refusal(saved[ranks, "0"].path)
        assert "must be of ZeRO stage 1, 2 or 3, got one without ZeRO" in message
        assert "load them with `torch.load`" in message


def test_a_directory_of_something_else_is_described(tmp_path, refusal):
    assert "does not exist. Pass the directory" in refusal(tmp_path / "none.ckpt")
    (tmp_path / "single.ckpt").write_bytes(b"x")
    assert "is a file. Pass the directory" in refusal(tmp_path / "single.ckpt")
    assert "has no file `latest`, but single.ckpt." in refusal(tmp_path)
    for index in range(7):
        (tmp_path / f"image-{index}.png").touch()
    assert "but image-0.png, image-1.png, image-2.png, image-3.png, image-4.png and 3 more" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "but nothing." in refusal(tmp_path / "empty")


@pytest.mark.parametrize("tag", ["", "global_step7\n"])
def test_a_pointer_to_a_folder_that_is_not_there_is_described(copied, refusal, tag):
    path = copied(1, "2 fp32")
    (path / "latest").write_text(tag)
    assert f"must name a folder in it, got {tag.strip()!r}, beside checkpoint, latest" in refusal(path)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_3_expert_0_mp_rank_00_model_states.pt",
    ],
)
def test_other_kinds_of_parallelism_are_refused(copied, refusal, name):
    path = copied(1, "2 fp32")
    (path / "checkpoint" / name).touch()
    assert f"must be of data parallelism alone, got `{name}`" in refusal(path)


def test_mixtures_of_experts_are_refused(copied, refusal):
    path = copied(1, "2 fp32")
    change(path / "checkpoint" / FIRST, lambda stored: stored["optimizer_state_dict"].update(partition_count=[1, 2]))
    assert "`partition_count` must be the same for all groups, got [1, 2]" in refusal(path)


def test_saves_over_each_other_are_found(saved, copied, refusal):
    path = copied(1, "2 fp32") / "checkpoint"
    other = saved[2, "2 fp32"].path / "checkpoint"
    shutil.copy(other / FIRST, path / f"bf16_{FIRST}")
    assert f"must hold one optimizer file of rank 0, got `bf16_{FIRST}` and `{FIRST}`" in refusal(path)
    (path / f"bf16_{FIRST}").unlink()
    shutil.copy(other / SECOND, path / SECOND)
    assert "2 optimizer files of one save, got 2 with stage 2 on 1 ranks and stage 2 on 2 ranks" in refusal(path)
    change(path / SECOND, lambda stored: stored["optimizer_state_dict"].update(partition_count=[1, 1]))
    assert "must hold 1 optimizer files of one save, got 2 with stage 2 on 1 ranks. An older save" in refusal(path)


def test_ranks_of_different_steps_are_refused(copied, refusal):
    path = copied(2, "2 fp32")

    def edit(stored: dict[str, Any]) -> None:
        for state in stored["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] += 3

    change(path / "checkpoint" / SECOND, edit)
    assert "must all be of one step, got ['4', '7']. A save was cut off over an older one" in refusal(path)


def test_ranks_of_different_models_under_zero_3_are_refused(copied, refusal):
    path = copied(2, "3 fp32")

    def edit(stored: dict[str, Any]) -> None:
        flats = stored["optimizer_state_dict"]["fp32_flat_groups"]
        flats[0] = flats[0][:-1].clone()

    change(path / "checkpoint" / SECOND, edit)
    assert "must hold equal parts, got [" in refusal(path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["2 fp32", "3 fp32"])
def test_a_model_file_of_another_model_is_refused(copied, refusal, ranks, name):
    path = copied(ranks, name)
    model = path / "checkpoint" / (MODEL if name == "2 fp32" else "zero_pp_rank_0_mp_rank_00_model_states.pt")
    change(model, lambda stored: stored["param_shapes"][-1].update({"more.weight": torch.Size([9, 99])}))
    if name == "2 fp32":
        change(
            path / "checkpoint" / FIRST,
            lambda stored: stored["optimizer_state_dict"].update(param_alignment_paddings=None),
        )
    assert "must hold every parameter in `param_shapes`" in (message := refusal(path))
    assert "`more.weight` ends at" in message
    change(model, lambda stored: stored["param_shapes"].append({"more.weight": torch.Size([9, 99])}))
    assert "groups, as `param_shapes` of the model's file does" in refusal(path)


def test_an_unknown_name_is_answered_with_the_closest(saved):
    checkpoint = StoredCheckpoint.open(saved[1, "2 fp32"].path)
    with pytest.raises(CheckpointError, match=r"`name` must be a parameter .* got 'net.up.weight'.* is 'up.weight'"):
        checkpoint.read("net.up.weight", "fp32")
    with pytest.raises(CheckpointError, match=r"got 'qqq'. It holds 9 others"):
        checkpoint.read("qqq", "fp32")


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 79), (78, 1), (79, None), (3, -1)])
def test_a_slice_outside_the_parameter_is_refused(saved, start, numel):
    checkpoint = StoredCheckpoint.open(saved[1, "2 fp32"].path)
    with pytest.raises(ValueError, match=r"`start` and `numel` must be within the 78 elements of `up.weight`"):
        checkpoint.read("up.weight", "fp32", start, numel)


def test_an_unknown_kind_is_refused(saved):
    with pytest.raises(ValueError, match="`kind` must be one of fp32, exp_avg, exp_avg_sq, got 'momentum'"):
        StoredCheckpoint.open(saved[1, "2 fp32"].path).read("up.weight", "momentum")
