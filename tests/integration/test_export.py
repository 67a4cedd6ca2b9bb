"""`lightning-zenflow export`: the weights of a checkpoint in one file, or no file and a reason."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy, __version__
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from lightning_zenflow.cli import export, export_file, main
from tests.integration.test_checkpoints import SavesAt, Tied
from tests.modules import CLASSES, EXPECTED_WARNINGS, FEATURES, Small, batches, fit, three_groups, weights
from tests.plain_checkpoints import write

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("own_process_group"),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODEL = "checkpoint/mp_rank_00_model_states.pt"
OPTIMIZER = "checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Mixed(nn.Module):
    """Trained, frozen, tied and unused weights, and buffers of floats and of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.tied = Tied()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.tied(self.norm(self.frozen(inputs)))


def two_groups(module: Small) -> torch.optim.AdamW:
    params: dict[str, Any] = dict(module.net.named_parameters())
    later = [params.pop("norm.bias"), params.pop("tied.head.weight")]
    trained = [param for param in params.values() if param.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}, {"params": later, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


class Trained:
    """A run of `Mixed`, saved in the middle, with gradients held back and weights that the device sees extrapolated."""

    def __init__(self, folder: Path) -> None:
        self.path, self.light = folder / "mixed.ckpt", folder / "light.ckpt"
        whole, light = SavesAt(self.path, 6), SavesAt(self.light, 6, weights_only=True)
        seen: dict[str, Tensor] = {}

        class Remembers(Small):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                assert isinstance(self.net, Mixed)
                frozen = self.net.frozen
                others = {**dict(self.net.named_buffers()), "frozen.weight": frozen.weight, "frozen.bias": frozen.bias}
                seen.update({name: tensor.detach().clone() for name, tensor in others.items()})

        fit(Remembers(Mixed, two_groups), callbacks=[whole, light], precision="bf16-true")
        self.masters, self.others = whole.masters, seen

    @property
    def expected(self) -> dict[str, Tensor]:
        """The state dict that an export in fp32 must hold."""
        others = rounded(self.others, torch.float32)
        found = {f"net.{name}": value for name, value in {**self.masters, **others}.items()}
        return {**found, "net.tied.last.weight": found["net.tied.first.weight"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with warnings.catch_warnings(), mock.patch.dict(os.environ):  # in which Lightning leaves a port
        warnings.simplefilter("ignore")
        yield Trained(tmp_path_factory.mktemp("trained"))


def done(*args: Any) -> None:
    assert main(["export", *map(str, args)]) == 0


def refused(capsys: pytest.CaptureFixture[str], code: int, *args: Any) -> str:
    """What a person reads when an export is refused with `code`: one line."""
    assert main(["export", *map(str, args)]) == code
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def warned(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def rounded(expected: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in expected.items()}


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- what is in the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".PT"])
def test_the_file_holds_the_masters_bit_for_bit_and_loads_without_running_code(
    suffix: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"one{suffix}"
    done(trained.path, out)
    loaded = torch.load(out, weights_only=True)
    assert same(loaded["state_dict"], trained.expected)
    # What the model itself uses is of 16 bits, so that only the masters can be equal.
    assert not same(rounded(rounded(trained.expected, torch.bfloat16), torch.float32), trained.expected)
    assert {key: loaded[key] for key in ("epoch", "global_step")} == {"epoch": 0, "global_step": 7}
    assert set(loaded) == {"state_dict", "epoch", "global_step", "pytorch-lightning_version"}
    assert not capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_weights_are_rounded_as_torch_rounds_and_integers_stay(
    dtype: str, suffix: str, trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / f"one{suffix}"
    done(trained.path, out, "--dtype", dtype)
    expected = rounded(trained.expected, DTYPES[dtype])
    assert expected["net.norm.num_batches_tracked"].dtype == torch.int64
    if suffix == ".safetensors":
        del expected["net.tied.last.weight"]
        assert same(load_file(out), expected)
    else:
        assert same(torch.load(out, weights_only=True)["state_dict"], expected)


def test_a_checkpoint_of_weights_alone_gives_its_masters_too(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    done(trained.light, tmp_path / "light.pt")
    assert same(torch.load(tmp_path / "light.pt", weights_only=True)["state_dict"], trained.expected)
    assert re.search(r"^step +7 *$", capsys.readouterr().out, re.MULTILINE)


def test_bare_is_the_state_dict_alone(trained: Trained, tmp_path: Path) -> None:
    done(trained.path, tmp_path / "bare.pt", "--bare")
    loaded = torch.load(tmp_path / "bare.pt", weights_only=True)
    assert same(loaded, trained.expected)
    Mixed().load_state_dict({name.removeprefix("net."): tensor for name, tensor in loaded.items()})


def test_tied_weights_take_their_place_once(trained: Trained, tmp_path: Path) -> None:
    done(trained.path, tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"]
    first, last = state["net.tied.first.weight"], state["net.tied.last.weight"]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    done(trained.path, tmp_path / "one.safetensors")
    with safetensors.safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "step": "7",
            "dtype": "fp32",
            "lightning_zenflow": __version__,
            "tied:net.tied.last.weight": "net.tied.first.weight",
        }


def test_safetensors_load_into_the_model_that_was_trained(trained: Trained, tmp_path: Path) -> None:
    done(trained.path, tmp_path / "one.safetensors")
    module = Small(Mixed)
    missing, unexpected = load_model(module, tmp_path / "one.safetensors")
    assert not missing and not unexpected
    assert same(module.state_dict(), trained.expected)
    assert module.net.tied.last.weight is module.net.tied.first.weight  # type: ignore[union-attr]


class Hyper(Small):
    def __init__(self, width: int, options: dict[str, Any], place: Any = None) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)))
        self.save_hyperparameters()


def test_a_module_is_built_from_its_hyperparameters_with_the_weights_of_the_masters(tmp_path: Path) -> None:
    saves = SavesAt(tmp_path / "hyper.ckpt", 6)
    fit(Hyper(11, {"rates": [1, 2.5], "name": "a"}), callbacks=[saves])
    done(saves.path, tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["hyper_parameters"]["width"] == 11
    module = Hyper.load_from_checkpoint(tmp_path / "one.ckpt")
    assert module.hparams.options == {"rates": [1, 2.5], "name": "a"}  # type: ignore[attr-defined]
    assert torch.equal(weights(module), torch.cat([value.flatten() for value in saves.masters.values()]))


class Extra(nn.Linear):
    """Stores something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.scale = 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_what_modules_store_beside_tensors_comes_along_where_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves, module = SavesAt(tmp_path / "extra.ckpt", 6), Small(Extra)
    module.net.scale = 3.0  # type: ignore[assignment]
    fit(module, callbacks=[saves])
    done(saves.path, tmp_path / "one.ckpt")
    assert not warned(capsys)
    assert Small.load_from_checkpoint(tmp_path / "one.ckpt", make_net=Extra).net.scale == 3.0
    done(saves.path, tmp_path / "one.safetensors")
    assert warned(capsys) == ["Left out, since safetensors holds tensors alone: net._extra_state."]
    assert load_file(tmp_path / "one.safetensors").keys() == {"net.weight", "net.bias"}


class Notes(Hyper):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(plain={"mean": torch.ones(3)}, folder=Path("a"), zenflow_tuner={"windows": 1})


def test_only_what_builds_the_module_is_kept_if_it_is_not_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = SavesAt(tmp_path / "notes.ckpt", 6)
    fit(Notes(3, {}, place=Path("data")), callbacks=[saves])
    done(saves.path, tmp_path / "one.ckpt")
    assert warned(capsys) == [
        "Left out, since only code could build it again: folder.",
        (
            "Kept, though not of plain types: hyper_parameters. Loading the file takes `weights_only=False`, and the code"
            " that trained."
        ),
    ]
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert torch.equal(loaded["plain"]["mean"], torch.ones(3))
    assert not {"folder", "zenflow_tuner", "loops", "callbacks", "lr_schedulers", "module", "ds_config"} & loaded.keys()
    module = Notes.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=False)
    assert module.hparams.place == Path("data")  # type: ignore[attr-defined]
    done(saves.path, tmp_path / "bare.ckpt", "--bare")
    assert not warned(capsys)
    assert torch.load(tmp_path / "bare.ckpt", weights_only=True).keys() == module.state_dict().keys()


def test_values_that_fp16_cannot_hold_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, CLASSES)
            with torch.no_grad():
                self.weight[1, :2] = 1e5
                self.bias[3] = -1e6
            self.register_buffer("limits", torch.tensor([7e4, float("inf"), 1.0]))

    monkeypatch.setattr(export_file, "CHUNK_NUMEL", 4)
    saves = SavesAt(tmp_path / "large.ckpt", 2)
    fit(Small(Large), callbacks=[saves])
    done(saves.path, tmp_path / "one.pt", "--dtype", "fp16")
    (line,) = warned(capsys)
    assert line == (
        "4 finite values in 3 tensors became infinite in fp16, first in `net.weight`. Export with --dtype bf16 or fp32."
    )
    for dtype in ("bf16", "fp32"):
        done(saves.path, tmp_path / "one.pt", "--dtype", dtype, "--force")
        assert not warned(capsys)


class Odd(nn.Linear):
    """Buffers that share memory, show a part of it, or lie in another order."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        whole = torch.arange(1000.0)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[10:13])
        self.register_buffer("again", whole)
        self.register_buffer("across", torch.arange(6.0).view(2, 3).t())


def test_buffers_that_share_memory_are_all_there_and_views_take_no_more_than_they_show(tmp_path: Path) -> None:
    saves, net = SavesAt(tmp_path / "odd.ckpt", 2), Odd()
    fit(Small(lambda: net), callbacks=[saves])
    expected = {f"net.{name}": tensor for name, tensor in {**dict(net.named_buffers()), **saves.masters}.items()}
    expected |= {f"net.{name}": getattr(net, name) for name in ("whole", "again")}
    done(saves.path, tmp_path / "one.safetensors")
    assert same(load_file(tmp_path / "one.safetensors"), expected)
    done(saves.path, tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"]
    assert same(state, expected)
    assert state["net.part"].untyped_storage().nbytes() == 3 * 4


def test_a_type_that_safetensors_does_not_have_is_answered_in_one_line(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_without_manifest(trained.path, tmp_path / "odd.ckpt")
    stored = torch.load(path / MODEL, weights_only=False)
    stored["module"]["net.norm.running_var"] = torch.ones(FEATURES, dtype=torch.complex128)
    torch.save(stored, path / MODEL)
    before = tree(tmp_path)
    message = refused(capsys, 1, path, tmp_path / "one.safetensors")
    assert message == (
        f"`OUT` must be of a format for these weights, got '{tmp_path / 'one.safetensors'}': `net.norm.running_var` is"
        " torch.complex128, which safetensors does not have. Write a .pt."
    )
    assert tree(tmp_path) == before
    done(path, tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"]
    assert state["net.norm.running_var"].dtype == torch.complex128


# -- whose checkpoint --------------------------------------------------------------------------------------------------

PLAIN = ["1 fp32", "2 bf16", "2 fp16", "3 bf16", "3 many sub-groups", "2 aligned"]


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ["2 bf16", "3 fp32"]), pytest.param(2, PLAIN, marks=pytest.mark.long)], ids=["1", "2"]
)
def test_checkpoints_of_plain_deepspeed_give_their_masters(
    ranks: int, names: list[str], run_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two groups, tied and frozen weights, BatchNorm; on two ranks cut weights."""
    memory = run_ranks(write, ranks, folder=str(tmp_path / "runs"), names=names)[0]
    for name in names:
        path, seen = tmp_path / "runs" / name.replace(" ", "_"), memory[name]
        expected = {**rounded(seen["module"], torch.float32), **seen["fp32"]}
        expected["head.weight"] = expected["tokens.weight"]
        done(path, tmp_path / f"{name}.ckpt")
        loaded = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert same(loaded["state_dict"], expected), name
        assert (loaded["epoch"], loaded["global_step"]) == (3, 4)
        assert "callbacks" not in loaded and "lr_schedulers" not in loaded
        shown = " ".join(capsys.readouterr().out.split())
        assert f"ZeRO stage {name[0]}, {ranks} rank{'s' * (ranks - 1)}, by DeepSpeed" in shown
        assert "trained 6 parameters" in shown and "frozen 2 parameters, 42 elements" in shown
        assert "tied head.weight = tokens.weight" in shown
        done(path, tmp_path / f"{name}.safetensors", "--dtype", "bf16")
        del expected["head.weight"]
        assert same(load_file(tmp_path / f"{name}.safetensors"), rounded(expected, torch.bfloat16)), name
        capsys.readouterr()


class FromPlain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)


def test_a_file_of_a_run_without_lightning_has_the_version_that_lightning_asks_for(
    trained: Trained, tmp_path: Path
) -> None:
    stored = StoredCheckpoint.open(trained.path)
    del stored.client_state["pytorch-lightning_version"]
    kept = export_file.client_state(stored).kept
    torch.save({**kept, "state_dict": FromPlain().state_dict()}, tmp_path / "one.ckpt")
    FromPlain.load_from_checkpoint(tmp_path / "one.ckpt")


def train_on_two_ranks(folder: str) -> dict[str, tuple[int, Tensor]]:
    """What each of the ranks does; returns where its masters begin in each parameter, and them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, found = int(os.environ["RANK"]), {}

    class Saves(SavesAt):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx != self.batch:
                return
            trainer.save_checkpoint(self.path)
            assert isinstance(trainer.strategy, ZenFlowStrategy) and trainer.strategy._zero is not None
            zero = trainer.strategy._zero
            zero.complete()
            for segment in zero._tables[rank].segments:
                flat = zero.shard.host.arena.master[segment.start : segment.stop].clone()
                found[f"net.{segment.spec.name.removeprefix('net.')}"] = (segment.param_start, flat)

    saves = Saves(Path(folder) / "two.ckpt", 6)
    fit(Small(configure=three_groups), batches(10, seed=rank), callbacks=[saves], devices=2)
    return found


@pytest.mark.long
def test_masters_that_two_ranks_hold_are_put_together(run_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    ranks = run_ranks(train_on_two_ranks, folder=str(tmp_path))
    done(tmp_path / "two.ckpt", tmp_path / "one.ckpt")
    assert "ZeRO stage 2, 2 ranks, by lightning-zenflow" in " ".join(capsys.readouterr().out.split())
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    pieces = [(name, *piece) for of_rank in ranks for name, piece in of_rank.items()]
    assert sum(flat.numel() for _, _, flat in pieces) == sum(tensor.numel() for tensor in state.values())
    assert len({name for name, _, _ in pieces}) < len(pieces)  # one is cut
    for name, start, flat in pieces:
        assert torch.equal(state[name].flatten()[start : start + flat.numel()], flat)


# -- whole or untouched ------------------------------------------------------------------------------------------------


def test_an_existing_file_is_replaced_only_by_force(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.pt"
    out.write_bytes(b"precious")
    message = refused(capsys, 1, trained.path, out)
    assert message == f"`OUT` must not exist, got '{out}'. Give `--force` to replace it, or another name."
    assert out.read_bytes() == b"precious"
    done(trained.path, out, "--force")
    assert same(torch.load(out, weights_only=True)["state_dict"], trained.expected)
    assert tree(tmp_path) == ["one.pt"]


def test_a_link_is_replaced_and_not_what_it_points_to(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "old.pt").write_bytes(b"precious")
    (tmp_path / "one.pt").symlink_to("old.pt")
    (tmp_path / "gone.pt").symlink_to("nowhere.pt")
    for name in ("one.pt", "gone.pt"):
        assert "must not exist" in refused(capsys, 1, trained.path, tmp_path / name)
        done(trained.path, tmp_path / name, "--force")
        assert not (tmp_path / name).is_symlink()
        capsys.readouterr()
    assert (tmp_path / "old.pt").read_bytes() == b"precious"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_file_has_the_permissions_of_any_new_file(suffix: str, trained: Trained, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        done(trained.path, tmp_path / "new folder" / f"one{suffix}")
    finally:
        os.umask(before)
    assert (tmp_path / "new folder" / f"one{suffix}").stat().st_mode & 0o777 == 0o640


FAULTS = {
    "full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
    "forbidden": (PermissionError(errno.EACCES, "Permission denied"), 1, "Permission denied"),
    "stopped": (KeyboardInterrupt(), 130, "Stopped. Nothing was written."),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("function", ["os.replace", "os.fsync", "torch.save", "shutil.copymode"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_export_that_is_cut_off_leaves_everything_as_it_was(
    exists: bool,
    function: str,
    fault: str,
    suffix: str,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a" / "b" / f"one{suffix}"
    if exists:
        out.parent.mkdir(parents=True)
        out.write_bytes(b"precious")
    before = tree(tmp_path)
    error, code, said = FAULTS[fault]

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    # `torch.save` also tells what is plain, in memory, where an error is no failure.
    if function == "torch.save":
        monkeypatch.setattr(export, "write_safetensors" if suffix == ".safetensors" else "write_torch", fails)
    else:
        monkeypatch.setattr(function, fails)
    assert said in refused(capsys, code, trained.path, out, "--force")
    assert tree(tmp_path) == before
    assert not exists or out.read_bytes() == b"precious"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_disk_that_takes_no_more_is_answered_in_one_line(
    suffix: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writers of torch and safetensors have errors of their own for it, which are not shown."""
    out, (soft, hard) = tmp_path / f"one{suffix}", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        message = refused(capsys, 1, trained.path, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(
        rf"`OUT` must be a path that can be written, got '{out}': File too large \(.* are free there\)\. Nothing was changed;"
        r" choose another path or make room\.",
        message,
    )
    assert not tree(tmp_path)


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_read(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = os.statvfs(tmp_path)
    nbytes = sum(value.nbytes for name, value in trained.expected.items() if name != "net.tied.last.weight")

    def with_free(free: int) -> None:
        fields = [1, 1, 10**9, free, free, *true[5:]]
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))

    with_free(nbytes - 1)
    monkeypatch.setattr(export, "collect", lambda *args: pytest.fail("It was read."))
    assert "it takes 0.0 MiB" in refused(capsys, 1, trained.path, tmp_path / "one.pt")
    monkeypatch.undo()
    with_free(nbytes)
    done(trained.path, tmp_path / "one.pt")


def test_a_file_that_came_into_being_meanwhile_is_not_replaced(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, true = tmp_path / "one.pt", export.write_torch

    def slowly(path: Path, content: Any) -> None:
        true(path, content)
        out.write_bytes(b"of another export")

    monkeypatch.setattr(export, "write_torch", slowly)
    assert "has come into being meanwhile" in refused(capsys, 1, trained.path, out)
    assert out.read_bytes() == b"of another export" and tree(tmp_path) == ["one.pt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_program_leaves_nothing(
    number: int, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = export.write_torch

    def interrupted(path: Path, content: Any) -> None:
        true(path, content)
        assert path.stat().st_size
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(export, "write_torch", interrupted)
    assert refused(capsys, 130, trained.path, tmp_path / "new" / "one.pt") == "Stopped. Nothing was written."
    assert not tree(tmp_path)
    assert signal.getsignal(number) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_arguments_that_cannot_be_used_are_answered_in_one_line(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = "`OUT` must end with .ckpt, .pt, .pth, .bin or .safetensors, got"
    for name in ("one.zip", "one", "one.pt.gz"):
        assert refused(capsys, 2, trained.path, tmp_path / name).startswith(f"{accepted} '{tmp_path / name}'. Choose")
    assert "must be a local path" in refused(capsys, 2, trained.path, "s3://bucket/one.pt")
    assert refused(capsys, 2, "", tmp_path / "one.pt").startswith("`CHECKPOINT` must be a path, got an empty one.")
    assert refused(capsys, 2, trained.path, "").startswith("`OUT` must be a path, got an empty one.")
    for args in ([], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as ended:
            main(["export", str(trained.path), *([str(tmp_path / "one.pt")] if args else []), *args])
        assert ended.value.code == 2
    assert not tree(tmp_path)


def test_places_where_no_file_can_be_are_answered_in_one_line(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    assert "which is a directory" in refused(capsys, 1, trained.path, tmp_path / "folder.pt", "--force")
    assert f"'{tmp_path / 'file'}' is no directory" in refused(capsys, 1, trained.path, tmp_path / "file" / "one.pt")
    assert "File name too long" in refused(capsys, 1, trained.path, tmp_path / f"{'a' * 300}.pt")
    inside = trained.path / MODEL
    assert "must lie outside of CHECKPOINT" in refused(capsys, 1, trained.path, inside, "--force")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    forbidden = refused(capsys, 1, trained.path, tmp_path / "new" / "one.pt")
    assert f"nothing may be made in '{tmp_path}'" in forbidden
    assert tree(tmp_path) == before


def test_what_is_no_whole_checkpoint_is_refused_with_the_words_of_the_reader(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.pt"
    assert "does not exist" in refused(capsys, 2, tmp_path / "nowhere.ckpt", out)
    (tmp_path / "plain.ckpt").write_bytes(b"")
    assert "which is a file" in refused(capsys, 2, tmp_path / "plain.ckpt", out)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.bin").write_bytes(b"")
    assert "which holds 'model.bin'" in refused(capsys, 2, tmp_path / "foreign", out)
    for part in (MODEL, OPTIMIZER):
        damaged = copy_without_manifest(trained.path, tmp_path / Path(part).stem)
        (damaged / part).write_bytes((damaged / part).read_bytes()[:-200])
        assert "must be a whole file of a DeepSpeed checkpoint" in refused(capsys, 2, damaged, out)
    assert not out.exists()


def test_a_missing_rank_is_named(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_two = copy_without_manifest(trained.path, tmp_path / "two.ckpt")
    stored = torch.load(of_two / OPTIMIZER, weights_only=False)
    stored["optimizer_state_dict"]["partition_count"] = [2, 2]
    torch.save(stored, of_two / OPTIMIZER)
    missing = "`bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt` is missing"
    assert missing in refused(capsys, 2, of_two, tmp_path / "one.pt")


def copy_without_manifest(path: Path, to: Path) -> Path:
    """The part of a checkpoint of ours that plain DeepSpeed would have written."""
    (to / "checkpoint").mkdir(parents=True)
    (to / "latest").write_text("checkpoint")
    for part in (MODEL, OPTIMIZER):
        (to / part).write_bytes((path / part).read_bytes())
    return to


# -- what a person sees ------------------------------------------------------------------------------------------------


def test_a_summary_is_all_that_is_written_without_a_terminal(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained.path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done("mixed.ckpt", tmp_path / "one.pt")
    written = capsys.readouterr()
    assert not written.err
    assert "\x1b" not in written.out and "reading" not in written.out
    shown = re.sub(r"\s+", " ", written.out)
    path, _, rest = re.sub(r"\s+", "", written.out).partition(",0.0MiB")  # a long path is wrapped anywhere
    assert path == f"written{tmp_path / 'one.pt'}" and rest
    numel = sum(value.numel() for value in trained.masters.values())
    assert "from mixed.ckpt, ZeRO stage 2, 1 rank, by lightning-zenflow" in shown
    assert f"step 7 dtype fp32 trained {len(trained.masters)} parameters, {numel} elements" in shown
    assert "frozen 2 parameters, 42 elements buffers 3 tied net.tied.last.weight = net.tied.first.weight took" in shown


def test_a_terminal_shows_how_far_it_is_and_then_forgets_it(trained: Trained, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "lightning_zenflow.cli", "export", str(trained.path), str(tmp_path / "one.pt")]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux's end of file
            while part := os.read(ours, 4096):
                shown += part
        assert process.wait(60) == 0
    os.close(ours)
    text = shown.decode()
    assert re.search(r"reading \S+ .*/.* bytes|reading \S+ .*/.* KiB", text), text
    assert "writing" in text and "accelerator" not in text and "Traceback" not in text
    # The last thing before the summary takes back the lines of the bars.
    assert text.rindex("\x1b[2K") > text.rindex("writing")
    assert "took" in text[text.rindex("\x1b[2K") :]


def test_the_help_says_what_a_person_must_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "lightning-zenflow export last.ckpt model.safetensors --dtype bf16",
        "memory for the weights as they are exported, and for one parameter in fp32",
        'tied ones under the first of their names; the metadata has the others as "tied:NAME": "FIRST NAME"',
        "Exit code 0: written. 1: OUT could not be written",
        "--force Replace OUT if it exists",
        "--dtype {fp32,bf16,fp16}",
        "load_state_dict(torch.load(OUT))",
    ):
        assert words in shown
