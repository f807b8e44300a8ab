"""A progress bar for ``map``: watches the numbers of a run, never drives work.

The bar is drawn by rich's own thread, which reads the counters when it draws: a run is not slowed
by being watched. Nothing is drawn where nobody watches (standard error is no terminal).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._stats import RunStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class ProgressBar:
    """Draws done and failed items, requests in flight, tokens a second, cost and time left.

    :param title: stands before the bar.
    :param console: where to draw; standard error if left out.
    :param force: draw even if that is no terminal.
    """

    def __init__(
        self, title: str = "map", *, console: Console | None = None, force: bool = False
    ) -> None:
        self._title = title
        self._console = console
        self._force = force
        self._progress: Progress | None = None

    def start(self, stats: RunStats) -> None:
        """Begin to draw the run."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task
        from rich.text import Text

        class Numbers(ProgressColumn):
            """Reads the run at every drawing; so does the bar, which is moved from here."""

            def render(self, task: Task) -> Text:
                task.total = stats.total
                task.completed = stats.done
                return Text(describe(stats))

        console = self._console or Console(stderr=True, force_terminal=self._force or None)
        self._progress = Progress(
            "[bold]{task.description}",
            Numbers(),
            BarColumn(bar_width=24),
            console=console,
            refresh_per_second=5,
            disable=not (self._force or console.is_terminal),
        )
        self._progress.add_task(self._title, total=stats.total)
        self._progress.start()

    def stop(self) -> None:
        """Draw the last state and let go of the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(stats: RunStats) -> str:
    """Return the state of a run as one line."""
    total = "" if stats.total is None else f"/{stats.total}"
    parts = [
        f"{stats.done}{total}",
        _load(stats),
        f"{stats.output_tokens_per_second:,.0f} tok/s",
    ]
    if stats.failed:
        parts.insert(1, f"{stats.failed} failed")
    if stats.retries:
        parts.append(f"{stats.retries} retries")
    if stats.cost:
        parts.append(f"${stats.cost:.4f}")
    remaining = stats.remaining
    if remaining:
        minutes, seconds = divmod(round(remaining), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return " · ".join(parts)


def _load(stats: RunStats) -> str:
    """Say how much is in flight and what keeps it from being more."""
    text = f"{stats.in_flight} of {stats.limit} in flight"
    why = f"waiting for {stats.paced_by}" if stats.paced_by else stats.limit_reason
    return f"{text}: {why}" if why else text
