"""Perplexity and multiple choice against plain computations with transformers, and the command."""

from __future__ import annotations

import json
import math
import mmap
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fullbore_backend import Engine, EngineConfig
from fullbore_backend.errors import ConfigError, InvalidRequestError
from fullbore_backend.evaluate.cli import DATA, main
from fullbore_backend.evaluate.measure import Measured, resident_bytes
from fullbore_backend.evaluate.multiple_choice import Question, accuracy, read_questions
from fullbore_backend.evaluate.perplexity import perplexity, windows
from fullbore_backend.evaluate.report import plot, smallest_within, table
from fullbore_backend.evaluate.scoring import Scorer

TEXT = "The rabbit ran. Alice ran after it, down and down and down, and never looked back."


@pytest.fixture(scope="module")
def engine(byte_model: Path) -> Engine:
    return Engine(EngineConfig(model=str(byte_model), device="cpu", precision="fp32", block_size=8))


@pytest.fixture(scope="module")
def model(byte_model: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(byte_model).eval()


@torch.inference_mode()
def exact(model: torch.nn.Module, ids: list[int], start: int) -> list[float]:
    """What transformers says of the tokens from `start` on."""
    logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [logprobs[at - 1, ids[at]].item() for at in range(start, len(ids))]


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("start", [1, 5, 40])
def test_scores_are_those_of_transformers(
    engine: Engine, model: torch.nn.Module, chunk: int, start: int
) -> None:
    ids = engine.tokenizer.encode(TEXT)
    got = Scorer(engine.runner, chunk=chunk).logprobs(ids, start)
    assert got == pytest.approx(exact(model, ids, start), abs=1e-3)


def test_what_cannot_be_scored_is_refused(engine: Engine) -> None:
    scorer = Scorer(engine.runner)
    with pytest.raises(InvalidRequestError, match="start is 0"):
        scorer.logprobs([1, 2], 0)
    with pytest.raises(InvalidRequestError, match="do not fit"):
        scorer.logprobs([1] * (scorer.max_tokens + 1))


@given(st.integers(0, 300), st.integers(2, 60), st.data())
def test_windows_score_every_token_once(length: int, window: int, data: st.DataObject) -> None:
    """But the first; with the context that the stride promises."""
    stride = data.draw(st.integers(1, window - 1))
    scored: list[int] = []
    for each in windows(length, window=window, stride=stride):
        assert each.end - each.begin <= window
        assert each.begin < each.score_from < each.end
        if each.begin:
            assert each.score_from - each.begin >= window - stride
        scored += range(each.score_from, each.end)
    assert scored == list(range(1, length))


@pytest.mark.parametrize("sizes", [(1, 1), (8, 0), (8, 8)])
def test_windows_that_cannot_be(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="a stride is at least 1"):
        list(windows(10, window=sizes[0], stride=sizes[1]))


def test_perplexity(engine: Engine, model: torch.nn.Module) -> None:
    ids = engine.tokenizer.encode(TEXT)
    got = perplexity(Scorer(engine.runner), TEXT, ids, prefix=0, window=32, stride=16)
    padded = [0, *ids]
    total = sum(exact(model, padded[:32], 1))
    for end in range(48, len(padded) + 16, 16):
        part = padded[max(0, min(end, len(padded)) - 32) : end]
        new = 16 if end <= len(padded) else len(padded) % 16
        total += sum(exact(model, part, len(part) - new))
    assert got.loglikelihood == pytest.approx(total, rel=1e-4)
    assert (got.tokens, got.words, got.bytes) == (len(ids), 16, len(TEXT))
    assert got.per_token == pytest.approx(math.exp(-total / len(ids)), rel=1e-3)
    assert got.bits_per_byte == pytest.approx(-total / math.log(2) / len(TEXT), rel=1e-3)
    assert got.per_word == pytest.approx(math.exp(-total / 16), rel=1e-2)


def test_multiple_choice(engine: Engine, model: torch.nn.Module) -> None:
    encode = engine.tokenizer.encode
    choices = ("ran", "stood still", "sang a song of sixpence")
    scores = []
    for choice in choices:
        ids = encode(f"The rabbit {choice}")
        scores.append(sum(exact(model, ids, len("The rabbit"))))
    best = scores.index(max(scores))
    shares = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
    scorer = Scorer(engine.runner)
    right = accuracy(scorer, encode, [Question("The rabbit", choices, best)])
    assert (right.questions, right.plain) == (1, 1.0)
    assert right.normalised == float(shares.index(max(shares)) == best)
    wrong = accuracy(scorer, encode, [Question("The rabbit ", choices, (best + 1) % 3)])
    assert wrong.plain == 0.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"context": "a", "choices": ["b"]}', "'answer'"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "not empty"),
        ('{"context": "a", "choices": ["b"], "answer": 1}', "none of its choices"),
    ],
)
def test_bad_questions_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"context": "a", "choices": ["b"], "answer": 0}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_questions(path)


