"""The command ``fullbore``: finds the command asked for and hands over.

Owns the list of commands. Each command parses its own flags and is imported only when it is run,
so that ``fullbore --help`` needs nothing but this file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

_COMMANDS = {
    "serve": "run the reference backend: an OpenAI-compatible server for a local model",
    "eval": "measure which precision of a local model is good enough",
}
_OF_THE_BACKEND = {"serve": "fullbore_backend.cli", "eval": "fullbore_backend.evaluate.cli"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2 for wrong usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _OF_THE_BACKEND:
        return _hand_over(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        from .. import __version__

        sys.stdout.write(f"fullbore {__version__}\n")
        return 0
    parser.print_help()
    return 0 if not arguments else 2


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="fullbore",
        usage="fullbore [--help] [--version] COMMAND ...",
        description="Push LLM endpoints to full throughput.",
        epilog=f"commands:\n{commands}\n\n'fullbore COMMAND --help' tells more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", choices=sorted(_COMMANDS), help=argparse.SUPPRESS)
    return parser


def _hand_over(arguments: list[str]) -> int:
    command = arguments[0]
    try:
        module = importlib.import_module(_OF_THE_BACKEND[command])
        run: Callable[[list[str]], int] = module.main
        return run(arguments)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith(("fullbore.", "fullbore_backend.")):
            raise  # a file of ours is gone: that is a bug and shall look like one
        sys.stderr.write(
            f"fullbore {command} needs the module {exc.name!r}, which is not installed.\n"
            "Install the backend with: pip install 'fullbore[backend]'\n"
        )
        return 1
