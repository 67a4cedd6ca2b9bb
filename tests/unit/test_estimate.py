"""`estimate`: sizes that are known exactly, numbers that come from `costs`, and a table a person can read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_zenflow import costs, footprint, recommended, traffic
from lightning_zenflow.cli import estimate, machine, presets, sizes
from lightning_zenflow.cli.measure import HostBandwidth
from lightning_zenflow.cli.presets import PRESETS
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.memory import Available
from lightning_zenflow.rates import Rates
from lightning_zenflow.work import Work

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
MISTRAL_7B = {**LLAMA_2_7B, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
QWEN2_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
MEASURED = Rates(
    compute_flops=1e12,
    beside_flops=0.8e12,
    down_secs=1e-9,
    up_secs=0.5e-9,
    accumulate_secs=1e-9,
    update_secs=4e-9,
    device_adamw_secs=3e-9,
    write_secs=2e-9,
    interim_secs=0.5e-9,
    move_secs=50e-9,
    offload_down_secs=6e-9,
    offload_step_secs=2e-9,
    link_overlaps=False,
)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_05B, 494_032_768),
        (GPT2, 124_439_808),
        (BERT, 109_482_240),
    ],
    ids=["llama", "mistral", "qwen2", "gpt2", "bert"],
)
def test_a_config_gives_the_published_number_of_parameters(config: dict[str, Any], numel: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert sizes.size_of(str(path)).numel == numel


def test_fields_that_change_the_size_are_heeded(tmp_path: Path) -> None:
    def numel(**changes: Any) -> int:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LLAMA_2_7B, **changes}))
        return sizes.from_config(path).numel

    base = numel()
    assert base - numel(tie_word_embeddings=True) == 32000 * 4096
    assert numel(attention_bias=True) - base == 32 * 4 * 4096
    assert numel(mlp_bias=True) - base == 32 * (2 * 11008 + 4096)
    assert base - numel(num_key_value_heads=8) == 32 * 2 * 4096 * (4096 - 1024)
    assert base - numel(head_dim=64) == 32 * 4 * 4096 * (4096 - 2048)


def test_vectors_and_selected_columns_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    size = sizes.size_of(str(path))
    norms, biases = (2 * 12 + 1) * 2 * 768, 12 * (3 + 1 + 4 + 1) * 768
    assert size.vector_numel == norms + biases
    assert size.largest_numel == 50257 * 768
    assert size.columns == 2 * 768 + 12 * (2304 + 768 + 3072 + 768)
    # Columns: 77 of 768, 230 of 2304, 307 of 3072.
    matrices = (50257 + 1024) * 77 + 12 * (768 * 230 + 768 * 77 + 768 * 307 + 3072 * 77)
    assert size.selected_numel(0.1) == size.vector_numel + matrices
    assert size.selected_numel(0.0) == size.vector_numel
    assert size.selected_numel(1.0) == size.numel


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("7e9", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("350M", 350 * 10**6),
        ("1.5b", 1_500_000_000),
        ("1_000", 1000),
        ("2T", 2 * 10**12),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, numel: int) -> None:
    assert sizes.size_of(text).numel == numel
    assert sizes.size_of(text).selected_numel(0.1) == numel // 10


class Tied(LightningModule):
    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight


class Late(LightningModule):
    """Makes its layers where Lightning asks for them, as large models do."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(10**6, 10**6)  # 4 TB, if it were allocated


