"""Greedy tokens against transformers' ``generate`` on the same dequantised fp32 weights.

However requests are batched, chunked, paged, cached or preempted, each must get the tokens it would
get alone. Where the two likeliest logits differ by less than 1e-4, rounding decides; the test then
reports a tie, and compares that prompt no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fullbore_backend import Engine, EngineConfig, SamplingParams

TOKENS = 64
TIE = 1e-4
SYSTEM = (
    "You are a patient assistant in a small library by the sea. Answer in plain words, in at most "
    "three sentences, and never invent a book that does not exist."
)
QUESTIONS = [
    "Why is the sky blue?",
    "List three fruits that are red.",
    "What is 17 + 25?",
    "Write one sentence about a lighthouse.",
    "Translate 'good morning' into French.",
    "How do bees make honey?",
    "Name the planets of the solar system in order.",
    "What does HTTP stand for?",
    "Explain recursion to a child.",
    "Give me a short recipe for pancakes.",
    "Who wrote Hamlet?",
    "What is the boiling point of water at sea level?",
    "Write a haiku about rain.",
    "How many legs does a spider have?",
    "Describe a violin without naming it.",
    "What is the opposite of ancient?",
]


def prompts(engine: Engine) -> list[list[int]]:
    """32 prompts: every other one has the long system message; two are not chats at all."""
    chats = []
    for index, question in enumerate(QUESTIONS * 2):
        messages = [{"role": "user", "content": question}]
        if index % 2:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        if index >= len(QUESTIONS):
            messages += [
                {
                    "role": "assistant",
                    "content": "Let me think about that for a moment. " * (index // 4),
                },
                {"role": "user", "content": "Go on."},
            ]
        chats.append(engine.tokenizer.encode_chat(messages))
    chats[5] = engine.tokenizer.encode_prompt("Once upon a time, in a harbour town,")
    chats[6] = [17]
    return chats


@dataclass
class Oracle:
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]

    def only(self, indices: Sequence[int]) -> Oracle:
        """The same for some of the prompts, in this order."""
        return replace(
            self,
            prompts=[self.prompts[i] for i in indices],
            tokens=[self.tokens[i] for i in indices],
        )

    def compare(self, got: Sequence[Sequence[int]]) -> list[str]:
        """Fails on a difference that is no tie; returns a line for each tie."""
        ties = []
        for index, (ours, theirs) in enumerate(zip(got, self.tokens, strict=True)):
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None
            )
            if at is None:
                assert len(ours) == len(theirs), f"prompt {index}"
                continue
            prefix = self.prompts[index] + theirs[:at]
            with torch.inference_mode():
                logits = self.model(torch.tensor([prefix])).logits[0, -1]
            gap = float(logits[theirs[at]] - logits[ours[at]])
            assert abs(gap) < TIE, (
                f"prompt {index}, token {at}: {ours[at]} instead of {theirs[at]}, {gap:.2e} below"
            )
            ties.append(f"prompt {index}, token {at}: a tie, {gap:.1e} apart")
        return ties


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    """transformers reads the GGUF file by itself, so that our reader is tested too."""
    engine = Engine(EngineConfig(precision="fp32", kv_cache_bytes=2**24))
    asked = prompts(engine)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
    ).eval()
    width = max(map(len, asked))
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([[0] * (width - len(ids)) + ids for ids in asked]),
            attention_mask=torch.tensor(
                [[0] * (width - len(ids)) + [1] * len(ids) for ids in asked]
            ),
            do_sample=False,
            temperature=None,
            top_p=None,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return Oracle(model, asked, [row[width:].tolist() for row in out])


BLOCK_BYTES = 2 * 30 * 3 * 64 * 4  # of a block of one token, in fp32

CONFIGS: dict[str, EngineConfig] = {
    "as it comes": EngineConfig(precision="fp32"),
    "budget 33, blocks of 1": EngineConfig(
        precision="fp32", max_num_batched_tokens=33, max_num_seqs=32, block_size=1
    ),
    "one at a time, blocks of 64": EngineConfig(precision="fp32", max_num_seqs=1, block_size=64),
    "no prefix cache, budget 2048": EngineConfig(
        precision="fp32", prefix_caching=False, max_num_batched_tokens=2048
    ),
    "memory for a few": EngineConfig(
        precision="fp32",
        kv_cache_bytes=1600 * BLOCK_BYTES,
        max_num_batched_tokens=100,
        block_size=8,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name: str, oracle: Oracle, record_property: Any) -> None:
    config = CONFIGS[name]
    engine = Engine(config)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    order = list(range(len(oracle.prompts)))
    if config.max_num_seqs == 1:
        runs = [order[::4]]
    elif config.prefix_caching:
        runs = [order, order[::-1]]  # again, in another company, from the prefix cache
    else:
        runs = [order]
    for indices in runs:
        asked = oracle.only(indices)
        done = engine.generate(asked.prompts, params)
        ties = asked.compare([completion.token_ids for completion in done])
        record_property("ties", ties)
        print(*ties, sep="\n")  # noqa: T201
    stats = engine.stats()
    assert stats.num_blocks_used == 0
    assert (stats.prefix_cache_hits > 0) == (len(runs) == 2)
    assert (stats.num_preemptions > 0) == (name == "memory for a few")


def test_neighbours_and_parameters_do_not_leak(oracle: Oracle) -> None:
    """A greedy request among sampled, penalised, biased and short ones gets its own tokens."""
    engine = Engine(EngineConfig(precision="fp32", max_num_seqs=16))
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    others = [
        SamplingParams(temperature=1.5, max_tokens=20, seed=1),
        SamplingParams(top_p=0.5, max_tokens=5),
        replace(greedy, max_tokens=9, repetition_penalty=1.5),
        SamplingParams(max_tokens=30, logit_bias={5: 100}, logprobs=3),
        greedy,
    ]
    params = [greedy if i % 2 else others[i // 2 % len(others)] for i in range(32)]
    done = engine.generate(oracle.prompts, params)
    mine = [i for i in range(32) if params[i] is greedy]
    oracle.only(mine).compare([done[i].token_ids for i in mine])
