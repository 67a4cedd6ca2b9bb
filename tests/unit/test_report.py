"""`lightning-zenflow report`: what it says about records whose numbers are known."""

from __future__ import annotations

import base64
import json
import math
import os
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from lightning_zenflow.cli.report import PAGE, PICTURE, TRACE, main
from lightning_zenflow.cli.report.bins import bins_of, running_ratio
from lightning_zenflow.cli.report.lanes import windows_of
from lightning_zenflow.cli.report.read import find_files, read_run
from lightning_zenflow.cli.report.series import series_of
from lightning_zenflow.cli.report.style import COLOURS
from lightning_zenflow.cli.report.words import count_text
from lightning_zenflow.wording import in_words
from tests.records import Line, decision_line, header, simulate, step_line, write, write_run


class Page(HTMLParser):
    """Collects the cells of all rows, in and outside <details>, and insists on closed tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.rows: list[list[str]] = []
        self.kept_rows: list[list[str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "tr":
            (self.kept_rows if "details" in self.open else self.rows).append([])
        elif tag in ("td", "th"):
            self._row().append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self._row()[-1] += data

    def _row(self) -> list[str]:
        return (self.kept_rows if "details" in self.open else self.rows)[-1]

    def row(self, name: str) -> list[str]:
        """The cells beside `name`."""
        return next(cells[1:] for cells in self.rows if cells[0] == name)


def report(record: Path, *options: str) -> tuple[Page, list[dict[str, Any]]]:
    """Page and trace of the report on `record`."""
    main([str(record), *options])
    folder = Path(options[options.index("--output") + 1]) if "--output" in options else record
    folder = folder if folder.is_dir() else folder.parent
    return Page(folder / PAGE), trace_events(folder / TRACE)


def trace_events(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    events: list[dict[str, Any]] = json.loads(path.read_text(), parse_constant=refuse)["traceEvents"]
    return events


def steps_of(lines: list[Line], after: int = 0) -> list[Line]:
    return [line for line in lines if line["kind"] == "step" and line["step"] > after]


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr with which the report refuses `args`."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(args))
    assert exit_info.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.endswith("\n") and shown.err.count("\n") == 1
    return shown.err


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_page_and_terminal_are_those_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = records = simulate(300)
    page, _ = report(write_run(tmp_path, records))
    expected: list[dict[str, str]] = []
    for steps in (steps_of(lines), steps_of(lines, after=208)):
        total = sum(line["step_secs"] for line in steps)
        update, select = (sum(line[f"{kind}_stall_secs"] for line in steps) for kind in ("update", "select"))
        host = sum(line["worker_accumulate_secs"] + line["worker_update_secs"] for line in steps)
        slowest = max(steps, key=lambda line: float(line["step_secs"]))
        expected.append(
            {
                "Steps": f"{steps[0]['step']} to {steps[-1]['step']}",
                "Median step": f"{1000 * statistics.median(line['step_secs'] for line in steps):.0f} ms",
                "Slowest step": f"{in_words(slowest['step_secs'])} (step {slowest['step']})",
                "Stall, share of the time": percent(update + select, total)
                + (", over the budget" if update + select > 0.05 * total else ""),
                "of it update stall": percent(update, total),
                "of it select stall": percent(select, total),
                "Host busy, share of the time": percent(host, total),
                "To the host, mean of a step": "121 MB",
                "Re-selections": str(sum(line["reselected"] for line in steps)),
            }
        )
    for name in expected[0]:
        assert page.row(name) == [numbers[name] for numbers in expected]
    assert page.row("Pauses between steps") == ["1, 6.00 s together"]
    assert page.row("Intervals at the end") == ["update every 6, select every 128 steps"]
    shown = capsys.readouterr().out
    whole = expected[0]
    stall = f"{whole['Stall, share of the time'].split(',')[0]} of the time (budget 5.0 %)"
    assert f"median {whole['Median step']}, slowest {whole['Slowest step']}" in shown
    assert f"{stall}: update {whole['of it update stall']}, select {whole['of it select stall']}" in shown
    assert f"busy {whole['Host busy, share of the time']} of the time" in shown
    assert [str(tmp_path / name) in shown for name in (PICTURE, PAGE, TRACE)] == [True] * 3
    assert len(shown.splitlines()) == 9


def test_with_several_ranks_the_stall_is_that_of_the_rank_that_waits_longest(tmp_path: Path) -> None:
    waits = [[0.01, 0.05, 0.00], [0.03, 0.02, 0.5]]
    ranks = [
        [header(rank, 2), *(step_line(i, update_stall_secs=secs) for i, secs in enumerate(waits[rank], 1))]
        for rank in range(2)
    ]
    ranks[0][2]["worker_update_secs"] = 0.1
    ranks[1][1]["worker_accumulate_secs"] = 0.09
    page, _ = report(write_run(tmp_path, ranks))
    # In the third step rank 1 claims more than the 0.2 s that the step took.
    assert page.row("Stall, share of the time (the rank that waits longest)") == [
        percent(0.03 + 0.05 + 0.2, 0.6) + ", over the budget"
    ]
    assert page.row("Host busy, share of the time (the busiest)") == [
        percent((0.09 + 0.05) + (0.04 + 0.1) + (0.04 + 0.05), 0.6)
    ]


def test_a_zoom_counts_its_steps_only_and_says_so(tmp_path: Path) -> None:
    (lines,) = records = simulate(120)
    page, events = report(
        write_run(tmp_path, records), "--steps", "30:59", "--output", str(tmp_path / "new" / "folder")
    )
    steps = [line for line in steps_of(lines) if 30 <= line["step"] <= 59]
    assert page.row("Median step")[0] == f"{1000 * statistics.median(line['step_secs'] for line in steps):.0f} ms"
    assert "Shows steps 30 to 59 of 1 to 120." in page.text
    names = [event["name"] for event in events if event["name"].startswith("step ")]
    assert names == [f"step {step}" for step in range(30, 60)]


@pytest.mark.parametrize(("steps", "shown"), [(":7", "1 to 7"), ("8:", "8 to 10"), ("3:3", "3 to 3"), (":", "1 to 10")])
def test_either_end_of_a_zoom_may_be_left_out(tmp_path: Path, steps: str, shown: str) -> None:
    page, _ = report(write_run(tmp_path, [[header(), *map(step_line, range(1, 11))]]), "--steps", steps)
    assert page.row("Steps") == [shown]


def test_the_typical_step_of_a_bin_is_its_median_and_the_slowest_its_longest(tmp_path: Path) -> None:
    secs = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6, 0.9, 0.8, 0.7]
    series = series_of(read_run([write(tmp_path / "a.jsonl", [header(), *steps_with(secs)])]))
    bins = bins_of(series, 3)
    assert [secs[i] for i in bins.typical] == [0.2, 0.5, 0.8]
    assert [secs[i] for i in bins.slowest] == [0.3, 0.6, 0.9]
    assert (bins.start.tolist(), bins.stop.tolist()) == ([0, 3, 6], [3, 6, 9])


def steps_with(secs: list[float]) -> list[Line]:
    return [step_line(i, begin_secs=float(i), step_secs=s, update_stall_secs=0.1) for i, s in enumerate(secs, 1)]


def test_the_running_share_is_that_of_the_last_steps(tmp_path: Path) -> None:
    series = series_of(read_run([write(tmp_path / "a.jsonl", [header(), *steps_with([0.5, 0.5, 1.0, 0.2])])]))
    running = running_ratio(series, series.stall_secs, 2)
    assert running.tolist() == pytest.approx([0.1 / 0.5, 0.2 / 1.0, 0.2 / 1.5, 0.2 / 1.2])


def test_counts_read_well() -> None:
    assert [count_text(n, "B") for n in (0, 999, 1500, 67_108_864, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "67.1 MB",
        "2.50 GB",
    ]


# -- picture -----------------------------------------------------------------------------------------------------------


def test_the_picture_shows_every_kind_of_work(tmp_path: Path) -> None:
    records = simulate(150, ranks=2)
    for line in steps_of(records[0]):  # which happens between steps only, and so seldom in a lane
        line["spans"].append(["device", "settle", line["begin_secs"] + 0.03, 0.03])
        line["spans"].append(["device", "copy block", line["begin_secs"] + 0.07, 0.01])
    report(write_run(tmp_path, records))
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = imread(tmp_path / PICTURE).shape
    assert width == 1400 and 900 < height < 1300
    with_spans = pixels_of(tmp_path / PICTURE)
    # A patch of the legend has fewer than 300 pixels.
    assert {name for name, pixels in with_spans.items() if pixels < 1000} == set()
    for line in (line for lines in records for line in steps_of(lines)):
        line["spans"] = [span for span in line["spans"] if span[1] != "gradient norm"]
    report(write_run(tmp_path, records))
    # Black is in the texts, too.
    assert with_spans["gradient norm"] - pixels_of(tmp_path / PICTURE)["gradient norm"] > 1000


def pixels_of(picture: Path) -> dict[str, int]:
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    wanted = {name: [int(colour[i : i + 2], 16) for i in (1, 3, 5)] for name, colour in COLOURS.items()}
    return {name: int((pixels == colour).all(axis=2).sum()) for name, colour in wanted.items()}


def test_the_users_matplotlib_settings_neither_change_the_picture_nor_are_changed(tmp_path: Path) -> None:
    record = write_run(tmp_path, simulate(20))
    report(record)
    usual = (tmp_path / PICTURE).read_bytes()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30.0, "lines.linewidth": 9.0}):
        before = dict(matplotlib.rcParams)
        report(record)
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / PICTURE).read_bytes() == usual


def test_the_lanes_show_usual_steps_after_the_last_change_and_a_reselection(tmp_path: Path) -> None:
    (lines,) = records = simulate(450)
    run = read_run(find_files(write_run(tmp_path, records)))
    usual, selection = windows_of(run, series_of(run))
    selected = {line["step"] for line in steps_of(lines) if line["reselected"]}
    steps = [step for step, _ in usual.begins]
    assert len(steps) == 5 and min(steps) > 208 and not selected & set(steps) and not usual.cuts
    assert selection.begins[1][0] in selected and selection.begins[1][0] > 208
    by_step = {line["step"]: line for line in steps_of(lines)}
    assert selection.begins[1][1] == pytest.approx(
        by_step[selection.begins[1][0]]["begin_secs"] - by_step[selection.begins[0][0]]["begin_secs"]
    )
    # The host's work for the last step shown is listed in the record of the step after it.
    updates = [bar for bar in usual.bars if bar.name == "accumulate"]
    assert updates[-1].start_secs > usual.begins[-1][1]


def test_the_usual_steps_are_those_next_to_the_median(tmp_path: Path) -> None:
    # The median is 0.30; the five steps from the 13th on stay closest to it.
    secs = [0.20, 0.40, 0.31] * 4 + [0.30, 0.31, 0.29, 0.30, 0.30] + [0.29, 0.40, 0.20] * 4
    begins = np.concatenate([[0.0], np.cumsum(secs)]).tolist()
    lines = [step_line(i, begin_secs=begins[i - 1], step_secs=secs[i - 1]) for i in range(1, len(secs) + 1)]
    run = read_run([write(tmp_path / "a.jsonl", [header(), *lines])])
    (window,) = windows_of(run, series_of(run))
    assert [step for step, _ in window.begins] == [13, 14, 15, 16, 17]


def test_steps_that_were_not_recorded_are_no_pause(tmp_path: Path) -> None:
    lines = [step_line(i, reselected=i % 32 == 0) for i in range(4, 101, 4)]
    record = write(tmp_path / "zenflow.jsonl", [header(), *lines])
    page, _ = report(record)
    assert page.row("Pauses between steps") == ["none"]
    assert "Of the steps 4 to 100, 25 were recorded." in page.text
    run = read_run([record])
    assert [len(window.begins) for window in windows_of(run, series_of(run))] == [1, 1]
    assert [window.secs for window in windows_of(run, series_of(run))] == pytest.approx([0.2, 0.2])


def test_pauses_are_cut_out_of_the_lanes(tmp_path: Path) -> None:
    def paused(step: int) -> Line:
        begin = 10.0 * step
        spans = [["device", "forward and backward", begin, 0.15], ["host", "update", begin + 0.1, 0.1]]
        return step_line(step, begin_secs=begin, spans=spans)

    run = read_run([write(tmp_path / "a.jsonl", [header(), *map(paused, range(1, 9))])])
    (window,) = windows_of(run, series_of(run))
    ((left, right, secs),) = window.cuts
    assert (left, secs) == pytest.approx((0.2, 9.8))
    assert [begin for _, begin in window.begins] == pytest.approx([0.0, right])
    assert window.secs == pytest.approx(right + 0.2) and window.secs < 0.6
    assert sorted(bar.start_secs for bar in window.bars) == pytest.approx([0.0, 0.1, right, right + 0.1])


# -- page --------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page, _ = report(write_run(tmp_path, simulate(100)))
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "http" not in (tmp_path / PAGE).read_text(encoding="utf-8")
    ((_, _, source),) = [found for found in page.attributes if found[1] in ("src", "href")]
    assert source is not None
    kind, _, picture = source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(picture) == (tmp_path / PICTURE).read_bytes()


def test_the_page_lists_every_decision_and_folds_those_that_changed_nothing(tmp_path: Path) -> None:
    (lines,) = records = simulate(220)
    page, _ = report(write_run(tmp_path, records))
    decisions = [line for line in lines if line["kind"] == "decision"]
    changed = [line for line in decisions if not line["reason"].startswith("kept")]
    listed = [cells for cells in page.rows if len(cells) == 5][1:]
    assert [(cells[0], cells[1]) for cells in listed] == [("1", "48"), ("2", "112"), ("3", "208")]
    assert [cells[2:4] for cells in listed] == [
        ["every 5", "every 64 steps"],
        ["every 6", "every 64 steps"],
        ["every 6", "every 128 steps"],
    ]
    assert all(cells[4].startswith(line["reason"]) for cells, line in zip(listed, changed, strict=True))
    assert "step_secs 0.1934" in listed[0][4]
    assert [cells[1] for cells in page.kept_rows[1:]] == [str(d["step"]) for d in decisions if d not in changed]


def test_a_page_of_too_many_decisions_keeps_the_last_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_zenflow.cli.report.page.MOST_DECISION_CHARACTERS", 3000)
    lines = [line for step in range(1, 101) for line in (step_line(step), decision_line(step, (4, 64), (4, 64)))]
    page, _ = report(write_run(tmp_path, [[header(), *lines]]))
    listed = [int(cells[1]) for cells in page.kept_rows[1:]]
    assert 10 < len(listed) < 30 and listed == list(range(101 - len(listed), 101))
    assert f"The last {len(listed)}; the record has all." in page.text


def test_texts_of_the_record_are_shown_as_they_are_and_never_run(tmp_path: Path) -> None:
    evil = "<script>alert('$\\frac{$')</script> & \"quoted\" \u5b57 \ud800"
    lines = [
        header(device=evil, settings={evil: evil, "topk_ratio": math.inf}, versions={"torch": evil}),
        step_line(1, spans=[["device", evil, 0.0, 0.1]]),
        decision_line(1, (5, None), (4, 64), reason=evil),
        step_line(2, select_interval=None),
    ]
    page, events = report(write_run(tmp_path, [lines]))
    shown = evil.replace("\ud800", "?")
    assert page.row(shown) == [shown] and page.row("torch") == [shown] and page.row("topk_ratio") == ["inf"]
    assert any(cells[3:5] and cells[3] == "never" and cells[4].startswith(shown) for cells in page.rows)
    assert "script" not in page.tags
    assert evil in {event["name"] for event in events}


# -- trace -------------------------------------------------------------------------------------------------------------


def test_the_trace_has_every_span_once_in_named_lanes_in_the_order_of_time(tmp_path: Path) -> None:
    records = simulate(70, ranks=3)
    _, events = report(write_run(tmp_path, records))
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(r, t): lane for r in range(3) for t, lane in enumerate(("steps", "device", "host"))}
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times) and times[0] >= 0
    work = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in work)
    for rank, lines in enumerate(records):
        for lane in ("device", "host"):
            shown = sorted((e["name"], e["dur"]) for e in work if (e["pid"], threads[rank, e["tid"]]) == (rank, lane))
            recorded = sorted((s[1], 1e6 * s[3]) for line in steps_of(lines) for s in line["spans"] if s[0] == lane)
            assert [name for name, _ in shown] == [name for name, _ in recorded]
            # The record has whole microseconds, so that neighbours may overlap by one.
            assert np.allclose([dur for _, dur in shown], [dur for _, dur in recorded], atol=2)


def test_ranks_with_different_clocks_are_shown_side_by_side(tmp_path: Path) -> None:
    _, events = report(write_run(tmp_path, simulate(30, ranks=3)))
    begins = [[e["ts"] for e in events if e["name"] == "step 20" and e["pid"] == rank] for rank in range(3)]
    assert begins[1] == begins[2] == pytest.approx(begins[0], abs=2)


def test_work_that_overlaps_half_is_shortened_in_the_trace(tmp_path: Path) -> None:
    spans = [["device", "a", 0.0, 0.1], ["device", "b", 0.09, 0.05], ["device", "c", 0.1, 0.02]]
    _, events = report(write_run(tmp_path, [[header(), step_line(1, spans=spans)]]))
    shown = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert (shown["a"], shown["b"], shown["c"]) == ((0.0, 90_000.0), (90_000.0, 50_000.0), (100_000.0, 20_000.0))


def test_work_of_before_the_run_is_shown_and_no_time_is_negative(tmp_path: Path) -> None:
    spans = [["host", "update", -0.5, 0.2], ["device", "forward and backward", 0.0, 0.1]]
    _, events = report(write_run(tmp_path, [[header(), step_line(1, begin_secs=-0.1, spans=spans)]]))
    shown = {e["name"]: e["ts"] for e in events if e["ph"] == "X"}
    assert shown == {"update": 0.0, "step 1": 400_000.0, "forward and backward": 500_000.0}


def test_the_trace_counts_stall_and_intervals(tmp_path: Path) -> None:
    _, events = report(write_run(tmp_path, simulate(220)))
    intervals = [e["args"]["value"] for e in events if e["name"] == "update interval, steps"]
    assert intervals == [4, 5, 6, 6]  # the last one where the other interval changes
    stalls = [e["args"]["value"] for e in events if e["name"] == "stall share, %"]
    assert len(stalls) == 220 and min(stalls) >= 0 and max(stalls) <= 100
    changes = [(e["name"], e["ph"]) for e in events if e["name"].startswith("change ")]
    assert changes == [("change 1", "i"), ("change 2", "i"), ("change 3", "i")]


@pytest.mark.parametrize(("norm", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_gradient_norm_that_is_not_finite_is_counted_and_leaves_the_trace_json(
    tmp_path: Path, norm: float, text: str
) -> None:
    page, events = report(write_run(tmp_path, [[header(), step_line(1), step_line(2, grad_norm=norm), step_line(3)]]))
    assert page.row("Steps whose gradient norm is not finite") == ["1"]
    assert [e["args"]["gradient norm"] for e in events if e["name"].startswith("step ")] == [1.5, text, 1.5]


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_last_line_that_is_cut_off_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = write(tmp_path / "zenflow.jsonl", [header(), *map(step_line, range(1, 6))])
    record.write_bytes(record.read_bytes()[:-30])
    page, _ = report(record)
    assert page.row("Steps") == ["1 to 4"]
    sentence = "The last line of zenflow.jsonl is cut off, as a killed run leaves it; it is not used."
    assert sentence in page.text and sentence in capsys.readouterr().out


def test_a_whole_last_line_counts_without_its_line_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = write(tmp_path / "zenflow.jsonl", [header(), step_line(1), step_line(2)])
    record.write_bytes(record.read_bytes().rstrip())
    page, _ = report(record)
    assert page.row("Steps") == ["1 to 2"]
    assert "cut off" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"`RUN` must be a record of StallMonitor, got .*zenflow.jsonl, which is empty\. Give"),
        ("\x00\x01\n", r"`RUN` must be a record of StallMonitor, .* no line of which begins a run\. Give"),
        ('{"loss": 1}\n[]\n"run"\n', r"`RUN` must be a record of StallMonitor, .* no line of which begins a run\."),
        ([header()], r"`RUN` must hold a step, got .*zenflow.jsonl without one\. Let the run reach"),
        ([header(), step_line(1), header()], r"got .*zenflow.jsonl, the last of 2 runs, without one"),
        ([header(format=2), step_line(1)], r"`format` must be 1 .*, got 2\. Make the report with the version"),
        (
            [header(), step_line(1), 7, step_line(2)],
            r"line 3 is not as the record has it \(`line` must be a JSON object, got 7",
        ),
        ([header(), {"step": 1}], r"line 2 .*`kind` must be a string, got nothing"),
        ([{**header(), "rank": "0"}, step_line(1)], r"line 1 .*`rank` must be a whole number of 0 or more, got '0'"),
        ([header(settings=None), step_line(1)], r"line 1 .*`settings` must be a mapping, got None"),
        (
            [header(), step_line(1, step_secs=math.nan)],
            r"line 2 .*`step_secs` must be a finite number of 0 or more, got nan",
        ),
        ([header(), step_line(1, update_stall_secs=-1)], r"line 2 .*`update_stall_secs` must be .*, got -1"),
        ([header(), step_line(1, begin_secs=10**400)], r"line 2 .*`begin_secs` must be .*, got 1000.*0000"),
        (
            [header(), step_line(1, update_interval=0)],
            r"line 2 .*`update_interval` must be a whole number of 1 or more, got 0",
        ),
        ([header(), step_line(1, reselected=1)], r"line 2 .*`reselected` must be true or false, got 1"),
        ([header(), step_line(2), step_line(2)], r"line 3 .*`step` must be above the step before it, 2, got 2"),
        ([header(), step_line(1, spans=[["gpu", "x", 0, 1]])], r"line 2 .*`spans` must hold lists of lane, .*'gpu'"),
        (
            [header(), step_line(1), {**decision_line(1, (5, 64), (4, 64)), "reason": 1}],
            r"line 3 .*`reason` must be a string",
        ),
    ],
)
def test_a_record_that_cannot_be_shown_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | list[Any], message: str
) -> None:
    record = tmp_path / "zenflow.jsonl"
    if isinstance(content, str):
        record.write_text(content)
    else:
        write(record, content)
    error = refused(capsys, str(record))
    assert_matches(error, message)
    assert len(error) < 400 + len(str(record))
    assert list(tmp_path.iterdir()) == [record]


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(text)


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write(tmp_path / "zenflow.jsonl", [header(), *map(step_line, range(1, 4))])
    lines = record.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:50] + b"\n"
    record.write_bytes(b"".join(lines))
    assert "whose line 3 is no JSON. Mend or remove that line." in refused(capsys, str(record))


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "which does not exist. Give the log folder" in refused(capsys, str(tmp_path / "none"))
    assert "without one. Train with the callback StallMonitor" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize("args", [[""], [".", "--output", ""]])
def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    record = write_run(tmp_path, [[header(), step_line(1)]])
    monkeypatch.chdir(tmp_path)
    name = "--output" if args[0] else "RUN"
    expected = f"error: `{name}` must be a path, got an empty one. Write . for the current folder.\n"
    assert refused(capsys, *args) == expected
    assert list(tmp_path.iterdir()) == [record]


@pytest.mark.parametrize("steps", ["9" * 5000 + ":", ":" + "9" * 5000, "9" * 19 + ":" + "9" * 19, "x" * 5000])
def test_a_zoom_of_thousands_of_digits_is_refused_in_a_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    record = write_run(tmp_path, [[header(), step_line(1)]])
    error = refused(capsys, str(record), "--steps", steps)
    assert "whole numbers of at most 18 digits, A at most B, got '" in error and "Write for example" in error
    assert len(error) < 250


@pytest.mark.parametrize("steps", ["5", "5:2", "a:b", "1:2:3", "-1:4"])
def test_a_zoom_that_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str) -> None:
    record = write_run(tmp_path, [[header(), step_line(1)]])
    assert f"A at most B, got {steps!r}. Write" in refused(capsys, str(record), f"--steps={steps}")


def test_a_zoom_without_a_step_is_refused_with_the_steps_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write_run(tmp_path, [[header(), step_line(3), step_line(4)]])
    assert "got 7:9. It has the steps 3 to 4." in refused(capsys, str(record), "--steps", "7:9")


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = write_run(tmp_path, [[header(), step_line(1)]])
    assert "zenflow.jsonl" in refused(capsys, str(record), "--output", str(record))


def run_into(stdout: int, *args: str) -> tuple[int, str]:
    """Exit code and standard error of the report in a process of its own, whose terminal knows ASCII alone."""
    code = "import sys; from lightning_zenflow.cli.report import main; main(sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", code, *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("option", [[], ["--help"]])
def test_a_reader_who_has_left_is_no_error(tmp_path: Path, option: list[str]) -> None:
    record = write_run(tmp_path, [[header(), step_line(1)]])
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_into(writing, str(record), *option) == (0, "")
    finally:
        os.close(writing)
    assert (tmp_path / TRACE).exists() is not bool(option)


@pytest.mark.parametrize(("name", "shown"), [("für", r"f\xfcr"), (os.fsdecode(b"f\xffr"), r"f\udcffr")])
def test_letters_that_a_terminal_lacks_are_escaped(tmp_path: Path, name: str, shown: str) -> None:
    record, printed = write_run(tmp_path / name, [[header(), step_line(1)]]), tmp_path / "printed"
    with printed.open("wb") as file:
        assert run_into(file.fileno(), str(record)) == (0, "")
    assert f"{shown}{os.sep}{PAGE}" in printed.read_text(encoding="ascii")
    assert (tmp_path / name / PAGE).exists()


def test_of_a_folder_the_record_written_last_is_shown_wherever_it_lies(tmp_path: Path) -> None:
    for age, version in enumerate(("version_10", "version_9", "version_11"), 1):
        folder = tmp_path / "lightning_logs" / version
        record = write_run(folder, [[header(), *map(step_line, range(1, age + 1))]])
        os.utime(record, (2_000_000_000 - age, 2_000_000_000 - age))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    main([str(tmp_path)])
    assert Page(tmp_path / "lightning_logs" / "version_10" / PAGE).row("Steps") == ["1 to 1"]


def test_of_several_runs_in_a_file_the_last_is_shown_and_the_number_said(tmp_path: Path) -> None:
    record = write(tmp_path / "zenflow.jsonl", [header(), *map(step_line, range(1, 9))])
    # The first run was killed in the middle of a line; the next one began a new line.
    record.write_bytes(record.read_bytes()[:-20] + b"\n")
    with record.open("a") as file:
        file.writelines(
            json.dumps(line) + "\n" for line in [header(), step_line(9), header(stage=3), step_line(9), step_line(10)]
        )
    page, _ = report(record)
    assert page.row("Steps") == ["9 to 10"]
    assert "The file holds 3 runs; this is the last." in page.text and "ZeRO stage 3" in page.text


@pytest.mark.parametrize("names", [("run.jsonl", "run.rank1.jsonl"), ("a.b.json", "a.b.rank1.json"), ("x", "x.rank1")])
def test_any_ranks_file_stands_for_the_run(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, lines in zip(names, simulate(6, ranks=2), strict=True):
        write(tmp_path / name, lines)
    write(tmp_path / "runs.jsonl", [header(), step_line(1)])
    for name in names:
        _, events = report(tmp_path / name)
        assert {event["pid"] for event in events} == {0, 1}
        assert sum(event["name"] == "step 6" for event in events) == 2


def test_ranks_without_a_record_are_said_and_those_of_another_run_left_out(tmp_path: Path) -> None:
    old = {"started": "2026-11-28T18:00:00+00:00"}
    write_run(
        tmp_path, [[header(0, 4), step_line(1)], [header(1, 4, **old), step_line(1)], [header(2, 4), step_line(1)]]
    )
    (tmp_path / "zenflow.rank3.jsonl").touch()
    page, events = report(tmp_path)
    assert {event["pid"] for event in events} == {0, 2}
    assert "zenflow.rank1.jsonl holds no step of this run and is left out." in page.text
    assert "zenflow.rank3.jsonl holds no step of this run and is left out." in page.text
    assert "Records of 2 of 4 ranks were found." in page.text


@pytest.mark.parametrize(
    "lines",
    [
        [header(stall_budget=None), step_line(1, select_interval=None)],
        [header(), step_line(1, step_secs=0, update_stall_secs=0, spans=[])],
        [header(), step_line(1), step_line(2, reselected=True, select_stall_secs=0.1)],
        [header(started="yesterday", shard_numel="?"), step_line(5), step_line(9)],
    ],
)
def test_the_shortest_runs_have_a_report_too(tmp_path: Path, lines: list[Line]) -> None:
    page, events = report(write_run(tmp_path, [lines]))
    assert page.row("Re-selections") == [str(sum(line.get("reselected", False) for line in lines))]
    assert sum(event["name"].startswith("step ") for event in events) == len(lines) - 1


# -- long runs ---------------------------------------------------------------------------------------------------------


def test_the_trace_of_a_long_run_keeps_the_steps_that_matter(tmp_path: Path) -> None:
    (lines,) = records = simulate(4_000)
    lines.append(decision_line(2_000, (7, 128), (6, 128)))
    _, events = report(write_run(tmp_path, records))
    shown = {int(e["name"].split(",")[0][5:]) for e in events if e["name"].startswith("step ")}
    assert 800 < len(shown) < 4_000
    assert {1, 2, 48, 49, 112, 113, 208, 209, 2_000, 3_999, 4_000} <= shown
    slowest = sorted(steps_of(lines), key=lambda line: -float(line["step_secs"]))[:20]
    assert {line["step"] for line in slowest} <= shown
    left_out = [e["name"].split(" left out")[0].split() for e in events if "left out" in e["name"]]
    gone = {step for _, first, _, last in left_out for step in range(int(first), int(last) + 1)}
    assert gone == set(range(1, 4_001)) - shown


def test_the_trace_of_a_long_run_keeps_reselections_that_are_quick(tmp_path: Path) -> None:
    selections = {701, 1503, 2305}
    lines = [
        step_line(i, step_secs=0.1 if i in selections else 0.2, reselected=i in selections) for i in range(1, 6001)
    ]
    _, events = report(write_run(tmp_path, [[header(), *lines]]))
    names = {event["name"] for event in events}
    assert {f"step {step}, re-selection" for step in selections} <= names
    assert {f"step {step + near}" for step in selections for near in (-1, 1)} <= names
    assert "step 1200" not in names


@pytest.mark.long
def test_the_report_of_a_hundred_thousand_steps_is_small_and_quick(tmp_path: Path) -> None:
    (lines,) = records = simulate(100_000)
    record = write_run(tmp_path, records)
    begin = time.process_time()
    page, _ = report(record)
    assert time.process_time() - begin < 20
    assert max((tmp_path / name).stat().st_size for name in (PICTURE, PAGE, TRACE)) < 3_000_000
    assert (
        page.row("Median step")[0]
        == f"{1000 * statistics.median(line['step_secs'] for line in steps_of(lines)):.0f} ms"
    )
    assert len(page.kept_rows) - 1 == 100_000 // 16 - 3
