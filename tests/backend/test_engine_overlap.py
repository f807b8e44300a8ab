"""A step launched while the one before is under way changes when tokens come, not which."""

from __future__ import annotations

import random

import pytest

from fullbore_backend import Completion, Engine, EngineConfig, SamplingParams

SIZES = EngineConfig(
    precision="fp32", kv_cache_bytes=2**25, max_num_seqs=4, max_num_batched_tokens=24, max_waiting=8
)


@pytest.fixture(scope="module")
def ahead() -> Engine:
    """An engine that overlaps."""
    return Engine(
        EngineConfig(
            precision=SIZES.precision,
            kv_cache_bytes=SIZES.kv_cache_bytes,
            max_num_seqs=SIZES.max_num_seqs,
            max_num_batched_tokens=SIZES.max_num_batched_tokens,
            max_waiting=SIZES.max_waiting,
            overlap=True,
        )
    )


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Short and long prompts, shared prefixes, ends of every kind, and each way to sample."""
    rng = random.Random(7)
    shared = [rng.randrange(1000, 40_000) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 16, 40])] + [rng.randrange(1000, 40_000) for _ in range(size)]
        for size in (1, 30, 5, 17, 60, 2, 9, 33, 4, 12)
    ]
    params = [
        SamplingParams(
            temperature=0 if index % 3 == 0 else 1.3,
            seed=index,
            max_tokens=(1, 2, 7, 12)[index % 4],
            repetition_penalty=1.5 if index % 5 == 1 else 1.0,
            frequency_penalty=0.5 if index % 5 == 2 else 0.0,
            logprobs=2 if index % 4 == 1 else None,
            stop_token_ids=tuple(range(0, 49_000, 7)) if index % 2 else (),
            min_tokens=1 if index % 2 else 0,
        )
        for index in range(len(prompts))
    ]
    return prompts, params


def outcome(done: Completion) -> tuple[object, ...]:
    return done.token_ids, done.text, done.finish_reason, done.stop_reason


def test_the_same_tokens_with_and_without(ahead: Engine) -> None:
    prompts, params = requests()
    plain = Engine(SIZES)
    expected = plain.generate(prompts, params)
    assert len({done.finish_reason for done in expected}) == 2, "both kinds of end occur"
    got = ahead.generate(prompts, params)
    assert [outcome(done) for done in got] == [outcome(done) for done in expected]
    for one, other in zip(got, expected, strict=True):
        assert [each.token_id for each in one.logprobs] == [e.token_id for e in other.logprobs]
    assert ahead.stats().generation_tokens == plain.stats().generation_tokens


def test_nothing_is_left_after_aborts_at_any_moment(ahead: Engine) -> None:
    """Ids come back at once, while the step of their former owners is still under way."""
    rng = random.Random(3)
    pool = ahead.scheduler.blocks
    live: set[str] = set()
    for turn in range(60):
        name = f"r{turn % 7}"
        if name in live:
            assert ahead.abort(name)
        ahead.add(name, [5 + turn] * rng.randint(1, 40), SamplingParams(temperature=0))
        live.add(name)
        for request_id, delta in ahead.step():
            assert request_id in live
            if delta.finish_reason is not None:
                live.remove(request_id)
        if live and turn % 5 == 0:
            ahead.pause(min(live))
        for each in live:
            ahead.resume(each)
    ahead.abort_all()
    while ahead.has_work():
        assert not ahead.step()
    assert pool.num_used == 0
