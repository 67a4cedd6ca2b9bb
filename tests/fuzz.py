"""What a bad input must be answered with, values that are bad, and a count of both answers for the end of a test run."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

SHORT = settings(deadline=None, derandomize=True, max_examples=60, database=None)
LONG = settings(deadline=None, derandomize=True, max_examples=4000, database=None)

COUNTS: Counter[str] = Counter()
"""Inputs of this process that were accepted, and that were refused in words."""

REPO = Path(__file__).resolve().parent.parent


def answer(make: Callable[[], Any]) -> Any:
    """What `make` returns, or the error of ours that it ends with; any other error goes on.

    An error of ours names field, value and remedy in one line, and is raised in this package.
    """
    try:
        made = make()
    except (TypeError, ValueError, NotImplementedError) as error:
        check_words(error)
        COUNTS["refused in words"] += 1
        return error
    COUNTS["accepted"] += 1
    return made


def check_words(error: Exception) -> None:
    message, frame = str(error), traceback.extract_tb(error.__traceback__)[-1]
    raised_in = Path(frame.filename).resolve()
    assert raised_in.is_relative_to(REPO / "lightning_zenflow") or raised_in.is_relative_to(REPO / "cli"), frame
    assert re.match(r"`[^`]+`( or `[^`]+`)? (must|has no|has unknown)", message), message
    assert "\n" not in message and len(message) < 1200, message
    assert re.search(r"[.?] \S", message), f"no remedy: {message}"


HUGE = (10**400, -(10**400), 2**63, 1e308, -1e308, 5e-324)

UNPRINTABLE = 10**5000
"""Python refuses to print it, and so does Hypothesis."""

numbers = st.one_of(
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(HUGE),
    st.sampled_from([-1, 0, 1, 2, 4, -0.0, 0.5, 1.0, 1.5]),
)
plain = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["auto", "0.1", "1", "true", ""])
)
"""What JSON and YAML can say without nesting."""

nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)

of_python = st.one_of(
    st.sampled_from(
        [
            *(
                np.float32(0.5),
                np.float64(0.25),
                np.int64(3),
                np.int8(-1),
                np.bool_(True),
                np.float64("nan"),
                np.str_("auto"),
            ),
            *(np.array(0.5), np.array([1, 2]), np.array([]), torch.tensor(0.5), torch.tensor([1, 2])),
            *(Decimal("0.5"), Fraction(1, 2), 1j, b"auto", object(), int, (0, 1), {1, 2}, range(3), len),
        ]
    ),
    nested,
)
"""What a Python program can hand over as well."""


def misspelled(name: str) -> st.SearchStrategy[str]:
    """`name` with a letter left out, doubled, or in upper case, or something else altogether."""
    places = st.integers(0, len(name) - 1)
    return st.one_of(
        places.map(lambda at: name[:at] + name[at + 1 :]),
        places.map(lambda at: name[:at] + name[at] + name[at:]),
        st.just(name.upper()),
        st.text(max_size=8),
    ).filter(lambda made: made != name)
