"""What can never work, said before anything runs: sizes below one, prompts that fit nowhere.

Reads configuration and lengths only; it does not know what is running.
"""

from __future__ import annotations

from ..config import SchedulerConfig
from ..errors import ConfigError, ContextLengthError, InvalidRequestError


def check_sizes(config: SchedulerConfig) -> None:
    """Refuse a size below 1.

    :raises ConfigError: naming the size.
    """
    for name in (
        "num_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_waiting",
    ):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")


def capacity(config: SchedulerConfig) -> int:
    """Tokens the pool has slots for."""
    return config.num_blocks * config.block_size


def check_prompt(config: SchedulerConfig, num_prompt_tokens: int) -> None:
    """Refuse a prompt length that can never be served.

    :raises InvalidRequestError: for an empty prompt.
    :raises ContextLengthError: if it can never fit the context or the KV pool.
    """
    limit, prompt = config.max_model_len, num_prompt_tokens
    if prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", param="prompt")
    if prompt + 1 > limit:
        raise ContextLengthError(
            f"The prompt has {prompt} tokens and needs room for one more, but the context is "
            f"limited to {limit} tokens. Shorten the prompt, or raise max_model_len "
            "(--max-model-len) if the model allows.",
            param="prompt",
        )
    if prompt > capacity(config):
        raise ContextLengthError(
            f"The prompt has {prompt} tokens, but the whole KV cache holds {capacity(config)}. "
            "Shorten the prompt, or raise kv_cache_bytes (--kv-cache-memory).",
            param="prompt",
        )


def max_num_tokens(config: SchedulerConfig, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """The most tokens a sequence may come to have, prompt and output together.

    :param max_tokens: the most tokens to generate; ``None`` is up to the context limit.
    """
    # The last token is only sampled: nothing follows it, so it needs no slot.
    limit = min(config.max_model_len, capacity(config) + 1)
    return limit if max_tokens is None else min(limit, num_prompt_tokens + max(1, max_tokens))
