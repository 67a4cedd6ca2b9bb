"""What the training process did when, and what fills the gaps."""

from __future__ import annotations

from lightning_zenflow.stats import Span, Timeline


def device(name: str, start_secs: float, stop_secs: float) -> Span:
    return Span("device", name, start_secs, stop_secs - start_secs)


def filled(spans: list[Span], start_secs: float, stop_secs: float) -> list[tuple[float, float]]:
    timeline = Timeline()
    timeline.spans = list(spans)
    timeline.fill("rest", start_secs, stop_secs)
    return [(span.start_secs, span.start_secs + span.secs) for span in timeline.spans if span.name == "rest"]


def test_a_gap_without_other_spans_is_filled_whole() -> None:
    assert filled([], 1.0, 5.0) == [(1.0, 5.0)]


def test_what_is_filled_lies_around_the_other_spans_of_the_device_alone() -> None:
    spans = [
        device("wait", 2.0, 3.0),
        device("wait", 0.0, 1.5),
        device("wait", 4.0, 6.0),
        Span("host", "update", 1.0, 4.0),
    ]
    assert filled(spans, 1.0, 5.0) == [(1.5, 2.0), (3.0, 4.0)]
    assert filled(spans, 1.0, 8.0) == [(1.5, 2.0), (3.0, 4.0), (6.0, 8.0)]


def test_nothing_is_filled_where_everything_is_told() -> None:
    assert filled([device("wait", 0.0, 9.0)], 1.0, 5.0) == []
    assert filled([device("wait", 6.0, 9.0)], 1.0, 5.0) == [(1.0, 5.0)]
