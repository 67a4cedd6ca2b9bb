"""What a rank knows beyond masters and moments, as a checkpoint holds it: plain types and tensors, nothing else.

DeepSpeed's own files hold the fp32 masters and moments. Everything else that the course of training depends on is here:
the clock, what the host has accumulated but not applied, the block in flight, the weights as the device shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.schedule import Schedule
from lightning_zenflow.shards import ParamSpec, ShardTable

FORMAT = 1

_OF_EARLIER_VERSIONS: Mapping[str, Any] = {
    "moments_dtype": "float32",
    "selected_moments": (),
    "mean_squares": {},
    "observed_steps": 0,
    "in_parts": None,
}


@dataclass(frozen=True)
class StoredLayout:
    """How the parameters were cut over the ranks.

    Attributes:
        cuts_params: Whether each parameter is cut, as under ZeRO-3, or flattened groups are.
        params: All parameters, in order.
        partition_numels: Elements of one rank's partition of each group, padding included.
        rank: Whose state this is.
        world_size: How many ranks there were.
        wire_dtype: dtype of the device's weights.
    """

    cuts_params: bool
    params: tuple[ParamSpec, ...]
    partition_numels: tuple[int, ...]
    rank: int
    world_size: int
    wire_dtype: torch.dtype

    def table(self, rank: int) -> ShardTable:
        """What `rank` owns."""
        if self.cuts_params:
            return ShardTable.build_stage3(self.params, self.partition_numels, rank, self.world_size)
        return ShardTable.build(self.params, self.partition_numels, rank)

    def to_plain(self) -> dict[str, Any]:
        return {
            "cuts_params": self.cuts_params,
            "params": [[spec.name, list(spec.shape), spec.group, spec.offset] for spec in self.params],
            "partition_numels": list(self.partition_numels),
            "rank": self.rank,
            "world_size": self.world_size,
            "wire_dtype": _name(self.wire_dtype),
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> StoredLayout:
        params = [ParamSpec(name, tuple(shape), group, offset) for name, shape, group, offset in plain["params"]]
        dtype = getattr(torch, plain["wire_dtype"])
        numels = tuple(plain["partition_numels"])
        return cls(plain["cuts_params"], tuple(params), numels, plain["rank"], plain["world_size"], dtype)


@dataclass(frozen=True)
class ShardState:
    """Where a rank stands between two steps.

    Attributes:
        layout: Of the shard.
        clock: Applied steps.
        skipped_steps: Steps skipped because a gradient was not finite.
        schedule: When things happen.
        lr_scale: `deferred_lr_scale`.
        columns: Selected columns by parameter name, int64.
        held: Steps that each block holds.
        lr_sums: Their rates' sums, for each block and group.
        accumulated: Start in the shard and fp32 gradient sums, for ranges that hold any.
        in_flight: How many steps each block under way stands for, oldest first.
        waiting: Block and weights (model's dtype) of updates that the device has not seen, oldest first.
        device_is_settled: Whether the device shows the masters themselves.
        weights: The shard's weights as the device shows them, flat in the model's dtype, one tensor per group.
        partial: fp32 or model-dtype sums of the micro-batches of a step that is not complete, by parameter name.
        received: In manual optimization, gradients that a step has not applied: this rank's part, in the model's dtype.
        configured: Update and selection interval that were asked for: steps, or `auto`. The schedule's may be others since.
        moments_dtype: What the host keeps moments in.
        selected_moments: Where that is bf16, both fp32 moments of the selected elements, packed as on the device: what
            DeepSpeed's files hold of them is rounded.
        mean_squares: Moving average of the squared gradient, for each parameter by name, the same on every rank.
        observed_steps: Steps that are in it.
        in_parts: Names of parameters of which this rank gets gradients in parts; `None` if that is not known.
    """

    layout: StoredLayout
    clock: int
    skipped_steps: int
    schedule: Schedule
    lr_scale: str
    columns: Mapping[str, Tensor]
    held: Sequence[int]
    lr_sums: Sequence[Sequence[float]]
    accumulated: Sequence[tuple[int, Tensor]]
    in_flight: Sequence[int]
    waiting: Sequence[tuple[int, Tensor]]
    device_is_settled: bool
    weights: Sequence[Tensor]
    partial: Mapping[str, Tensor] = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    configured: tuple[int | str, int | str] = ("auto", "auto")
    moments_dtype: torch.dtype = torch.float32
    selected_moments: Sequence[Tensor] = ()
    mean_squares: Mapping[str, float] = field(default_factory=dict)
    observed_steps: int = 0
    in_parts: Sequence[str] | None = None

    def to_plain(self) -> dict[str, Any]:
        """As it is written: loads with `torch.load(weights_only=True)`."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["layout"] = self.layout.to_plain()
        plain["schedule"] = asdict(self.schedule)
        plain["moments_dtype"] = _name(self.moments_dtype)
        for name in ("held", "in_flight", "weights", "selected_moments"):
            plain[name] = list(plain[name])
        plain["lr_sums"] = [list(sums) for sums in self.lr_sums]
        for name in ("accumulated", "waiting"):
            plain[name] = [list(pair) for pair in plain[name]]
        for name in ("columns", "partial", "received", "mean_squares"):
            plain[name] = dict(plain[name])
        plain["configured"] = list(plain["configured"])
        return {"format": FORMAT, **plain}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> ShardState:
        """Reads what `to_plain` made.

        Raises:
            ValueError: It is of another format.
        """
        if plain.get("format") != FORMAT:
            raise ValueError(
                f"`format` of ZenFlow's state must be {FORMAT}, got {plain.get('format')!r}. Resume with the version of"
                " lightning-zenflow that saved it."
            )
        plain = {**_OF_EARLIER_VERSIONS, **plain}
        fields = {name: plain[name] for name in cls.__dataclass_fields__}
        fields["layout"] = StoredLayout.of_plain(plain["layout"])
        fields["schedule"] = Schedule(**plain["schedule"])
        fields["configured"] = tuple(plain["configured"])
        fields["moments_dtype"] = getattr(torch, plain["moments_dtype"])
        for name in ("accumulated", "waiting"):
            fields[name] = [tuple(pair) for pair in plain[name]]
        return cls(**fields)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
