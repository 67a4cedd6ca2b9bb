"""Convergence through the strategy: the char-GPT of the design, from scratch, with bf16 weights."""

from __future__ import annotations

from typing import Any

import pytest

BOLD_ROW = {1e-3: 2.302, 2e-3: 2.186, 4e-3: 2.085}
"""Mean loss of the last 50 of 400 steps that the algorithm reaches in fp32 without the device's own moves, U = 4, by rate."""

ADAMW = {1e-3: 2.338, 4e-3: 2.037}
"""The same of AdamW, which those moves follow more closely: lower at high rates, higher at low ones."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lr", sorted(BOLD_ROW))
def test_the_char_gpt_reaches_the_designs_loss_with_bf16_weights(run_ranks: Any, lr: float) -> None:
    loss = run_ranks("tests.ranks:char_gpt", world_size=1, timeout=500, lr=lr, interim_step=False)[0]
    assert loss < BOLD_ROW[lr] + 0.02


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lr", sorted(ADAMW))
def test_the_char_gpt_reaches_adamws_loss_by_default(run_ranks: Any, lr: float) -> None:
    loss = run_ranks("tests.ranks:char_gpt", world_size=1, timeout=500, lr=lr)[0]
    assert loss < ADAMW[lr]
