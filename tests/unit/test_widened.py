"""Moments in 16 bit are written in 32 bit without a copy of them in memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from lightning_zenflow.checkpoint import widened
from lightning_zenflow.checkpoint.widened import Widening
from lightning_zenflow.zero.files import write


def test_stand_ins_are_written_with_their_sources_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "PIECE_NUMEL", 7)
    widening, whole = Widening(), torch.randn(1000).bfloat16()
    sources = [whole, whole[3:500], whole[:1], whole[:0]]
    stand_ins = [widening.stand_in(source) for source in sources]
    assert [(tensor.dtype, tensor.shape) for tensor in stand_ins] == [
        (torch.float32, source.shape) for source in sources
    ]
    others = [torch.randn(1000), torch.arange(5), torch.tensor(3.0)]
    write(tmp_path / "file.pt", {"stand-ins": stand_ins, "again": stand_ins[1], "others": others}, widening)
    assert widening.complete()
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    for tensor, source in zip([*found["stand-ins"], found["again"]], [*sources, sources[1]], strict=True):
        assert tensor.dtype == torch.float32 and torch.equal(tensor, source.float())
    assert all(torch.equal(tensor, other) for tensor, other in zip(found["others"], others, strict=True))


def test_what_was_not_written_is_filled_for_a_second_try_or_forgotten(tmp_path: Path) -> None:
    widening, source = Widening(), torch.randn(100).bfloat16()
    written, missed = widening.stand_in(source[:50]), widening.stand_in(source)
    write(tmp_path / "first.pt", [written], widening)
    assert not widening.complete() and torch.equal(missed, source.float()) and widening.complete()
    widening.stand_in(source)
    widening.forget()
    assert widening.complete()


def test_writing_takes_no_memory_for_what_is_widened(tmp_path: Path) -> None:
    source = torch.zeros(50_000_000, dtype=torch.bfloat16)
    source.fill_(1.5)
    process, widening = psutil.Process(), Widening()
    peaks = []
    real = widening.parts

    def parts(data: memoryview) -> object:
        for part in real(data):
            peaks.append(process.memory_info().rss)
            yield part

    before = process.memory_info().rss
    widening.parts = parts  # type: ignore[method-assign, assignment]
    write(tmp_path / "file.pt", [widening.stand_in(source)], widening)
    assert len(peaks) > 40 and max(peaks) - before < 30e6, "the copy would be 200 MB"
    found = torch.load(tmp_path / "file.pt", mmap=True, weights_only=True)[0]
    assert found.numel() == source.numel() and (found == 1.5).all()