class NeedsData(nn.Module):
    """Reads a value while it is built, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(torch.tensor(3).item()), 2))


class Untrained(nn.Module):
    pass


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


class Wordy(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("one\ntwo")


def test_a_class_is_counted_as_it_is_trained() -> None:
    size = sizes.size_of(f"{__name__}.Tied", {"width": 5, "depth": 2})
    assert size.numel == 11 * 5 + 2 * (25 + 5)
    assert size.vector_numel == 2 * 5
    assert size.largest_numel == 55


def test_a_class_is_built_without_memory_where_that_is_possible() -> None:
    # 4 TB, if it were allocated.
    assert sizes.size_of("torch.nn.Linear", {"in_features": 10**6, "out_features": 10**6}).numel == 10**12 + 10**6
    assert sizes.size_of(f"{__name__}.NeedsData").numel == 6
    assert sizes.size_of(f"{__name__}.Late").numel == 10**12 + 10**6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("seven", "`model` must be a number such as 7B, a config.json or a class path, got 'seven'"),
        ("no_such_module.Model", "`model` must be a number such as 7B, a config.json or a class path, got 'no_such"),
        ("json.dumps", "`model` must be a LightningModule or nn.Module, got 'json.dumps'"),
        ("torch.nn.Linear", "`model` torch.nn.Linear must be buildable, got TypeError"),
        (f"{__name__}.Untrained", "`model` must have trainable parameters, got none"),
        ("0", "`model` must have 1 to 1e+15 parameters, got '0'"),
        ("1e400", "`model` must have 1 to 1e+15 parameters, got '1e400'"),
        ("1e9999999999", "`model` must have 1 to 1e+15 parameters, got '1e9999999999'"),
        ("1e308", "`model` must have 1 to 1e+15 parameters, got '1e308'"),
        ("1e308T", "`model` must have 1 to 1e+15 parameters, got '1e308T'"),
        ("1001T", "`model` must have 1 to 1e+15 parameters, got '1001T'"),
        ("9" * 300, "`model` must have 1 to 1e+15 parameters, got '9999"),
        ("x" * 300, "`model` must be a number such as 7B"),
        (
            f"{__name__}.Lazy",
            f"whose shapes are known once it is built, got {__name__}.Lazy with the lazy 'layer.weight'",
        ),
        (f"{__name__}.Wordy", "got RuntimeError: one two. Give"),
        ("none.json", "`model` must be a readable config.json, got none.json"),
    ],
)
def test_what_is_no_model_is_refused(model: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sizes.size_of(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "mamba"}', "`model_type` must be one of llama, mistral, qwen2, gpt2, bert, got 'mamba'"),
        ("[]", "`model_type` must be one of llama, .* got None"),
        ('{"model_type": ["llama"]}', r"`model_type` must be one of llama, .* got \['llama'\]"),
        ('{"model_type": {"llama": 1}}', "`model_type` must be one of llama, .* got {'llama': 1}"),
        ('{"model_type": "gpt2"}', "must have all fields of a gpt2 config, got .* without 'n_embd'"),
        ("{", "`model` must be a readable config.json"),
        ("[" * 200_000, "`model` must be a readable config.json, got .* recursion"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        sizes.size_of(str(path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            ("hidden_size", value, f"`hidden_size` must be a whole number from 1 to 100000000, got {value!r}. Mend")
            for value in (math.inf, -math.inf, math.nan, "64", True, 1.5, -64, 0, None, [64], 10**9)
        ),
        ("vocab_size", None, "`vocab_size` must be a whole number from 1 to 100000000, got None. Mend"),
        ("num_attention_heads", 0, "`num_attention_heads` must be a whole number from 1 to 100000000, got 0. Mend"),
        ("num_attention_heads", 33, "`num_attention_heads` must divide `hidden_size` 4096, got 33. Mend"),
        ("num_key_value_heads", 33, "`num_key_value_heads` must be a whole number from 1 to 32, got 33. Mend"),
        ("head_dim", 0, "`head_dim` must be a whole number from 1 to 100000000, got 0. Mend"),
        ("num_hidden_layers", -2, "`num_hidden_layers` must be a whole number from 1 to 10000, got -2. Mend"),
        ("num_hidden_layers", 10**11, "`num_hidden_layers` must be a whole number from 1 to 10000, got 100000000000."),
        ("mlp_bias", "no", "`mlp_bias` must be true or false, got 'no'. Mend"),
    ],
)
def test_a_field_of_a_config_out_of_range_is_refused(
    field: str, value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_2_7B, field: value}))
    assert message in refused(capsys, str(path), "--preset", "l4")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        *((GPT2, field, value) for field in (*GPT2, "n_inner") for value in ("x", 0, 1e3) if field != "model_type"),
        *((BERT, field, value) for field in BERT for value in ("x", 0, 1e3) if field != "model_type"),
    ],
)
def test_every_size_of_every_family_must_be_a_whole_number(
    config: dict[str, Any], field: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=f"`{field}` must be a whole number from 1 to .*, got {value!r}"):
        sizes.size_of(str(path))


def test_a_config_of_sane_fields_may_still_be_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BERT, "hidden_size": 10**8}))
    with pytest.raises(ValueError, match=r"`model` must have 1 to 1e\+15 parameters, got \d{18} by the fields of"):
        sizes.size_of(str(path))


# -- presets -----------------------------------------------------------------------------------------------------------


def test_every_preset_can_be_named_and_offloading_without_stalls_pays_on_each() -> None:
    assert set(get_args(presets.PresetName)) == {"here", *PRESETS}
    work = Work(numel=10**9, selected_numel=10**8, tokens=8192)
    for name, preset in PRESETS.items():
        rates = preset.rates(2)
        step = costs.zenflow(work, rates, recommended.smallest_update_interval(work, rates))
        assert step.step_secs < costs.zero_offload(work, rates).step_secs, name
        assert rates.accumulate_secs >= 10 / preset.host_bandwidth, name


def test_shares_of_the_peak_are_taken_and_few_cores_limit_the_host() -> None:
    rates = PRESETS["h100"].rates(2)
    assert rates.compute_flops == pytest.approx(0.4 * 989e12)
    assert rates.up_secs == pytest.approx(2 / (0.8 * 63e9))
    assert rates.accumulate_secs == pytest.approx(10 / (0.75 * 76.8e9))
    assert PRESETS["h100"].rates(2, cores=2).accumulate_secs == pytest.approx(10 / 18e9)
    assert PRESETS["h100"].rates(4).compute_flops == pytest.approx(0.2 * 989e12)


# -- the command -------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert estimate.main([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_moments_in_bf16_take_four_bytes_a_parameter_less_and_change_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("7B", "--preset", "a100", "--update-interval", "4")
    fp32, bf16 = (printed(capsys, *given, "--moments", moments) for moments in ("fp32", "bf16"))
    assert fp32["zenflow"]["host_bytes"] - bf16["zenflow"]["host_bytes"] == pytest.approx(4 * 7e9, abs=8 * 4096)
    bf16["zenflow"].update(host_bytes=fp32["zenflow"]["host_bytes"], fits=fp32["zenflow"]["fits"])
    assert fp32 == {**bf16, "moments": "fp32"} and bf16["moments"] == "bf16"
    assert estimate.main([*given, "--moments", "bf16"]) == 0
    assert "bf16 with moments in bf16" in " ".join(capsys.readouterr().out.split())


def test_the_numbers_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(
        capsys, "7B", "--preset", "a100", "--devices", "4", "--batch-tokens", "2048", "--topk-ratio", "0.05"
    )
    work = Work(numel=7 * 10**9, selected_numel=350_000_000, tokens=2048, ranks=4)
    rates = PRESETS["a100"].rates(2)
    interval = recommended.smallest_update_interval(work, rates)
    assert found["update_interval"] == interval
    assert found["select_interval"] == recommended.smallest_select_interval(work, rates, interval)
    assert found["zenflow"]["step"]["step_secs"] == costs.zenflow(work, rates, interval).step_secs
    assert found["zero_offload"]["step"]["step_secs"] == costs.zero_offload(work, rates).step_secs
    assert found["on_device"]["step"]["step_secs"] == costs.on_device(work, rates).step_secs
    assert found["zenflow"]["host_bytes"] == ArenaLayout(1_750_000_000, torch.bfloat16, interval).touched_nbytes
    assert found["zenflow"]["device"]["total_bytes"] == footprint.zenflow_device(work, rates).total_bytes
    assert found["machine"]["rates"]["update_secs"] == rates.update_secs
    assert (found["work"]["tokens"], found["precision"], found["topk_ratio"]) == (2048, "bf16", 0.05)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "7B", "--preset", "h100")
    assert [found[name]["fits"] for name in ("zenflow", "zero_offload", "on_device")] == [True, True, False]
    assert estimate.main(["7B", "--preset", "h100"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1:] for line in shown.splitlines() if line.startswith("Fits")] == [
        ["yes", "yes", "does", "not", "fit"]
    ]
    assert "ZenFlow is " in shown
    assert estimate.main(["70B", "--preset", "4090"]) == 0
    assert "ZenFlow does not fit either: a device has 23.0 GiB to give" in " ".join(capsys.readouterr().out.split())
    assert estimate.main(["100M", "--preset", "4090"]) == 0
    assert "It fits without offload" in capsys.readouterr().out


def test_options_reach_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys, "1B", "--preset", "l4")
    assert printed(capsys, "1B", "--preset", "l4", "--checkpointing")["on_device"]["step"]["compute_secs"] == (
        pytest.approx(4 / 3 * plain["on_device"]["step"]["compute_secs"])
    )
    twice = printed(capsys, "1B", "--preset", "l4", "--precision", "fp32")
    assert twice["zero_offload"]["device"]["weights_bytes"] == 2 * plain["zero_offload"]["device"]["weights_bytes"]
    assert printed(capsys, "1B", "--preset", "l4", "--update-interval", "7")["update_interval"] == 7
    assert printed(capsys, "1B", "--preset", "l4", "--accumulate-grad-batches", "2")["work"]["micro_batches"] == 2
    given = ["--device-flops", "2e13", "--link-bandwidth", "1e10", "--host-bandwidth", "2e10"]
    rates = printed(capsys, "1B", "--preset", "l4", *given)["machine"]["rates"]
    assert (rates["compute_flops"], rates["beside_flops"], rates["up_secs"]) == (2e13, 2e13, 2e-10)
    assert rates["accumulate_secs"] == 5e-10


def test_zero_3_and_offloaded_parameters_reach_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["7B", "--preset", "4090", "--devices", "4", "--stage", "3"]
    rates = PRESETS["4090"].rates(2)
    for options, offloads in (([], False), (["--offload-parameters"], True)):
        found = printed(capsys, *args, *options)
        work = Work(
            numel=7 * 10**9, selected_numel=7 * 10**8, tokens=4096, ranks=4, stage=3, offload_parameters=offloads
        )
        interval = recommended.smallest_update_interval(work, rates)
        arena_bytes = ArenaLayout(1_750_000_000, torch.bfloat16, interval).touched_nbytes
        assert found["update_interval"] == interval
        assert found["zenflow"]["step"]["step_secs"] == costs.zenflow(work, rates, interval).step_secs
        assert found["zenflow"]["device"]["total_bytes"] == footprint.zenflow_device(work, rates).total_bytes
        assert found["zenflow"]["host_bytes"] == arena_bytes + offloads * 3_500_000_000
        assert found["zenflow"]["traffic"] == dataclasses.asdict(traffic.zenflow(work, interval))
        assert found["zero_offload"]["host_bytes"] == (16 + 2 * offloads) * 1_750_000_000
        # Without any offload the weights stay on the devices too.
        assert found["on_device"]["host_bytes"] == found["on_device"]["traffic"]["to_device_bytes"] == 0
        assert found["on_device"]["device"]["weights_bytes"] == 2 * (1_750_000_000 + 550_000_000)


def test_selecting_takes_a_score_for_each_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_2_7B))
    args = [str(path), "--preset", "a100", "--devices", "4"]
    columns = 2 * 4096 + 32 * (6 * 4096 + 11008)
    found = printed(capsys, *args)
    assert found["score_bytes"] == 2 * 3 / 4 * 4 * columns
    assert found["select_bytes"] == found["score_bytes"] + 3 / 4 * 2 * 6_738_415_616
    assert estimate.main(args) == 0
    assert "To select, a device receives 6.6 MiB of scores and 9.4 GiB of weights from the others." in " ".join(
        capsys.readouterr().out.split()
    )
    found = printed(capsys, *args, "--topk-ratio", "0")
    assert found["score_bytes"] == found["select_bytes"] == 0


def test_what_zero_3_is_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*args: str) -> str:
        assert estimate.main([*args]) == 0
        return " ".join(capsys.readouterr().out.split())

    large = ["30B", "--devices", "8", "--preset", "4090", "--topk-ratio", "0.05"]
    assert "lower topk_ratio, or use more devices, or --stage 3." in shown(*large)
    assert "It fits under ZeRO-2" not in shown(*large, "--stage", "3")
    small = shown("3B", "--devices", "2", "--preset", "4090", "--stage", "3", "--offload-parameters")
    assert "on 2 devices, ZeRO-3, parameters in host memory" in small
    assert "It fits under ZeRO-2 as well" in small
    assert "use more devices, or --offload-parameters." in shown("70B", "--preset", "4090", "--stage", "3")
    assert "DeepSpeed's ZeRO-3 alone is then exact" in shown("100M", "--preset", "4090", "--stage", "3")


@pytest.mark.parametrize("topk_ratio", ["0", "1"])
def test_with_nothing_to_choose_there_is_no_select_interval(
    topk_ratio: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "1B", "--preset", "l4", "--topk-ratio", topk_ratio)["select_interval"] is None
    assert estimate.main(["1B", "--preset", "l4", "--topk-ratio", topk_ratio]) == 0
    assert "nothing to select" in capsys.readouterr().out


def test_a_class_and_its_arguments_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, f"{__name__}.Tied", "--model-args", '{"width": 5, "depth": 2}', "--preset", "l4")
    assert (found["size"]["numel"], found["work"]["largest_numel"]) == (115, 55)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Gives fixed rates instead of measuring; what was asked for is in the list."""
    asked: list[tuple[Any, ...]] = []

    def rehearse(*args: Any) -> Rates:
        asked.append(args)
        return MEASURED

    monkeypatch.setattr(machine, "rehearse", rehearse)
    monkeypatch.setattr(machine, "split_cores", lambda ranks=1: ([0], [1]))
    monkeypatch.setattr(machine, "host_limits", lambda: [Available(10**10, "", ""), Available(10**9, "", "")])
    return asked


