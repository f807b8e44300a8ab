"""From a configuration to something that can run: checkpoint, tokenizer, model, KV pool.

The one place that touches files and memory limits; the engine is built from what it returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import DEFAULT_MODEL, EngineConfig, SchedulerConfig
from .errors import ConfigError
from .graphs import cuda_capture
from .kernels import AttentionBatch, KvPages, Ops, select_ops
from .kernels.cpu import load_library
from .kernels.kv_pages import token_bytes
from .memory import num_kv_blocks
from .models import MODELS, AnyCausalModel, CpuDecoder, Decoder, Model, build_model
from .models.cpu_decoder import reason_against
from .runner import Runner
from .tokenizer import Tokenizer, load_tokenizer
from .weights import Checkpoint, open_checkpoint, resolve_model
from .weights.quantize import QUANTIZED, in_precision

logger = logging.getLogger(__name__)

LARGEST_GRAPH = 256
"""Sequences in the largest decode step that is captured as a CUDA graph."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KV_DTYPES = {**_DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What an engine is made of."""

    name: str
    tokenizer: Tokenizer
    runner: Runner
    scheduler_config: SchedulerConfig
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    overlap: bool


def load_model(config: EngineConfig, progress: Callable[[str], None]) -> LoadedModel:
    """Fetch, read and size a model.

    :raises ConfigError: for settings that cannot work with this model or machine.
    :raises ModelError: when the model cannot be found, read or run.
    """
    device = _device(config)
    dtype = _dtype(config, device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    path = resolve_model(
        config.model, cache_dir=config.cache_dir, progress=lambda state: progress(str(state))
    )
    checkpoint = open_checkpoint(path)
    # The tokenizer is built beside the weights: both spend their time outside the interpreter.
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, path)
        progress(f"reading weights of {path.name}")
        model = _model(config, checkpoint, dtype, device)
        progress(f"{_name_of(config, checkpoint, model, dtype)} weights are in memory")
        context = _context(config, model)
        model.init_rotary(context)
        kv_dtype = _kv_dtype(config, model, dtype)
        scheduler_config = _scheduler_config(config, model, context, kv_dtype, device)
        runner = Runner(
            model,
            num_blocks=scheduler_config.num_blocks,
            block_size=scheduler_config.block_size,
            kv_dtype=kv_dtype,
            device=device,
        )
        if device.type == "cuda" and config.graphs and isinstance(model, Decoder):
            progress("capturing decode graphs")
            largest = min(config.max_num_seqs, LARGEST_GRAPH)
            runner.capture_graphs(largest=largest, max_context_len=context, capture=cuda_capture())
        text = tokenizer.result()
        return LoadedModel(
            name=config.served_name or model_name(config.model),
            tokenizer=text,
            runner=runner,
            scheduler_config=scheduler_config,
            eos_token_ids=tuple({*checkpoint.eos_token_ids, *text.eos_token_ids}),
            vocab_size=model.vocab_size,
            overlap=device.type == "cuda" if config.overlap is None else config.overlap,
        )


def model_name(model: str) -> str:
    """What a model is served as unless a name is given: its built-in name, file stem or folder."""
    if model == DEFAULT_MODEL:
        return model
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, and torch finds no CUDA device. Use --device cpu.")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of activations, and of weights that are not quantised."""
    if config.precision == "auto" or config.precision in QUANTIZED:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.precision]


def _kv_dtype(config: EngineConfig, model: Model, dtype: torch.dtype) -> torch.dtype:
    if config.kv_precision != "auto":
        return _KV_DTYPES[config.kv_precision]
    return torch.bfloat16 if isinstance(model, CpuDecoder) else dtype


def _name_of(config: EngineConfig, checkpoint: Checkpoint, model: Model, dtype: torch.dtype) -> str:
    if isinstance(model, CpuDecoder):
        return "int8"
    if config.precision in QUANTIZED:
        return config.precision
    if config.precision == "auto" and checkpoint.quantization is not None:
        return checkpoint.quantization
    return next(name for name, each in _DTYPES.items() if each == dtype)


