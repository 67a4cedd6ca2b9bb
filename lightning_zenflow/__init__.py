"""Train models whose optimizer state lives in host memory, without the accelerator waiting for the host.

Importing this package registers the strategies `zenflow`, `zenflow_stage_1`, `zenflow_stage_2`, `zenflow_stage_3` and
`zenflow_stage_3_offload` with Lightning (`lightning.pytorch`; the separate package `pytorch_lightning` has classes of its own
and does not see them).
"""

from lightning_zenflow import internals
from lightning_zenflow.version import __version__

try:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zenflow.callbacks import AutoTuner, StallMonitor
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.optimizer import ZenFlowAdamW
    from lightning_zenflow.stats import StepStats
    from lightning_zenflow.strategy import ZenFlowStrategy
except ImportError as error:
    raise internals.explained(error) from error

__all__ = ["AutoTuner", "StallMonitor", "StepStats", "ZenFlowAdamW", "ZenFlowConfig", "ZenFlowStrategy", "__version__"]

ZenFlowStrategy.register_strategies(StrategyRegistry)
