"""Sampling: each parameter by its own definition, each request as if alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from fullbore_backend import SamplingParams
from fullbore_backend.sampling import SamplingState, sample

VOCAB = 40


def state(params: SamplingParams, prompt: tuple[int, ...] = (), seed: int = 7) -> SamplingState:
    return SamplingState(params, prompt, banned=frozenset(), seed=seed)


def logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draws(params: SamplingParams, row: torch.Tensor, count: int = 3000) -> Counter[int]:
    states = [state(params, seed=seed) for seed in range(count)]
    return Counter(s.token_id for s in sample(row.repeat(count, 1), states))


def test_temperature_zero_is_argmax() -> None:
    rows = torch.stack([logits(seed) for seed in range(5)])
    got = sample(rows.clone(), [state(SamplingParams(temperature=0))] * 5)
    assert [s.token_id for s in got] == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    row, count = logits(), 20_000
    seen = draws(SamplingParams(temperature=temperature), row, count)
    probs = (row / temperature).softmax(-1)
    for token, prob in enumerate(probs.tolist()):
        # Six standard deviations of a binomial.
        assert abs(seen[token] - count * prob) <= 6 * math.sqrt(count * prob * (1 - prob)) + 1


def test_top_k_keeps_the_k_likeliest() -> None:
    row = logits()
    assert set(draws(SamplingParams(top_k=3, temperature=2.0), row)) == set(
        row.topk(3).indices.tolist()
    )


def test_top_p_keeps_the_smallest_set_with_the_mass() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(SamplingParams(top_p=0.79), row)) == {0, 1}
    assert set(draws(SamplingParams(top_p=0.81), row)) == {0, 1, 2}
    assert set(draws(SamplingParams(top_p=1e-6), row)) == {0}


@pytest.mark.parametrize("top_k", [0, 600, 3000])
def test_top_p_over_more_tokens_than_are_looked_at_first(top_k: int) -> None:
    """On a flat distribution the mass lies beyond the first candidates."""
    row = torch.linspace(0.001, 0.0, 4000)
    seen = draws(SamplingParams(top_p=0.9, top_k=top_k), row, 20_000)
    size = 0.9 * (top_k or 4000)
    assert size * 0.97 < max(seen) + 1 <= size * 1.01


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(SamplingParams(top_k=2, top_p=0.55), row)) == {0}
    assert set(draws(SamplingParams(top_k=2, top_p=0.6), row)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(SamplingParams(min_p=0.29), row)) == {0, 1, 2}
    assert set(draws(SamplingParams(min_p=0.31), row)) == {0, 1}


def test_a_seed_gives_the_same_tokens_whatever_the_neighbours() -> None:
    def run(neighbours: list[SamplingParams]) -> list[int]:
        mine = state(SamplingParams(seed=11))
        others = [state(params, seed=i) for i, params in enumerate(neighbours)]
        tokens = []
        for step in range(20):
            rows = torch.stack(
                [logits(100 * i + step) for i in range(len(others))] + [logits(step)]
            )
            tokens.append(sample(rows, [*others, mine])[-1].token_id)
        return tokens

    alone = run([])
    assert alone == run(
        [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)]
    )
    assert len(set(alone)) > 3


def test_without_a_seed_the_given_one_decides() -> None:
    rows = logits().repeat(200, 1) / 10
    fresh = sample(rows, [state(SamplingParams(), seed=seed) for seed in range(200)])
    assert len({s.token_id for s in fresh}) > 20


def test_penalties_by_their_own_definitions() -> None:
    """Repetition counts prompt and output; presence and frequency the output alone."""
    row = torch.ones(5)
    row[4] = -1.0
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.125
    )
    mine = state(params, prompt=(0, 4))
    mine.adjust(row.clone())
    mine.observe(1)
    mine.observe(1)
    mine.observe(2)
    adjusted = row.clone()
    mine.adjust(adjusted)
    assert adjusted.tolist() == [0.5, 0.5 - 0.25 - 0.25, 0.5 - 0.25 - 0.125, 1.0, -2.0]


def test_bias_forces_and_forbids() -> None:
    row = logits()
    best = int(row.argmax())
    forced = sample(row[None].clone(), [state(SamplingParams(temperature=0, logit_bias={3: 100}))])
    assert forced[0].token_id == 3
    assert best not in draws(SamplingParams(logit_bias={best: -100}), row)


def test_end_tokens_are_not_sampled_before_min_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[5] = 50
    mine = SamplingState(
        SamplingParams(temperature=0, min_tokens=2), (), banned=frozenset({5}), seed=0
    )
    tokens = [sample(row[None].clone(), [mine])[0].token_id for _ in range(3)]
    assert tokens[0] != 5
    assert tokens[1] != 5
    assert tokens[2] == 5


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0, 2.0])
def test_logprobs_are_those_of_the_raw_distribution(temperature: float) -> None:
    row = logits()
    params = SamplingParams(
        temperature=temperature, logprobs=4, top_k=2, logit_bias={1: 5.0}, presence_penalty=1.0
    )
    got = sample(row[None].clone(), [state(params)])[0]
    raw = row.log_softmax(-1)
    assert got.logprobs is not None
    assert got.logprobs.logprob == pytest.approx(float(raw[got.token_id]), abs=1e-6)
    assert [token for token, _ in got.logprobs.top] == raw.topk(4).indices.tolist()
    assert all(math.isfinite(value) for _, value in got.logprobs.top)


@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 1e-4])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    row = logits() * 100
    assert set(draws(SamplingParams(temperature=temperature), row, 50)) == {int(row.argmax())}


def test_tokens_without_probability_are_never_drawn() -> None:
    """Even when rounding puts the random number at the end of the distribution."""
    row = torch.full((VOCAB,), -torch.inf)
    row[2], row[3] = 0.0, 0.0
    assert set(draws(SamplingParams(), row)) == {2, 3}


def test_draws_are_uniform() -> None:
    mine = state(SamplingParams(), seed=3)
    values = []
    for _ in range(4000):
        values.append(mine.draw())
        mine.observe(0)
    assert all(0 <= value < 1 for value in values)
    buckets = Counter(int(value * 10) for value in values)
    assert all(300 < buckets[i] < 500 for i in range(10))
