"""The engine with the real model: text, stops, seeds, errors, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fullbore_backend import (
    ContextLengthError,
    Engine,
    EngineConfig,
    InvalidRequestError,
    QueueFullError,
    SamplingParams,
    StepFailedError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def engine(model_path: object) -> Engine:
    return Engine(
        EngineConfig(
            max_num_seqs=8, max_num_batched_tokens=64, kv_cache_bytes=2**27, max_waiting=50
        )
    )


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Any:
    yield
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert not engine.has_work()


def test_a_paused_request_gains_nothing_until_it_is_resumed(engine: Engine) -> None:
    """And its text is what it would have been; the neighbour does not notice."""
    prompts = [engine.tokenizer.encode_prompt(text) for text in ("The sea is", "One two three")]
    want = engine.generate(prompts, GREEDY)
    texts = {"a": "", "b": ""}

    def run() -> None:
        while engine.has_work():
            for name, delta in engine.step():
                texts[name] += delta.text

    for name, prompt in zip("ab", prompts, strict=True):
        engine.add(name, prompt, GREEDY)
    for name, delta in engine.step():
        texts[name] += delta.text
    assert engine.pause("a")
    so_far = texts["a"]
    run()
    assert (engine.stats().num_paused, engine.stats().num_running) == (1, 0)
    assert texts == {"a": so_far, "b": want[1].text}
    assert engine.step() == []
    assert engine.resume("a")
    run()
    assert texts["a"] == want[0].text
    assert not engine.pause("a")
    assert not engine.resume("a")


def test_a_paused_request_is_aborted_like_any_other(engine: Engine) -> None:
    engine.add("a", [5, 6, 7], GREEDY)
    engine.step()
    engine.pause("a")
    assert engine.abort("a")
    assert engine.stats().num_paused == 0


def chat(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode_chat([{"role": "user", "content": text}])


def test_text_is_the_tokens_decoded(engine: Engine) -> None:
    (done,) = engine.generate(["The capital of France is"], GREEDY)
    assert done.text == engine.tokenizer.decode(done.token_ids)
    assert "Paris" in done.text
    assert (done.finish_reason, len(done.token_ids)) == ("length", 16)


def test_the_end_token_is_a_token_but_not_text(engine: Engine) -> None:
    (done,) = engine.generate(
        [chat(engine, "Reply with the single word: yes")], SamplingParams(temperature=0)
    )
    assert done.finish_reason == "stop"
    assert done.stop_reason is None
    assert done.token_ids[-1] in engine.tokenizer.eos_token_ids
    assert "<|im_end|>" not in done.text


def test_a_stop_string_is_cut_and_named(engine: Engine) -> None:
    (whole,) = engine.generate(["The capital of France is"], GREEDY)
    stop = whole.text[7:12]
    (done,) = engine.generate(
        ["The capital of France is"],
        SamplingParams(temperature=0, max_tokens=16, stop=(stop, "zzz")),
    )
    assert done.text == whole.text[: whole.text.index(stop)]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)


def test_a_stop_token_is_no_text(engine: Engine) -> None:
    (whole,) = engine.generate(["The capital of France is"], GREEDY)
    token = whole.token_ids[3]
    (done,) = engine.generate(
        ["The capital of France is"],
        SamplingParams(temperature=0, max_tokens=16, stop_token_ids=(token,)),
    )
    end = whole.token_ids.index(token)
    assert done.token_ids == whole.token_ids[: end + 1]
    assert done.text == engine.tokenizer.decode(whole.token_ids[:end])
    assert (done.finish_reason, done.stop_reason) == ("stop", token)


def test_min_tokens_puts_off_the_end(engine: Engine) -> None:
    prompt = chat(engine, "Reply with the single word: yes")
    (done,) = engine.generate([prompt], SamplingParams(temperature=0, min_tokens=30, max_tokens=40))
    assert len(done.token_ids) >= 30
    assert not set(done.token_ids[:30]) & set(engine.tokenizer.eos_token_ids)


def test_a_seed_repeats_and_no_seed_does_not(engine: Engine) -> None:
    prompt = "My favourite colour is"
    seeded = SamplingParams(temperature=1.5, max_tokens=12, seed=5)
    free = SamplingParams(temperature=1.5, max_tokens=12)
    a, b, c, d = engine.generate([prompt] * 4, [seeded, free, seeded, free])
    (again,) = engine.generate([prompt], seeded)
    assert a.token_ids == c.token_ids == again.token_ids
    assert b.token_ids != d.token_ids


def test_logprobs_are_the_same_cached_or_not_and_whatever_the_temperature(engine: Engine) -> None:
    prompt = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"
    cold = SamplingParams(temperature=0, max_tokens=3, logprobs=5)
    hot = SamplingParams(temperature=2, max_tokens=1, logprobs=5, seed=1)
    (first,) = engine.generate([prompt], cold)
    again, warm = engine.generate([prompt] * 2, [cold, hot])
    assert again.num_cached > 0
    for other in (again, warm):
        for (token, value), (other_token, other_value) in zip(
            first.logprobs[0].top, other.logprobs[0].top, strict=True
        ):
            assert token == other_token
            assert value == pytest.approx(other_value, abs=1e-3)
    assert len(first.logprobs) == 3


def test_a_shared_prefix_is_computed_once_when_asked_for_at_once(engine: Engine) -> None:
    prompt = engine.tokenizer.encode_prompt("A long preamble that all of them share. " * 12)
    before = engine.stats()
    engine.generate([[*prompt, 500 + i] for i in range(6)], GREEDY)
    hits = engine.stats().prefix_cache_hits - before.prefix_cache_hits
    assert hits >= 5 * (len(prompt) // 16 * 16)


def test_a_salt_keeps_a_prefix_to_itself(engine: Engine) -> None:
    prompt = engine.tokenizer.encode_prompt("Something only one tenant should be quick at. " * 5)

    def cached(salt: str | None) -> int:
        engine.add("salted", prompt, GREEDY, cache_salt=salt)
        deltas = []
        while engine.has_work():
            deltas += engine.step()
        return deltas[-1][1].num_cached

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0
    assert cached(None) == 0


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], GREEDY, InvalidRequestError, "prompt"),
        ([49152], GREEDY, InvalidRequestError, "outside the vocabulary"),
        ([-1], GREEDY, InvalidRequestError, "outside the vocabulary"),
        ([1] * 9000, GREEDY, ContextLengthError, "9000"),
        ([1], SamplingParams(temperature=3), InvalidRequestError, r"temperature is 3.*\[0, 2\]"),
        ([1], SamplingParams(top_p=0), InvalidRequestError, r"top_p is 0.*\(0, 1\]"),
        ([1], SamplingParams(temperature=float("nan")), InvalidRequestError, "temperature"),
        ([1], SamplingParams(repetition_penalty=0), InvalidRequestError, "repetition_penalty"),
        ([1], SamplingParams(logprobs=16384), InvalidRequestError, "logprobs is 16384"),
        ([1], SamplingParams(max_tokens=0), InvalidRequestError, "max_tokens is 0"),
        ([1], SamplingParams(min_tokens=5, max_tokens=4), InvalidRequestError, "min_tokens is 5"),
        ([1], SamplingParams(logit_bias={49152: 1}), InvalidRequestError, "logit_bias"),
        ([1], SamplingParams(stop=("",)), InvalidRequestError, "non-empty"),
        ([1], SamplingParams(stop_token_ids=(-3,)), InvalidRequestError, "stop_token_ids"),
        ([1], SamplingParams(seed=2**64), InvalidRequestError, "seed"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:30],
)
def test_a_request_at_fault_is_refused_and_changes_nothing(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        engine.generate([[1, 2, 3], prompt], [GREEDY, params])


def test_a_full_queue_says_when_to_come_back(engine: Engine) -> None:
    try:
        with pytest.raises(QueueFullError) as caught:
            for index in range(51):
                engine.add(str(index), [1, 2], GREEDY)
        assert caught.value.retry_after > 0
    finally:
        for index in range(51):
            engine.abort(str(index))


def test_more_prompts_than_the_queue_holds(engine: Engine) -> None:
    done = engine.generate(
        [[i + 5] for i in range(70)], SamplingParams(temperature=0, max_tokens=2)
    )
    assert [c.prompt_token_ids for c in done] == [(i + 5,) for i in range(70)]


def test_abort_at_any_moment(engine: Engine) -> None:
    """Waiting, mid-prefill and decoding requests all leave at once."""
    for index in range(12):
        engine.add(f"r{index}", [7] * 100, SamplingParams(max_tokens=50))
    for index in range(12):
        assert engine.abort(f"r{index}")
        assert not engine.abort(f"r{index}")
        engine.step()


class Failing:
    """A runner that raises at one call, as a kernel that runs out of memory would."""

    def __init__(self, runner: Any, at: int) -> None:
        self.runner, self.calls = runner, at

    def launch(self, *args: Any) -> Any:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("out of luck")
        return self.runner.launch(*args)


@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    engine: Engine, at: int
) -> None:
    runner: Any = engine.runner
    engine.runner = Failing(runner, at)  # type: ignore[assignment]
    try:
        with pytest.raises(StepFailedError, match="out of luck"):
            engine.generate([[1, 2, 3]] * 3, GREEDY)
        (done,) = engine.generate([[1, 2, 3]], GREEDY)
    finally:
        engine.runner = runner
    (again,) = engine.generate([[1, 2, 3]], GREEDY)
    assert done.token_ids == again.token_ids


def test_the_context_limit_ends_a_request() -> None:
    small = Engine(EngineConfig(max_model_len=40, kv_cache_bytes=2**24))
    (done,) = small.generate([[5] * 30], SamplingParams(temperature=0, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (10, "length")


def test_a_prompt_larger_than_the_pool_is_refused_with_the_flag_to_raise() -> None:
    tiny = Engine(EngineConfig(kv_precision="fp32", kv_cache_bytes=4 * 16 * 2 * 30 * 3 * 64 * 4))
    with pytest.raises(ContextLengthError, match="kv-cache-memory"):
        tiny.generate([[5] * 65], GREEDY)
    (done,) = tiny.generate([[5] * 60], SamplingParams(temperature=0, ignore_eos=True))
    assert done.finish_reason == "length"
