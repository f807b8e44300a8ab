"""64 prompts through a real model on this machine: answers, throughput, latency, and the price.

usage: python examples/demo.py [--concurrency N] [--prompts FILE] [--url URL] [--max-tokens N]

Starts the server in a process of its own, unless `--url` names one that is there already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fullbore

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MODEL = "smollm2-135m"
SHOWN = 5
PRICED_AS = "gpt-5-mini"


@contextmanager
def server(console: Console) -> Iterator[str]:
    """The address of a server started for the demo; it ends with the block."""
    from fullbore_backend.server import BackgroundServer

    starting = True

    def show(line: str) -> None:
        nonlocal starting
        if starting or "ERROR" in line:
            console.print(f"[dim]  server {escape(line)}[/]", soft_wrap=True)
        starting = starting and " ready in " not in line

    with BackgroundServer(on_line=show) as started:
        console.print()
        yield started.url


async def ask_all(
    url: str, prompts: Sequence[Mapping[str, Any]], concurrency: int
) -> tuple[list[fullbore.Result], fullbore.RunStats, float]:
    """Map the prompts; returns the results, the run's numbers, and the prefix cache's hit rate."""
    before = await cached_and_asked(url)
    async with fullbore.Client(f"{url}/v1", model=MODEL, concurrency=concurrency) as client:
        run = client.map(prompts, progress=True, temperature=0.4, seed=1)
        results = await run
    after = await cached_and_asked(url)
    hits, queries = (late - early for late, early in zip(after, before, strict=True))
    return results, run.stats, hits / queries if queries else 0.0


async def cached_and_asked(url: str) -> tuple[float, float]:
    """Prompt tokens found in the server's prefix cache, and all that were looked up, so far."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).raise_for_status().text
    hits, queries = (
        sum(map(float, re.findall(rf"^\S*prefix_cache_{name}\S* (\S+)$", text, re.MULTILINE)))
        for name in ("hits_total", "queries_total")
    )
    return hits, queries


def show_answers(console: Console, results: Sequence[fullbore.Result]) -> None:
    """A few of the answers, spread over the input."""
    table = Table(
        title="Some of the answers",
        caption="The model is very small: it answers fast and is often wrong.",
        expand=True,
        show_lines=True,
    )
    table.add_column("asked", ratio=2)
    table.add_column("answered", ratio=3)
    step = max(1, len(results) // SHOWN) | 1  # odd, for every second prompt is of one kind
    for result in results[::step][:SHOWN]:
        question = result.input["messages"][-1]["content"]
        answer = result.text.strip() if result.ok else f"failed: {result.error}"
        table.add_row(shorten(question, 110), shorten(answer, 200))
    console.print(table)


def shorten(text: str, limit: int) -> str:
    """`text` on one line, cut to `limit` characters, safe to print with markup."""
    line = " ".join(text.split())
    return escape(line if len(line) <= limit else f"{line[: limit - 1]}…")


def show_run(console: Console, stats: fullbore.RunStats, hit_rate: float) -> None:
    """What was done and how fast."""
    table = Table(title="The run", expand=True, show_header=False)
    table.add_column(ratio=1)
    table.add_column(ratio=2)
    table.add_row("answered", f"{stats.ok} of {stats.done} in {stats.elapsed:.1f} s")
    table.add_row(
        "output",
        f"{stats.output_tokens:,} tokens, [bold]{stats.output_tokens_per_second:,.0f}[/] a second",
    )
    table.add_row("input", f"{stats.input_tokens:,} tokens")
    table.add_row("prefix-cache hit rate", f"{hit_rate:.0%} of the input tokens")
    for name, values in (("first token", stats.first_token), ("whole answer", stats.latency)):
        if values.p50 is not None and values.p99 is not None:
            table.add_row(name, f"p50 {values.p50:.2f} s   p99 {values.p99:.2f} s")
    console.print(table)


def show_costs(console: Console, results: Sequence[fullbore.Result]) -> None:
    """The same calls under plans of other providers."""
    # OpenAI's cache takes prompts of 1,024 tokens and more, which these are not.
    answered = [replace(result.usage, cached_tokens=0) for result in results if result.ok]
    if not answered:
        return
    oxlo = fullbore.oxlo("pro")
    tokens = fullbore.PerToken.for_model(PRICED_AS, provider="openai")
    assert oxlo.least_cost is not None
    rows: list[tuple[str, str, fullbore.Plan]] = [
        (
            "per request",
            f"Oxlo.ai Pro, ${oxlo.monthly_fee} a month for {oxlo.requests_per_day:,} calls a day, "
            "used in full",
            fullbore.PerRequest(oxlo.least_cost),
        ),
        (
            "per token",
            f"OpenAI {PRICED_AS}, ${tokens.rates.input} in and ${tokens.rates.output} out "
            "a million tokens",
            tokens,
        ),
    ]
    table = Table(title="The same calls elsewhere (hypothetical: this run was free)", expand=True)
    table.add_column("plan")
    table.add_column("terms", ratio=1)
    table.add_column(f"{len(answered)} calls", justify="right")
    table.add_column("a million", justify="right")
    for name, terms, plan in rows:
        costs = [plan.cost(usage, PRICED_AS) or Decimal(0) for usage in answered]
        total = sum(costs, Decimal(0))
        table.add_row(name, terms, f"${total:.4f}", f"${total / len(answered) * 1_000_000:,.0f}")
    console.print(table)
    console.print(
        "[dim]List prices as this installation knows them; the models differ, and so would the "
        "number of tokens.[/]"
    )


def demo(console: Console, options: argparse.Namespace) -> int:
    """Run it all; returns the exit status."""
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines if line.strip()]
    if options.max_tokens:
        prompts = [{**prompt, "max_tokens": options.max_tokens} for prompt in prompts]
    console.print(
        f"[bold]{len(prompts)} prompts, {options.concurrency} at a time, "
        f"through {MODEL} on this machine.[/]\n"
    )
    if options.url:
        outcome = asyncio.run(ask_all(options.url, prompts, options.concurrency))
    else:
        with server(console) as url:
            outcome = asyncio.run(ask_all(url, prompts, options.concurrency))
    results, stats, hit_rate = outcome
    show_answers(console, results)
    show_run(console, stats, hit_rate)
    show_costs(console, results)
    failed = [result for result in results if not result.ok]
    for result in failed:
        console.print(f"[red]prompt {result.index} failed:[/] {escape(str(result.error))}")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, help="instead of what each prompt says")
    parser.add_argument("--url", help="of a server that is there already, without /v1")
    sys.exit(demo(Console(highlight=False), parser.parse_args()))
