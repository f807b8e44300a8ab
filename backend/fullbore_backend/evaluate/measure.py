"""One precision of one model, measured in a process of its own.

A process of its own because memory that was once used is not given back: what another precision
left behind would count. Reads an :class:`Assignment` as JSON from standard input, and writes a
:class:`Measured` as JSON to standard output.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import EngineConfig, Precision
from ..errors import BackendError

_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What to measure; paths are absolute.

    :param window: and :param stride: see :mod:`.perplexity`.
    :param sequences: and :param output_tokens: of the measurement of speed.
    """

    model: str
    precision: Precision
    text: str
    tasks: str
    window: int = 1024
    stride: int = 512
    sequences: int = 8
    output_tokens: int = 64
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a precision is worth and what it costs.

    :param resident_bytes: of the process when the model was loaded and had answered.
    """

    precision: str
    perplexity: float
    word_perplexity: float
    bits_per_byte: float
    tokens: int
    accuracy: float
    accuracy_normalised: float
    questions: int
    output_tokens_per_s: float
    resident_bytes: int


def measure(assignment: Assignment, progress: Callable[[str], None]) -> Measured:
    """Load the model and measure it here.

    :raises BackendError: settings or files that cannot work.
    """
    from ..engine import Engine
    from ..request import SamplingParams
    from .multiple_choice import accuracy, read_questions
    from .perplexity import perplexity
    from .scoring import Scorer

    questions = read_questions(Path(assignment.tasks))
    text = Path(assignment.text).read_text(encoding="utf-8")
    engine = Engine(
        EngineConfig(
            model=assignment.model,
            precision=assignment.precision,
            prefix_caching=False,  # the scorer writes to the pages too
            max_num_seqs=max(assignment.sequences, 1),
            num_threads=assignment.threads,
        ),
        progress=progress,
    )
    engine.warm_up()
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(text)
    prompts = [ids[i * 32 : i * 32 + _PROMPT_TOKENS] for i in range(assignment.sequences)]
    progress("generating")
    params = SamplingParams(max_tokens=assignment.output_tokens, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    generated = engine.generate(prompts, params)
    took = time.perf_counter() - began
    resident = resident_bytes()
    scorer = Scorer(engine.runner)
    progress("scoring the text")
    window = min(assignment.window, engine.max_model_len, scorer.max_tokens)
    found = perplexity(
        scorer,
        text,
        ids,
        prefix=min(tokenizer.eos_token_ids, default=0),
        window=window,
        stride=min(assignment.stride, window - 1),
    )
    progress("answering the questions")
    answered = accuracy(scorer, tokenizer.encode, questions)
    return Measured(
        precision=assignment.precision,
        perplexity=found.per_token,
        word_perplexity=found.per_word,
        bits_per_byte=found.bits_per_byte,
        tokens=found.tokens,
        accuracy=answered.plain,
        accuracy_normalised=answered.normalised,
        questions=answered.questions,
        output_tokens_per_s=sum(len(each.token_ids) for each in generated) / took,
        resident_bytes=resident,
    )


def measure_apart(assignment: Assignment, *, timeout: float) -> Measured:
    """:func:`measure` in a process of its own, whose progress goes to standard error.

    :param timeout: seconds.
    :raises BackendError: it failed or was late; it has said why.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asdict(assignment)),
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"measuring {assignment.precision} took more than {timeout:.0f} s and was stopped."
        ) from None
    if done.returncode:
        raise BackendError(f"measuring {assignment.precision} failed; the reason is above.")
    return Measured(**json.loads(done.stdout))


def resident_bytes() -> int:
    """Memory that this process holds now, or at most has held where only that is known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _main() -> int:
    assignment = Assignment(**json.loads(sys.stdin.read()))

    def say(message: str) -> None:
        sys.stderr.write(f"  {assignment.precision}: {message}\n")
        sys.stderr.flush()

    try:
        measured = measure(assignment, say)
    except BackendError as error:
        say(f"ERROR: {error}")
        return 1
    json.dump(asdict(measured), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