def test_the_data_that_comes_along() -> None:
    questions = read_questions(DATA / "tasks.jsonl")
    assert len(questions) == 100
    assert {question.answer for question in questions} == {0, 1, 2, 3}
    assert len((DATA / "text.txt").read_text(encoding="utf-8").split()) > 1000


def measured(precision: str, perplexity: float, memory: int, speed: float = 100.0) -> Measured:
    return Measured(
        precision=precision,
        perplexity=perplexity,
        word_perplexity=30.0,
        bits_per_byte=1.0,
        tokens=100,
        accuracy=0.5,
        accuracy_normalised=0.6,
        questions=10,
        output_tokens_per_s=speed,
        resident_bytes=memory,
    )


def test_the_smallest_that_is_good_enough() -> None:
    found = [measured("fp32", 10.0, 900), measured("int8", 10.04, 300), measured("int4", 11, 200)]
    assert smallest_within(found, 0.005).precision == "int8"
    assert smallest_within(found, 0.2).precision == "int4"
    assert smallest_within(found, 0.0).precision == "fp32"
    lines = table(found).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "+0.40%" in lines[2]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    found = [measured("fp32", 10.0, 900 << 20), measured("int8", 10.04, 300 << 20, 250.0)]
    plot(found, tmp_path / "plot.svg", title="a model")
    assert "int8" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(ConfigError, match="cannot be written"):
        plot(found, tmp_path / "plot.nothing", title="a model")


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"fullbore\[plots\]"):
        plot([measured("fp32", 10.0, 900)], tmp_path / "plot.svg", title="a model")


def test_the_command(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two precisions of a small model, each in a process of its own."""
    text, tasks, result = (tmp_path / name for name in ("text", "tasks", "result"))
    text.write_text(TEXT * 3)
    tasks.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    arguments = ["eval", "--model", str(byte_model), "--text", str(text), "--tasks", str(tasks)]
    arguments += ["--window", "64", "--precision", "fp32,bf16", "--max-loss", "50"]
    assert main([*arguments, "--json", str(result)]) == 0
    out = capsys.readouterr().out
    assert "The smallest within 50 % of fp32's perplexity" in out
    saved = json.loads(result.read_text())["measured"]
    assert [each["precision"] for each in saved] == ["fp32", "bf16"]
    assert saved[1]["perplexity"] == pytest.approx(saved[0]["perplexity"], rel=0.1)
    assert all(each["output_tokens_per_s"] > 0 for each in saved)
    assert all(each["resident_bytes"] > 10 << 20 for each in saved)


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--text", str(tmp_path / "none")]) == 2
    assert "is not a file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "--precision", "fp13"])
    assert "fp13 is no precision" in capsys.readouterr().err
    assert main(["eval", "--model", str(tmp_path), "--precision", "fp32"]) == 1
    assert "the reason is above" in capsys.readouterr().err


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 32 << 20) as held:  # fresh from the system: an allocator may have some left
        held.write(b"x" * len(held))
        assert resident_bytes() - before > len(held) // 2
