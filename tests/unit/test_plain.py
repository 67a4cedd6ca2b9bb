"""What is written as plain types, and what is refused by name."""

from __future__ import annotations

import enum
import io
from collections import OrderedDict, namedtuple
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zenflow.checkpoint.plain import plain, plain_numbers


class Level(enum.IntEnum):
    HIGH = 3


class Rate(float):
    pass


Pair = namedtuple("Pair", "one two")


def read_back(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        (np.complex128(1 + 2j), 1 + 2j),
        (np.str_("adam"), "adam"),
        (np.array(0.25), 0.25),
        (np.array([0.9, 0.999]), [0.9, 0.999]),
        (Level.HIGH, 3),
        (Rate(0.5), 0.5),
        (Pair(np.float64(0.9), 0.999), (0.9, 0.999)),
        (OrderedDict(lr=np.float64(1)), {"lr": 1.0}),
        ({"betas": (np.float64(0.9), 0.999), np.str_("lr"): [np.int64(1)]}, {"betas": (0.9, 0.999), "lr": [1]}),
        ({1, 2}, {1, 2}),
        (None, None),
        (float("inf"), float("inf")),
        (torch.float32, torch.float32),
    ],
)
def test_a_value_becomes_one_of_a_plain_type_that_is_loaded_safely(value: Any, expected: Any) -> None:
    """FAULTS 24."""
    made = plain(value, "lr")
    assert made == expected and type(made) is type(expected)
    assert read_back(made) == expected


def test_tensors_are_neither_copied_nor_changed() -> None:
    """A checkpoint is as large as the host's state: there is no memory for a second one."""
    master = torch.ones(3)
    assert plain({"master": [master]}, "state")["master"][0] is master


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (Decimal("0.1"), r"param_groups\[0\]"),
        ({"lr": Decimal("0.1")}, r"param_groups\[0\]\['lr'\]"),
        ({"betas": (0.9, object())}, r"param_groups\[0\]\['betas'\]\[1\]"),
        ({"schedule": lambda step: step}, r"param_groups\[0\]\['schedule'\]"),
        ({Decimal("1"): 2}, r"a key of param_groups\[0\]"),
        (np.datetime64("2020-01-01"), r"param_groups\[0\]"),
    ],
)
def test_what_is_no_plain_type_is_refused_by_the_name_of_its_place(value: Any, place: str) -> None:
    """FAULTS 24."""
    with pytest.raises(TypeError, match=rf"^`{place}` must be a number, a text, a tensor, .* Put a plain value"):
        plain(value, "param_groups[0]")


def test_only_numbers_change_where_other_objects_are_allowed() -> None:
    kept, pair = Decimal("0.1"), Pair(np.float64(1), 2)
    made = plain_numbers({"rates": [np.float64(0.1), kept], "pair": pair, "level": Level.HIGH})
    assert made == {"rates": [0.1, kept], "pair": pair, "level": Level.HIGH}
    assert type(made["rates"][0]) is float and made["pair"] is pair and made["level"] is Level.HIGH
