"""Multiple-choice questions answered by log-likelihood, as lm-evaluation-harness does it.

Each choice is scored as the continuation of the question; the likeliest is the answer. A long
choice has less probability than a short one, so the normalised score divides by its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .scoring import Scorer


@dataclass(frozen=True, slots=True)
class Question:
    """A context, what may follow it, and which of those is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Shares of right answers; ``acc`` and ``acc_norm`` of lm-evaluation-harness."""

    questions: int
    plain: float
    normalised: float


def read_questions(path: Path) -> list[Question]:
    """Questions of a file of JSON lines: ``{"context": …, "choices": […], "answer": 0}``.

    :raises ConfigError: naming the line at fault.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            choices: list[object] = raw["choices"]
            if not all(isinstance(choice, str) and choice for choice in choices):
                raise ValueError("choices must be a list of texts that are not empty")
            question = Question(str(raw["context"]), tuple(map(str, choices)), int(raw["answer"]))
            if not 0 <= question.answer < len(question.choices):
                raise ValueError(f"answer {question.answer} is none of its choices")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}. A line is such as "
                '{"context": "One, two,", "choices": ["three", "nine"], "answer": 0}'
            ) from None
        questions.append(question)
    if not questions:
        raise ConfigError(f"{path} holds no questions.")
    return questions


def accuracy(
    scorer: Scorer, encode: Callable[[str], Sequence[int]], questions: Iterable[Question]
) -> Accuracy:
    """Answer every question.

    :param encode: text to token ids, without tokens that are no text.
    """
    count = plain = normalised = 0
    for question in questions:
        scores = [_score(scorer, encode, question.context, each) for each in question.choices]
        lengths = [len(choice.encode()) for choice in question.choices]
        count += 1
        plain += _best(scores) == question.answer
        normalised += (
            _best([s / n for s, n in zip(scores, lengths, strict=True)]) == question.answer
        )
    return Accuracy(questions=count, plain=plain / count, normalised=normalised / count)


def _score(
    scorer: Scorer, encode: Callable[[str], Sequence[int]], context: str, choice: str
) -> float:
    """Log-likelihood of a choice after its context and a blank, encoded as one text.

    The tokens of the context are those that it has alone; the rest is the choice's.
    """
    context = context.rstrip()
    before = len(encode(context))
    ids = encode(f"{context} {choice}")
    return math.fsum(scorer.logprobs(ids, max(1, min(before, len(ids) - 1))))


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
