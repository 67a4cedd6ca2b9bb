"""Finding the files of a DeepSpeed checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_zenflow.checkpoint.errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class CheckpointFiles:
    """Where a checkpoint's parts lie.

    Attributes:
        folder: The folder that holds the files, one below the checkpoint directory.
        model: The file that holds the module of ZeRO-1 and 2, if it is there.
        zero3_models: Files of ZeRO-3 that take its place, by rank.
        optimizer: Files of the optimizer, by rank.
        universal: The folder of DeepSpeed's universal checkpoint, if it is one.
    """

    folder: Path
    model: Path | None
    zero3_models: dict[int, Path]
    optimizer: dict[int, Path]
    universal: Path | None

    @classmethod
    def find(cls, path: Path) -> CheckpointFiles:
        """The files of the checkpoint at `path`: its directory, or the folder inside it.

        Raises:
            CheckpointError: There is no checkpoint of DeepSpeed, or one of tensor, pipeline or expert parallelism.
        """
        folder = _folder(path)
        files = sorted(file for file in folder.iterdir() if file.suffix == ".pt")
        models: dict[int | None, Path] = {}
        optimizer: dict[int, Path] = {}
        for file in files:
            match = _MODEL_FILE.fullmatch(file.name) or _OPTIMIZER_FILE.fullmatch(file.name)
            if file.name.startswith(("layer_", "expp_rank_")) or (match and int(match[2])):
                raise CheckpointError(
                    f"The checkpoint must be of data parallelism alone, got `{file.name}` in '{folder}', which is of"
                    " tensor, pipeline or expert parallelism. Merge it first with the tools of the library that wrote"
                    " it."
                )
            if match and match.re is _MODEL_FILE:
                models[None if match[1] is None else int(match[1])] = file
            elif match:
                if (twin := optimizer.get(int(match[1]))) is not None:
                    raise CheckpointError(
                        f"'{folder}' must hold one optimizer file of rank {int(match[1])}, got `{twin.name}` and"
                        f" `{file.name}`. Two runs of different precision were saved over each other: delete the files"
                        " of the older one."
                    )
                optimizer[int(match[1])] = file
        if not models:
            raise CheckpointError(
                f"'{folder}' must hold a model file of DeepSpeed, `mp_rank_00_model_states.pt` or"
                f" `zero_pp_rank_0_mp_rank_00_model_states.pt`, got {_names(folder)}. Pass the directory that"
                " `Trainer.save_checkpoint` or `ModelCheckpoint` wrote."
            )
        universal = folder / "zero"
        model = models.pop(None, None)
        return cls(
            folder,
            model,
            {rank: file for rank, file in models.items() if rank is not None},
            optimizer,
            universal if universal.is_dir() else None,
        )


def _folder(path: Path) -> Path:
    wrong = f"`path` must be the directory of a checkpoint that DeepSpeed or ZenFlow wrote, got '{path}', which"
    remedy = "Pass the directory that `Trainer.save_checkpoint` or `ModelCheckpoint` wrote."
    if not path.exists():
        raise CheckpointError(f"{wrong} does not exist. {remedy}")
    if not path.is_dir():
        raise CheckpointError(f"{wrong} is a file. {remedy}")
    # Written beside each other when a universal checkpoint was made from a plain one, which is then the complete one.
    for pointer in (path / "latest", path / "latest_universal"):
        if pointer.is_file():
            tag = pointer.read_text(errors="replace").strip()
            if not tag or not (path / tag).is_dir():
                raise CheckpointError(
                    f"`{pointer.name}` in '{path}' must name a folder in it, got {tag!r}, beside {_names(path)}. The"
                    " save was cut off or the folder was not copied: take another checkpoint or copy it again."
                )
            return path / tag
    if any(_MODEL_FILE.fullmatch(file.name) for file in path.iterdir()):
        return path
    raise CheckpointError(f"{wrong} has no file `latest`, but {_names(path)}. {remedy}")


def _names(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else "nothing"
