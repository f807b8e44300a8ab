"""A reader that stops stops the engine, over the wire; its neighbour and its text do not suffer.

What a stalled stream may cost is bounded, in tokens: 64 that the engine computes ahead, 64 that the
handler holds, 64 that Granian took although its buffer was nearly full, and what fits into the
buffers between the handler and the reader.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from fullbore.transport.http2 import HTTP2Transport
from fullbore_backend import AsyncEngine, Engine, EngineConfig
from fullbore_backend.async_engine import BUFFER_TOKENS
from fullbore_backend.server import ServerConfig
from fullbore_backend.server.listener import SEND_BUFFER
from fullbore_backend.server.thread import ThreadServer

pytestmark = pytest.mark.anyio

TOKENS = 4000
EVENT = 200  # bytes; every event is larger
GRANIAN = 64 * 2**10  # its buffer for a response
WINDOW = 64 * 2**10  # of a stream, in our HTTP/2 transport
READ = 256 * 2**10  # what asyncio takes from a socket at once, before anyio stops it


# Bytes in two sockets' buffers, as they were set and doubled by Linux: ours, and the reader's,
# which would grow with what it has read if it were left alone.
RECEIVE_BUFFER = 64 * 2**10
KERNEL = 2 * SEND_BUFFER + 2 * RECEIVE_BUFFER
FIXED = (socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights that speaks in letters: thousands of tokens a second."""
    folder = tmp_path_factory.mktemp("tiny")
    letters = {chr(ord("a") + i): i for i in range(26)} | {"<end>": 26}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=27,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=26,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ThreadServer]:
    engine = Engine(EngineConfig(model=str(tiny), served_name="tiny", kv_cache_bytes=2**22))
    with ThreadServer(AsyncEngine(engine), ServerConfig(port=0)) as running:
        yield running


def body(seed: int, *, tokens: int = TOKENS, stream: bool = True) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": tokens,
        "min_tokens": tokens,
        "seed": seed,
        "stream": stream,
    }


def text_of(events: bytes) -> str:
    lines = [line[6:] for line in events.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return "".join(msgspec.json.decode(line)["choices"][0]["text"] for line in lines[:-1])


async def paused(server: ThreadServer) -> None:
    """Until the engine has given up on the reader; bounded."""
    with anyio.fail_after(30):
        while server.engine.stats().num_paused == 0:
            await anyio.sleep(0.01)


TRANSPORTS: dict[str, tuple[Callable[[], httpx2.AsyncBaseTransport], int]] = {
    "http1": (lambda: httpx2.AsyncHTTPTransport(socket_options=[FIXED]), GRANIAN + KERNEL + READ),
    "http2": (lambda: HTTP2Transport(prior_knowledge=True), GRANIAN + WINDOW),
}


@pytest.mark.parametrize("version", TRANSPORTS)
async def test_a_reader_that_stops_stops_its_own_sequence_only(
    server: ThreadServer, version: str
) -> None:
    make, buffered = TRANSPORTS[version]
    stats = server.engine.stats
    async with httpx2.AsyncClient(transport=make(), base_url=server.url, timeout=60) as client:
        before = stats().generation_tokens
        async with client.stream("POST", "/v1/completions", json=body(1)) as stalled:
            chunks = stalled.aiter_raw()
            events = await anext(chunks)
            await paused(server)
            generated = stats().generation_tokens - before
            assert generated <= 3 * BUFFER_TOKENS + (len(events) + buffered) // EVENT
            assert generated < TOKENS

            neighbour = await client.post("/v1/completions", json=body(2, tokens=200, stream=False))
            assert neighbour.json()["usage"]["completion_tokens"] == 200
            assert stats().generation_tokens - before == generated + 200
            assert stats().num_paused == 1

            async for chunk in chunks:
                events += chunk
        whole = await client.post("/v1/completions", json=body(1, stream=False))
    assert text_of(events) == whole.json()["choices"][0]["text"]
