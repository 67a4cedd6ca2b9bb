"""What a run needs to know beyond DeepSpeed's config."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.schedule import Schedule


@dataclass(frozen=True)
class RunSettings:
    """What a run needs to know beyond DeepSpeed's config.

    Attributes:
        config: The user's settings.
        select_interval: Steps between selections.
        worker_cores: Cores of this rank's background process; empty for no pinning.
        local_ranks: Ranks on this machine, which share its memory.
    """

    config: ZenFlowConfig
    select_interval: int
    worker_cores: list[int] = field(default_factory=list)
    local_ranks: int = 1

    @property
    def configured(self) -> tuple[int | str, int | str]:
        """The update interval and the selection interval that were asked for: steps, or `auto`."""
        config = self.config
        return config.update_interval, "auto" if config.select_interval == "auto" else self.select_interval

    def schedule(self) -> Schedule:
        return Schedule(
            update_interval=self.config.update_interval_steps(),
            select_interval=self.select_interval if self.config.topk_ratio > 0 else None,
            warm_up_steps=self.config.full_warm_up_rounds,
            overlap=self.config.overlap_step,
            look_ahead=self.config.look_ahead,
            interim=self.config.interim_step and self.config.topk_ratio < 1,
        )
