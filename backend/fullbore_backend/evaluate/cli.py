"""``fullbore eval``: which precision is good enough."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from ..config import DEFAULT_MODEL, Precision
from ..errors import BackendError, ConfigError
from .measure import Assignment, Measured, measure_apart
from .report import plot, smallest_within, table

DATA = Path(__file__).parent / "data"
_PRECISIONS = tuple(each for each in get_args(Precision) if each != "auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, beginning with ``eval``; returns the exit code.

    0 when all was measured, 1 when a measurement failed, 2 for settings that cannot work, 130 when
    interrupted.
    """
    options = _parser().parse_args(argv)
    try:
        measured = _measure_all(options)
        _report(options, measured)
    except ConfigError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        return 2
    except BackendError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


def _measure_all(options: argparse.Namespace) -> list[Measured]:
    for path in (options.text, options.tasks):
        if not path.is_file():
            raise ConfigError(f"{path} is not a file.")
    measured: list[Measured] = []
    for precision in options.precision:
        sys.stderr.write(f"{precision} ({len(measured) + 1} of {len(options.precision)})\n")
        assignment = Assignment(
            model=options.model,
            precision=precision,
            text=str(options.text.resolve()),
            tasks=str(options.tasks.resolve()),
            window=options.window,
            stride=options.stride or options.window // 2,
            threads=options.threads,
        )
        measured.append(measure_apart(assignment, timeout=options.timeout))
    return measured


def _report(options: argparse.Namespace, measured: Sequence[Measured]) -> None:
    sys.stdout.write(table(measured) + "\n")
    best = smallest_within(measured, options.max_loss / 100)
    sys.stdout.write(
        f"\nThe smallest within {options.max_loss:g} % of {measured[0].precision}'s perplexity: "
        f"{best.precision}\n"
    )
    if options.json is not None:
        document = {
            "model": options.model,
            "max_loss_percent": options.max_loss,
            "smallest": best.precision,
            "measured": [asdict(each) for each in measured],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        sys.stderr.write(f"written to {options.json}\n")
    if options.plot is not None:
        plot(measured, options.plot, title=f"{options.model}: what a precision costs and gives")
        sys.stderr.write(f"drawn to {options.plot}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullbore eval",
        description="Measure a model's precisions against each other: perplexity of a text, "
        "accuracy on multiple-choice questions, speed and memory; and name the smallest one that "
        "is good enough. Each runs in a process of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("command", choices=["eval"], help=argparse.SUPPRESS)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for `fullbore serve`")
    parser.add_argument(
        "--precision",
        type=_precisions,
        default=["fp32", "int8"],
        metavar="P,P,…",
        help="what to compare, the first being the reference: " + ", ".join(_PRECISIONS),
    )
    parser.add_argument(
        "--text", type=Path, default=DATA / "text.txt", metavar="FILE", help="for the perplexity"
    )
    parser.add_argument(
        "--tasks",
        type=Path,
        default=DATA / "tasks.jsonl",
        metavar="FILE",
        help='questions, one a line: {"context": …, "choices": […], "answer": 0}',
    )
    parser.add_argument("--window", type=int, default=1024, metavar="TOKENS", help="of the model")
    parser.add_argument(
        "--stride", type=int, metavar="TOKENS", help="between windows; left out: half of one"
    )
    parser.add_argument(
        "--max-loss",
        type=float,
        default=0.5,
        metavar="PERCENT",
        help="how much larger the perplexity may be than the reference's",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.svg, .png)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model")
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="what each precision may take",
    )
    return parser


def _precisions(text: str) -> list[str]:
    found = [each.strip() for each in text.split(",") if each.strip()]
    unknown = [each for each in found if each not in _PRECISIONS]
    if unknown or not found:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no precision; there are {', '.join(_PRECISIONS)}"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
