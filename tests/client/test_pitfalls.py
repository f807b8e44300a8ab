"""What users of other clients have reported, and where each kind of fault is ruled out here.

`PITFALLS` names the tests; that they exist is a test too. Those that no other file holds are below.
"""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fullbore import Client, Retry, Usage
from fullbore.testing import FaultServer, Reply, Visit, answer, hold, respond_json, status
from fullbore.transport.wire import Answer

HERE = Path(__file__).parent

PITFALLS = {
    # transport
    "more requests than one HTTP/2 connection takes": (
        "test_http2_pool.py::test_lanes_open_as_streams_fill_up",
        "test_soak.py::test_hundreds_of_streams_at_once",
    ),
    "cancelled streams": (
        "test_http2_cancel.py::test_random_cancellations",
        "test_http2_faults.py::test_fault",
    ),
    "the server lowers its stream limit": (
        "test_http2_pool.py::test_server_lowers_its_stream_limit_in_mid_flight",
    ),
    "cancelled while connecting": (
        "test_http2_pool.py::test_cancel_during_connect_gives_the_slot_back",
        "test_asyncio_dial.py::test_hundreds_cancelled_wherever_they_are_leave_no_socket",
    ),
    "gather beyond a connection limit": (
        "test_client.py::test_more_requests_than_any_default_pool_are_in_flight_at_once",
        "test_pitfalls.py::test_a_long_queue_is_no_pool_timeout",
    ),
    "an idle connection closed as a request is sent": (
        "test_http2_pool.py::test_server_closes_an_idle_connection_as_a_request_is_sent",
        "test_http1.py::test_an_idle_connection_that_goes_under_a_get_is_replaced",
        "test_attempt.py::test_an_idle_connection_closed_by_the_server_is_replaced",
    ),
    "a stream neither read nor closed": (
        "test_openai.py::test_streams_neither_read_nor_closed_do_not_block_the_next",
        "test_http1.py::test_a_response_that_is_dropped_closes_its_connection",
    ),
    "work that grows with the number in flight": (
        "test_limits_queue.py::test_a_hundred_thousand_items_are_taken_from_the_middle_and_the_front",
        "test_soak.py::test_soak",
    ),
    "out of file descriptors": (
        "test_client.py::test_file_descriptors_are_checked_at_the_start",
        "test_pitfalls.py::test_a_retry_never_holds_two_connections",
    ),
    "one client in two event loops": (
        "test_client.py::test_a_client_used_from_another_loop_says_so",
        "test_http1.py::test_use_from_two_event_loops_is_refused",
        "test_http2_pool.py::test_use_from_two_event_loops_is_refused",
    ),
    "Retry-After of a minute": (
        "test_retry.py::test_retry_after_of_a_minute_is_honoured",
        "test_attempt.py::test_retry_after_longer_than_the_deadline_fails_at_once",
    ),
    "memory that grows with every answer": (
        "test_pitfalls.py::test_decoding_leaves_nothing_behind",
        "test_soak.py::test_twenty_thousand_lazy_inputs_in_flat_memory",
    ),
    "a body never closed": (
        "test_http_client.py::test_a_stream_that_is_dropped_gives_everything_back",
        "test_attempt.py::test_cancelling_leaves_nothing_behind",
    ),
    "error bodies of a 429 storm": (
        "test_attempt.py::test_a_storm_of_429_leaves_no_connection_and_no_permit",
    ),
    # accounting
    "cached tokens charged twice": (
        "test_wire.py::test_cached_and_reasoning_tokens_are_parts_not_additions",
        "test_pricing.py::test_per_token_charges_each_token_once",
    ),
    "reasoning tokens missed": (
        "test_prompt.py::test_a_streamed_request_asks_for_usage",
        "test_pricing.py::test_reasoning_is_output_already",
    ),
    "cache writes dropped": ("test_pricing.py::test_cache_writes_have_their_own_price",),
    "the tier that was asked for, not the one that answered": (
        "test_pitfalls.py::test_the_tier_that_answered_is_priced",
        "test_pricing.py::test_the_catalogue_agrees_with_genai_prices",
    ),
    "failed attempts that are billed": (
        "test_attempt.py::test_connection_loss_before_the_answer_is_typed",
    ),
    "usage that makes no sense": (
        "test_pitfalls.py::test_an_answer_is_not_lost_for_its_usage",
        "test_wire.py::test_more_cached_than_input_is_cut_and_flagged",
    ),
    # batches
    "a limit for each call instead of one": (
        "test_moves.py::test_one_limiter_for_all_calls_of_a_client",
        "test_map.py::test_two_maps_share_the_limit_fairly",
    ),
    "a retry that returns another item's result": (
        "test_map.py::test_a_retry_starts_at_once_and_keeps_its_item",
    ),
    "results out of the promised order": (
        "test_map.py::test_awaited_gives_a_list_in_input_order",
        "test_map.py::test_iterated_in_order",
    ),
    "coroutines created up front": (
        "test_map.py::test_prompts_are_pulled_no_faster_than_they_are_sent",
    ),
    "retries only after every first attempt": (
        "test_map.py::test_a_retry_starts_at_once_and_keeps_its_item",
    ),
    "one 429 that stops everything": (
        "test_rate.py::test_one_refusal_reduces_and_does_not_stop",
        "test_pitfalls.py::test_one_429_does_not_hold_up_the_others",
    ),
}


