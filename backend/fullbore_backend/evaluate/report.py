"""Measurements of several precisions as a table, as a plot, and as a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .measure import Measured

_HEADINGS = ("precision", "perplexity", "loss", "accuracy", "(normalised)", "tokens/s", "memory")


def loss(each: Measured, reference: Measured) -> float:
    """How much larger the perplexity is than that of the reference; 0.01 is one per cent."""
    return each.perplexity / reference.perplexity - 1


def smallest_within(measured: Sequence[Measured], max_loss: float) -> Measured:
    """The one that takes the least memory of those that lose no more than ``max_loss``.

    The first is the reference, and always qualifies.
    """
    reference = measured[0]
    good = [each for each in measured if loss(each, reference) <= max_loss]
    return min(good, key=lambda each: each.resident_bytes)


def table(measured: Sequence[Measured]) -> str:
    """A row for each, the first the reference."""
    rows = [
        (
            each.precision,
            f"{each.perplexity:.3f}",
            f"{loss(each, measured[0]):+.2%}",
            f"{each.accuracy:.1%}",
            f"{each.accuracy_normalised:.1%}",
            f"{each.output_tokens_per_s:.0f}",
            f"{each.resident_bytes / 2**20:.0f} MiB",
        )
        for each in measured
    ]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (_HEADINGS, *rows)
    )


def plot(measured: Sequence[Measured], path: Path, *, title: str) -> None:
    """Draw loss against speed, a disc for each precision, its area the memory.

    :param path: its ending is the format: ``.svg``, ``.png``.
    :raises ConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed: pip install 'fullbore[plots]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    losses = [100 * loss(each, measured[0]) for each in measured]
    largest = max(each.resident_bytes for each in measured)
    for each, lost in zip(measured, losses, strict=True):
        size = 900 * each.resident_bytes / largest
        axes.scatter(each.output_tokens_per_s, lost, s=size, alpha=0.6)
        axes.annotate(
            f"{each.precision}\n{each.resident_bytes / 2**20:.0f} MiB, {each.accuracy:.0%} right",
            (each.output_tokens_per_s, lost),
            textcoords="offset points",
            xytext=(0, 18),
            ha="center",
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.margins(x=0.25, y=0.45)
    axes.set(title=title, xlabel="output tokens/s", ylabel="perplexity lost, %")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"the plot {path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
