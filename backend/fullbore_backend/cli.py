"""``fullbore serve``: flags to settings, and what is told while the server starts.

Parses first and imports the engine after, so that ``--help`` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from .config import EngineConfig, KvPrecision, Precision
from .errors import BackendError, ConfigError
from .server.config import ServerConfig

API_KEY_VARIABLE = "FULLBORE_API_KEY"

ENGINE = EngineConfig()
SERVER = ServerConfig()
"""What the flags default to."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    :param argv: the arguments, beginning with ``serve``; ``None`` takes the process's own.
    :returns: the exit code: 0 after a shutdown that was asked for, 1 when the model or the engine
        failed, 2 for settings that cannot work, 130 when interrupted before it was ready.
    """
    options = build_parser().parse_args(argv)
    started = time.perf_counter()
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )

    def say(message: str) -> None:
        print(  # noqa: T201
            f"[{time.perf_counter() - started:6.2f} s] {message}", file=sys.stderr, flush=True
        )

    try:
        _serve(options, say, started)
    except ConfigError as error:
        say(f"ERROR: {error}")
        return 2
    except BackendError as error:
        say(f"ERROR: {error}")
        return 1
    except ImportError as error:
        say(f"ERROR: {error}. The server needs more packages: pip install 'fullbore[backend]'")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    say("stopped")
    return 0


def _serve(options: argparse.Namespace, say: Callable[[str], None], started: float) -> None:
    engine_config, server_config = configs_from(options)
    engine_config.validate()
    server_config.validate()
    if server_config.open_to_others:
        say(
            f"WARNING: {server_config.host} is open to other machines, and no key is asked for. "
            f"Set --api-key or {API_KEY_VARIABLE}, or bind 127.0.0.1."
        )
    if options.until_eof:
        threading.Thread(target=_stop_at_eof, name="until-eof", daemon=True).start()
    say(f"starting {engine_config.model}")
    # Read once, when torch is loaded. OpenMP's threads otherwise spin while they wait for each
    # other: beside an HTTP loop on the same cores, a step then takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Not above: these bring in torch.
    from .loading import model_name
    from .server.serving import serve

    def ready(url: str) -> None:
        name = engine_config.served_name or model_name(engine_config.model)
        say(f"ready in {time.perf_counter() - started:.1f} s at {url} (model {name})")
        say("try it:\n" + try_it(url, name, server_config))

    asyncio.run(serve(engine_config, server_config, ready=ready, progress=say))


def _stop_at_eof() -> None:
    """Wait until standard input ends, and stop as SIGTERM does."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(prog="fullbore")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over OpenAI's HTTP API",
        description="Serve a model over OpenAI's HTTP API. Without flags: SmolLM2-135M-Instruct, "
        "fetched once, on 127.0.0.1:8000.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    _add_network(serve)
    _add_model(serve)
    _add_memory(serve)
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default=SERVER.host, help="the address to bind")
    group.add_argument("--port", type=int, default=SERVER.port, help="the port; 0 takes a free one")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"ask requests for this key; better set in {API_KEY_VARIABLE}, where other users of "
        "the machine do not see it",
    )
    group.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate chain, for TLS")
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="key of the certificate")
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=SERVER.shutdown_timeout,
        metavar="SECONDS",
        help="what running requests get to finish after SIGTERM or Ctrl-C",
    )
    group.add_argument(
        "--until-eof",
        action="store_true",
        default=False,
        help="also stop when standard input ends: with the program that started this one",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much is logged",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=ENGINE.model,
        help="a built-in name, a .gguf file, a folder of safetensors, or a Hugging Face hub id",
    )
    group.add_argument("--served-name", metavar="NAME", help="the name that requests use")
    group.add_argument(
        "--precision",
        choices=get_args(Precision),
        default=ENGINE.precision,
        help="of weights and activations; int8, fp8 and int4 quantise weights as they are read; "
        "auto is bf16 on a GPU, on a CPU int8 where the model allows it, else fp32, and a "
        "quantised checkpoint's own",
    )
    group.add_argument(
        "--kv-precision",
        choices=get_args(KvPrecision),
        default=ENGINE.kv_precision,
        help="of the KV cache; auto is that of the activations, bf16 beside int8 weights",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=ENGINE.device, help="where it runs"
    )
    group.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="where fetched models are kept"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and batching")
    group.add_argument(
        "--kv-cache-memory",
        type=parse_size,
        metavar="SIZE",
        help="of the KV cache, such as 2GiB; left out: a share of the memory available",
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=ENGINE.block_size,
        metavar="TOKENS",
        help="tokens a KV block holds",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="limit on prompt and output together; left out: the model's own",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=ENGINE.max_num_seqs,
        metavar="N",
        help="requests that run at once",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=ENGINE.max_num_batched_tokens,
        metavar="TOKENS",
        help="the token budget of a step: larger fills prompts faster, smaller streams smoother",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=ENGINE.max_waiting,
        metavar="N",
        help="requests that may wait; one more gets 429",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        default=False,
        help="compute every prompt in full",
    )
    group.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        default=False,
        help="on a GPU: launch each kernel of a step by itself, and start sooner",
    )


def configs_from(options: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The settings that parsed flags, and the environment's key, stand for."""
    given = vars(options)
    engine = EngineConfig(
        model=options.model,
        served_name=given.get("served_name"),
        precision=options.precision,
        kv_precision=options.kv_precision,
        device=options.device,
        kv_cache_bytes=given.get("kv_cache_memory"),
        block_size=options.block_size,
        max_model_len=given.get("max_model_len"),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_waiting,
        prefix_caching=not options.no_prefix_caching,
        graphs=not options.no_cuda_graphs,
        cache_dir=given.get("cache_dir"),
        num_threads=given.get("threads"),
    )
    server = ServerConfig(
        host=options.host,
        port=options.port,
        api_key=given.get("api_key", os.environ.get(API_KEY_VARIABLE) or None),
        tls_cert=given.get("tls_cert"),
        tls_key=given.get("tls_key"),
        shutdown_timeout=options.shutdown_timeout,
    )
    return engine, server


def parse_size(text: str) -> int:
    """Bytes from ``2GiB`` (powers of 1024), ``2GB`` (powers of 1000), or a plain number.

    :raises argparse.ArgumentTypeError: it is none of these.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write one such as 2GiB, 500MB or 1073741824"
        )
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def try_it(url: str, model: str, config: ServerConfig) -> str:
    """A command that asks the server something."""
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if config.api_key else ""
    insecure = " -k" if config.tls_cert else ""
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hello!"}}]}}'
    return (
        f"  curl{insecure} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )


if __name__ == "__main__":
    sys.exit(main())