@asynccontextmanager
async def opened(reply: Reply, **settings: Any) -> AsyncIterator[tuple[Client, FaultServer]]:
    """Open a server with this reply and a client of it."""
    server = FaultServer(reply)
    async with server, Client(server.url, model="m", **settings) as client:
        yield client, server


def _named() -> Iterator[str]:
    for tests in PITFALLS.values():
        yield from tests


@pytest.mark.parametrize("name", sorted(set(_named())))
def test_the_table_is_true(name: str) -> None:
    """Every test it names is there."""
    file, _, test = name.partition("::")
    assert re.search(rf"def {test}\(", (HERE / file).read_text(encoding="utf-8"))


@pytest.mark.anyio
async def test_a_long_queue_is_no_pool_timeout() -> None:
    """Those who wait for the limiter wait there, however short the connect timeout is."""
    async with opened(answer("x"), concurrency=1) as (client, server):
        results = await client.map(["a"] * 100)
    assert all(len(result.attempts) == 1 for result in results)
    assert server.peak == 1


@pytest.mark.anyio
async def test_a_retry_never_holds_two_connections() -> None:
    """The old one is closed before the new attempt begins."""
    most = 0

    async def count(visit: Visit) -> None:
        nonlocal most
        most = max(most, server.open_connections)
        await (answer("x") if visit.number == 6 else status(500))(visit)

    retry = Retry(attempts=10, base=0)
    async with opened(count, retry=retry) as (client, server):
        assert (await client.complete("hi")).text == "x"
    assert most == 1


@pytest.mark.anyio
async def test_the_tier_that_answered_is_priced() -> None:
    """Asked for flex, answered by default: that is what it costs."""

    class ByTier:
        """A plan that tells tiers apart."""

        def cost(self, usage: Usage, model: str) -> Decimal | None:
            """Price by the tier alone."""
            return {"flex": Decimal(1), "default": Decimal(2)}.get(usage.service_tier or "")

    async def upgraded(visit: Visit) -> None:
        message = {"message": {"content": "x"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        await respond_json(visit, {"choices": [message], "usage": usage, "service_tier": "default"})

    async with opened(upgraded, pricing=ByTier()) as (client, _):
        result = await client.complete("hi", service_tier="flex")
    assert result.cost == Decimal(2)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": "many"}, {"completion_tokens": {}}, [], "none", {"prompt_tokens": 1.5}],
    ids=str,
)
async def test_an_answer_is_not_lost_for_its_usage(
    usage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read is estimated, flagged, and said."""

    async def odd(visit: Visit) -> None:
        message = {"message": {"content": "fine"}, "finish_reason": "stop"}
        await respond_json(visit, {"choices": [message], "usage": usage})

    async with opened(odd) as (client, _):
        result = await client.complete("hi")
        assert client.ledger.totals().estimated == 1
    assert result.text == "fine"
    assert result.usage.estimated
    assert "usage that cannot be read" in caplog.text


@pytest.mark.anyio
async def test_one_429_does_not_hold_up_the_others() -> None:
    """Told to come back in a minute, only that request does; the rest goes on."""

    async def refuse_the_first(visit: Visit) -> None:
        await (status(429, retry_after=60) if visit.number == 0 else answer("x"))(visit)

    retry = Retry(within=30)  # so that the refused one fails instead of waiting
    async with opened(refuse_the_first, concurrency=4, retry=retry) as (client, _):
        results = await client.map(["a"] * 50)
    assert sum(result.ok for result in results) == 49


@pytest.mark.anyio
async def test_a_busy_endpoint_cannot_block_another_client() -> None:
    """Nothing is shared between clients but the process."""
    async with (
        opened(hold(), concurrency=1) as (stuck, _),
        opened(answer("x"), concurrency=1) as (going, _),
        stuck.map(["a"]),
    ):
        assert len(await going.map(["a"] * 10)) == 10


def test_decoding_leaves_nothing_behind() -> None:
    """Decoders are made once, and an answer that is gone is gone."""
    data = b'{"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [1]}}], "usage": {}}'

    def decode() -> None:
        for _ in range(200):
            growing = Answer()
            growing.add(data)
            growing.choices()

    decode()
    gc.collect()
    before = len(gc.get_objects())
    decode()
    gc.collect()
    assert len(gc.get_objects()) <= before + 10
