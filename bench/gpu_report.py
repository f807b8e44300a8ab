"""From measured rows to shares of the ceilings, and to a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]


def ceilings_of(rows: Rows) -> dict[str, float]:
    """The best measured ceiling of each kind, bytes or operations a second."""
    best: dict[str, float] = {}
    for row in rows.values():
        if "ceiling" in row:
            best[row["of"]] = max(best.get(row["of"], 0.0), row["ceiling"])
    return best


def add_shares(rows: Rows) -> dict[str, dict[str, Any]]:
    """The rows, with the least time that their bytes and operations allow, and the share of it.

    ``floor_us`` is the larger of both, ``bound`` says which; ``share`` is it over the time taken, 1
    being the ceiling itself.
    """
    best = ceilings_of(rows)
    return {name: {**row, **_share(row, best)} for name, row in rows.items()}


def _share(row: Mapping[str, Any], best: Mapping[str, float]) -> dict[str, Any]:
    taken = row.get("us", row.get("busy_us"))
    if "ceiling" in row or "failed" in row or not taken:
        return {}
    floors = {}
    if row.get("bytes") and "memory" in best:
        floors["memory"] = row["bytes"] / best["memory"] * 1e6
    rate = row.get("rate", "")
    if row.get("operations") and rate in best:
        floors[rate] = row["operations"] / best[rate] * 1e6
    if not floors:
        return {}
    bound = max(floors, key=lambda kind: floors[kind])
    return {
        "bound": bound,
        "floor_us": round(floors[bound], 2),
        "share": round(floors[bound] / taken, 4),
    }


def table(rows: Rows, not_run: Sequence[str] = ()) -> str:
    """Markdown: every row, then what did not run."""
    lines = ["| case | µs | bound | share | beside | note |", "|---|--:|---|--:|---|---|"]
    lines += [_line(name, row) for name, row in rows.items()]
    if not_run:
        lines += ["", f"Not run, for want of time: {', '.join(not_run)}."]
    return "\n".join(lines)


def _line(name: str, row: Mapping[str, Any]) -> str:
    share = f"{row['share']:.1%}" if "share" in row else ""
    beside = ""
    if "baseline" in row and row["us"]:
        beside = f"{row['baseline_us'] / row['us']:.2f} x {row['baseline']}"
    taken = row.get("us", row.get("wall_us", ""))
    return f"| {name} | {taken} | {row.get('bound', '')} | {share} | {beside} | {_note(row)} |"


def _note(row: Mapping[str, Any]) -> str:
    notes = []
    if "failed" in row:
        notes.append(f"FAILED: {row['failed']}")
    if "skipped" in row:
        notes.append(f"skipped: {row['skipped']}")
    if "ceiling" in row:
        unit = "TB/s" if row["of"] == "memory" else "T/s"
        notes.append(f"{row['ceiling'] / 1e12:.2f} {unit}")
    for key, text in (
        ("us_each", "{} µs each"),
        ("output_tokens_per_s", "{} output tokens/s"),
        ("tokens_per_s", "{} tokens/s"),
        ("gap_us", "{} µs between steps"),
        ("note", "{}"),
    ):
        if key in row:
            notes.append(text.format(row[key]))
    if row.get("checked") is False and "share" in row:
        notes.append("not checked")
    if row.get("graphed") is False and "us" in row:
        notes.append("not graphed")
    return "; ".join(notes).replace("|", "/").replace("\n", " ")