def test_without_a_preset_this_machine_is_measured(
    rehearsed: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "1M",
        "--batch-tokens",
        "64",
        "--accumulate-grad-batches",
        "4",
        "--topk-ratio",
        "0.2",
        "--precision",
        "fp16",
    ]
    found = printed(capsys, *args)
    assert rehearsed == [(16, torch.float16, 0.2, [0], [1])]
    assert found["machine"]["rates"] == {
        name: None if value == math.inf else value for name, value in dataclasses.asdict(MEASURED).items()
    }
    assert found["zenflow"]["step"]["compute_secs"] == pytest.approx(6 * 1e6 * 64 / 0.8e12)
    assert found["on_device"]["step"]["compute_secs"] == pytest.approx(6 * 1e6 * 64 / 1e12)


def test_where_the_cpu_is_the_device_both_sides_must_fit_into_one_memory(
    rehearsed: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    # 1 GB: about 2 + 1.4 bytes on the device and 18 on the host for each parameter.
    assert printed(capsys, "30M")["zenflow"]["fits"] is True
    assert printed(capsys, "50M")["zenflow"]["fits"] is False
    assert estimate.main(["70M"]) == 0
    assert "the host has 0.9 GiB for 1 rank;" in " ".join(capsys.readouterr().out.split())


def test_ranks_share_the_bandwidth_of_the_hosts_memory(
    rehearsed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A rank alone moves 10 bytes in 1 ns: four of them would need 40 GB/s.
    monkeypatch.setattr(machine, "host_bandwidth", lambda cores: HostBandwidth(20e9, len(cores)))
    rates = printed(capsys, "1M", "--devices", "4")["machine"]["rates"]
    assert (rates["accumulate_secs"], rates["update_secs"], rates["offload_step_secs"]) == (2e-9, 8e-9, 4e-9)
    assert rates["down_secs"] == MEASURED.down_secs
    monkeypatch.setattr(machine, "host_bandwidth", lambda cores: HostBandwidth(90e9, len(cores)))
    assert printed(capsys, "1M", "--devices", "4")["machine"]["rates"]["update_secs"] == MEASURED.update_secs


def test_cores_are_taken_from_the_end(rehearsed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert estimate.main(["1M", "--cores", "3", "--json"]) == 0
    assert rehearsed[-1][3:] == ([0], [1, 2, 3])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["7B", "--cores", "9999"], "`--cores` must be at most"),
        (["seven", "--preset", "l4"], "`model` must be a number such as 7B"),
        (["1e400", "--preset", "l4"], "`model` must have 1 to 1e+15 parameters, got '1e400'. Write"),
        (["7B", "--preset", "h101"], "preset"),
        (["7B", "--topk-ratio", "1.5"], "topk_ratio"),
        (["7B", "--devices", "0"], "devices"),
        (["7B", "--devices", "1000001"], "`--devices` must be at most 1000000, got 1000001. Give"),
        (["7B", "--devices", "1" + "0" * 400], "`--devices` must be at most 1000000, got 1000"),
        (["7B", "--batch-tokens", "1" + "0" * 400], "`--batch-tokens` must be at most 1000000000000, got 1000"),
        (["7B", "--update-interval", "1001"], "`--update-interval` must be at most 1000, got 1001. Give"),
        (["7B", "--cores", "10001", "--preset", "l4"], "`--cores` must be at most 10000, got 10001. Give"),
        (
            ["7B", "--batch-tokens", "8", "--accumulate-grad-batches", "9"],
            "`--accumulate-grad-batches` must be at most `--batch-tokens` 8, got 9. Give",
        ),
        *(
            (["7B", "--preset", "l4", option, value], f"`{option}` must be from 1e+03 to 1e+21 ")
            for option in ("--device-flops", "--host-bandwidth", "--link-bandwidth")
            for value in ("inf", "999", "1e-300", "1e22")
        ),
        (["7B", "--preset", "l4", "--device-flops", "nan"], "device_flops"),
        (["7B", "--preset", "l4", "--stage", "4"], "stage"),
        (
            ["7B", "--preset", "l4", "--offload-parameters"],
            "`--offload-parameters` must be left out with `--stage` 2, ",
        ),
        (["7B", "--preset", "cpu-two-cores", "--cores", "64"], "`--cores` must be 1 with --preset cpu-two-cores"),
        ([], "model"),
    ],
)
def test_a_wrong_argument_ends_with_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *args)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a person reads when the command refuses `args`."""
    with pytest.raises(SystemExit) as exit_info:
        estimate.main(list(args))
    assert exit_info.value.code == 2
    shown = capsys.readouterr()
    assert "usage:" not in shown.err and "Traceback" not in shown.err
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "args",
    [
        ["1e15", "--batch-tokens", "1000000000000", "--accumulate-grad-batches", "1000000000000"],
        ["1e15", "--topk-ratio", "1e-300", "--update-interval", "1000"],
        ["1", "--devices", "1000000", "--batch-tokens", "1", "--cores", "10000"],
        [
            "1",
            "--device-flops",
            "1e21",
            "--link-bandwidth",
            "1e21",
            "--host-bandwidth",
            "1e21",
            "--topk-ratio",
            "1e-300",
        ],
        ["1e15", "--device-flops", "1e3", "--link-bandwidth", "1e3", "--host-bandwidth", "1e3", "--topk-ratio", "1"],
    ],
)
def test_the_ends_of_all_ranges_have_an_estimate(
    args: list[str], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, *args, "--preset", "h100", "--precision", precision)
    assert found["zenflow"]["step"]["step_secs"] > 0
    assert estimate.main([*args, "--preset", "h100", "--precision", precision]) == 0


def test_a_preset_that_was_measured_takes_the_cores_it_was_measured_with(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys, "1M", "--preset", "cpu-two-cores")
    assert printed(capsys, "1M", "--preset", "cpu-two-cores", "--cores", "1") == plain


def run_into(stdout: int, *args: str) -> tuple[int, str]:
    """Exit code and standard error of the command in a process of its own, whose terminal knows ASCII alone."""
    code = "import sys; from lightning_zenflow.cli.estimate import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("option", [[], ["--json"], ["--help"]])
def test_a_reader_who_has_left_is_no_error(option: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_into(writing, "7B", "--preset", "l4", *option) == (0, "")
    finally:
        os.close(writing)


def test_letters_that_a_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    config, shown = tmp_path / "ü.json", tmp_path / "shown"
    config.write_text(json.dumps(GPT2))
    with shown.open("wb") as file:
        assert run_into(file.fileno(), str(config), "--preset", "l4") == (0, "")
    assert r"\xfc.json (gpt2): 124,439,808 trainable" in shown.read_text(encoding="ascii")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("options", [[], ["--stage", "3", "--offload-parameters"]], ids=["stage 2", "offloaded"])
def test_the_table_fits_and_has_no_colour_codes(
    columns: int, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert estimate.main(["7B", "--preset", "h100", "--devices", "8", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("\x1b" in line for line in lines)
    parts = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert parts["Limited by"][2:] == ["compute", "host", "compute"]
    # With offloaded parameters the selected tenth goes to the host too.
    assert parts["To the host, a step"][5:] == ["1.8" if options else "1.6", "GiB", "3.3", "GiB", "-"]


def test_help_names_every_option_and_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        estimate.main(["--help"])
    assert exit_info.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Tokens per device and optimizer step, over all its micro-batches" in shown
    assert "llama, mistral, qwen2, gpt2, bert" in shown
    assert all(name in shown for name in PRESETS)