def _model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Model:
    if device.type == "cpu" and config.precision in ("auto", "int8"):
        model = _cpu_model(checkpoint)
        if model is not None:
            return model
    if checkpoint.model_type not in MODELS and checkpoint.path.is_dir():
        return _any_model(config, checkpoint, dtype, device)
    return _decoder(config, checkpoint, dtype, device)


def _cpu_model(checkpoint: Checkpoint) -> CpuDecoder | None:
    """The model in int8 for the CPU's own kernels; ``None``, with a logged reason, if they cannot.

    A quantised checkpoint is widened first: torch's way with few bits is many times slower.
    """
    reason = f"{checkpoint.model_type} models have no code for it"
    if checkpoint.model_type in MODELS:
        plain = build_model(checkpoint.config, Ops())
        reason = reason_against(plain) or ""
        library = None if reason else load_library()
        if library is not None:
            tensors = checkpoint.tensors(dtype=torch.float32)
            plain.load(in_precision(tensors, "fp32", names=frozenset(), device=torch.device("cpu")))
            return CpuDecoder(plain, library, threads=torch.get_num_threads())
        reason = reason or "the CPU kernels could not be built"
    logger.info("the CPU's int8 kernels are not used: %s", reason)
    return None


def _any_model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> AnyCausalModel:
    if config.precision in QUANTIZED:
        raise ConfigError(
            f"precision {config.precision} is for models with code of ours, which "
            f"{checkpoint.model_type} models have not. Use --precision auto."
        )
    return AnyCausalModel(checkpoint.path, select_ops(device, dtype), dtype=dtype, device=device)


def _decoder(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Decoder:
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = build_model(checkpoint.config, select_ops(device, dtype))
        finally:
            torch.set_default_dtype(default)
    model.load(
        in_precision(
            checkpoint.tensors(dtype=dtype),
            config.precision,
            names=model.linear_weights(),
            device=device,
        )
    )
    return model.eval()


def _context(config: EngineConfig, model: Model) -> int:
    limit = model.max_positions
    if config.max_model_len is None:
        usual = model.usual_positions
        if usual < limit:
            logger.warning(
                "served with %d tokens of context; up to %d can be had by max_model_len, with "
                "other angles for all sequences (layers/rotary.py)",
                *(usual, limit),
            )
        return usual
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and the model was made for {limit} tokens."
        )
    return config.max_model_len


@torch.inference_mode()
def _step_bytes(
    config: EngineConfig, model: Model, context: int, kv_dtype: torch.dtype, device: torch.device
) -> int:
    """What the largest step takes of a GPU besides weights and cache: it is run, and looked at.

    A CPU needs no such care: its memory is not divided up beforehand.
    """
    if device.type != "cuda":
        return 0
    tokens = min(config.max_num_batched_tokens, context)
    blocks = -(-tokens // config.block_size)
    kv = model.kv
    pages = KvPages.zeros(
        *(blocks, config.block_size, kv.kv_heads),
        k_dim=kv.k_dim,
        v_dim=kv.v_dim,
        dtype=kv_dtype,
        device=device,
    )
    batch = AttentionBatch.build(
        query_lens=[tokens],
        context_lens=[tokens],
        block_tables=[list(range(blocks))],
        block_size=config.block_size,
        device=device,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    rows = torch.arange(min(tokens, config.max_num_seqs), device=device)
    model(ids, torch.arange(tokens, device=device), rows, [pages] * kv.layers, batch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def _scheduler_config(
    config: EngineConfig,
    model: Model,
    context: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> SchedulerConfig:
    kv = model.kv
    in_a_layer = token_bytes(kv.kv_heads, k_dim=kv.k_dim, v_dim=kv.v_dim, dtype=kv_dtype)
    block_bytes = kv.layers * in_a_layer * config.block_size
    blocks = num_kv_blocks(
        requested_bytes=config.kv_cache_bytes,
        block_bytes=block_bytes,
        useful_blocks=config.max_num_seqs * -(-context // config.block_size),
        device=device,
        step_bytes=_step_bytes(config, model, context, kv_dtype, device),
    )
    return SchedulerConfig(
        num_blocks=blocks,
        block_size=config.block_size,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        prefix_caching=config.prefix_caching,
    )
