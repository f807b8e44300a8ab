"""The tokenizer built from GGUF metadata against transformers' own reading of the same file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullbore_backend.tokenizer import Tokenizer

NUM_STRINGS = 10_000

PIECES = [
    *("the", " quick", "Brown", " fox's", "don't", "WE'LL", "naïve", "Straße", "i̇", "ﬁ", "Ǆ"),
    *(
        "1",
        "42",
        " 007",
        "3.14159",
        "1e-9",
        "٣٤",
        "Ⅻ",
        "½",
        "２０２６",
        "1,000,000",
        "  12",
        "\n\n3.",
    ),
    *(
        "你好",
        "世界",
        "日本語のテキスト",
        "カタカナ",
        "한국어",
        "ᄒᆞᆫ",
        "𠮷",
        "〇",
        "，。！",
        "ไทย",
        "हिन्दी",
        "العربية",
    ),
    *(
        "🙂",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "🇫🇷",
        "☃️",
        "\u200d",
        "\ufe0f",
        "e\u0301",
        "\u0300\u0301\u0302",
    ),
    *(
        "\x00",
        "\x01\x02",
        "\x7f",
        "\x85",
        "\xa0",
        "\u2028",
        "\u2029",
        "\u200b",
        "\ufeff",
        "\u202e",
        "\ufffd",
    ),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u3000", "\u2003", "\x0b\x0c"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<empty_output>"),
    *("<|im_", "end|>", "<|", "|>", "< |im_end|>", "<|im_end|", "<|IM_END|>", "<|im_start|>user\n"),
    *(
        "{}",
        "[](){}",
        "/*",
        "*/",
        "//",
        "=>",
        "!=",
        "...",
        "''",
        '"""',
        "\\n",
        "$$",
        "#",
        "@",
        "~`",
    ),
    *("Ġ", "Ċ", "▁", "<0x0A>", "</s>", "<s>", "<unk>", "\U0010ffff", "\ue000", "\ufdd0", "\uffff"),
]


def nasty_strings(seed: int) -> Iterator[str]:
    """Mixtures of the pieces above, random Unicode, long runs and random ASCII."""
    rng = random.Random(seed)
    for index in range(NUM_STRINGS):
        kind = index % 5
        if kind in (0, 1):
            yield "".join(rng.choices(PIECES, k=rng.randint(1, 24)))
        elif kind == 2:
            yield "".join(_any_character(rng) for _ in range(rng.randint(0, 48)))
        elif kind == 3:
            yield rng.choice(PIECES) * rng.randint(1, 60) + rng.choice(PIECES)
        else:
            yield "".join(chr(rng.randint(0, 127)) for _ in range(rng.randint(0, 80)))


def _any_character(rng: random.Random) -> str:
    ceiling = rng.choice((0x7F, 0x2FF, 0xFFFF, 0x10FFFF))
    code = rng.randint(0, ceiling)
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Any:
    """Transformers' fast tokenizer of the same file; it takes many seconds to convert it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


def test_ids_equal_transformers_on_nasty_strings(tokenizer: Tokenizer, reference: Any) -> None:
    """With markers parsed, as transformers does by default, and with markers as plain text."""
    texts = list(nasty_strings(seed=2026))
    assert len(texts) == NUM_STRINGS
    parsed = reference(texts, add_special_tokens=False)["input_ids"]
    plain = reference(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    wrong = [
        (text, mode)
        for text, with_markers, without in zip(texts, parsed, plain, strict=True)
        for mode, expected in ((True, with_markers), (False, without))
        if tokenizer.encode(text, parse_special=mode) != expected
    ]
    assert not wrong, wrong[:5]
    assert sum(a != b for a, b in zip(parsed, plain, strict=True)) > 1000


def test_decoding_equals_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    """Of random ids, whose bytes are often no UTF-8."""
    rng = random.Random(7)
    for _ in range(1000):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randint(0, 20))
        expected = reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == expected
        whole = reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special=False) == whole


CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "one question": [{"role": "user", "content": "What is 2 + 2?\n\n  Explain."}],
    "with system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hallo 🙂"},
        {"role": "assistant", "content": " Hi! "},
        {"role": "user", "content": ""},
    ],
    "blanks and newlines": [{"role": "user", "content": " \n\t x \n"}],
    "unknown role": [{"role": "critic", "content": "Hm."}],
}


@pytest.mark.parametrize("generation", [True, False], ids=["generation prompt", "no prompt"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_chat_ids_equal_transformers(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]], generation: bool
) -> None:
    """For ordinary text the guarded template gives exactly the usual ids."""
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=generation, return_dict=False
    )
    assert tokenizer.encode_chat(messages, add_generation_prompt=generation) == expected
