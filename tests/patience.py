"""How much longer than a stated limit a test waits.

Limits in the tests are what an idle machine keeps, such as one second from a killed trainer to the end of its worker. A
machine whose cores others use too is several times slower at moments, which says nothing about this package; what hangs is
found all the same. `ZENFLOW_TEST_PATIENCE=1 pytest` holds everything to the stated limits.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("ZENFLOW_TEST_PATIENCE", "5"))


def patient(secs: float) -> float:
    """The time to wait where `secs` are the limit on an idle machine."""
    return secs * PATIENCE
