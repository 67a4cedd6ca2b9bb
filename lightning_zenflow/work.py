"""One optimizer step of a model, as far as estimates are concerned: sizes, ranks, ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of a model.

    Attributes:
        numel: Trainable parameters of the model, `N`.
        selected_numel: Those that live on the device, over all ranks: selected columns and all vectors.
        tokens: Tokens per device and optimizer step, over all micro-batches, `T`.
        ranks: Devices, `R`.
        wire_bytes: Bytes of a weight or gradient element, `w`: 2, or 4 in fp32.
        micro_batches: Accumulated micro-batches of a step, `A`.
        checkpointing: Whether backward computes the forward pass again.
        largest_numel: Elements of the largest parameter.
        columns: Columns of all matrices, each of which has a score; 0 if not known.
        stage: ZeRO stage, 2 or 3.
        offload_parameters: Whether weights lie in host memory between two uses, under stage 3.
        interim_step: The setting of that name.

    Raises:
        ValueError: A number is out of range, or parameters are offloaded under stage 2.
    """

    numel: int
    selected_numel: int
    tokens: int
    ranks: int = 1
    wire_bytes: int = 2
    micro_batches: int = 1
    checkpointing: bool = False
    largest_numel: int = 0
    columns: int = 0
    stage: int = 2
    offload_parameters: bool = False
    interim_step: bool = True

    def __post_init__(self) -> None:
        for name in ("numel", "tokens", "ranks", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}. Count again.")
        if not 0 <= self.selected_numel <= self.numel:
            raise ValueError(
                f"`selected_numel` must be from 0 to `numel` {self.numel}, got {self.selected_numel}. Count again."
            )
        if self.wire_bytes not in (2, 4):
            raise ValueError(f"`wire_bytes` must be 2 or 4, got {self.wire_bytes}. Use bf16, fp16 or fp32.")
        if self.stage not in (2, 3):
            raise ValueError(f"`stage` must be 2 or 3, got {self.stage}. ZeRO-1 takes what ZeRO-2 takes, or more.")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"`offload_parameters` must be false under ZeRO stage {self.stage}, got True. Set `stage` to 3."
            )

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, `n`."""
        return -(-self.numel // self.ranks)

    @property
    def selected_shard_numel(self) -> int:
        """Selected elements of one rank's shard, `s`."""
        return -(-self.selected_numel // self.ranks)

    @property
    def moves_deferred(self) -> bool:
        """Whether the device itself moves deferred weights, until their update arrives."""
        return self.interim_step and not self.offload_parameters and self.selected_numel < self.numel

    @property
    def cuts_weights(self) -> bool:
        """Whether a forward has to bring weights together first: from other ranks, or from host memory."""
        return self.stage == 3 and (self.ranks > 1 or self.offload_parameters)
