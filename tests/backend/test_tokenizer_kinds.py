"""Other kinds of tokenizers than the default model's, against transformers' reading of the file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullbore_backend.errors import ModelError
from fullbore_backend.tokenizer import load_tokenizer
from fullbore_backend.tokenizer.byte_alphabet import BYTE_TO_CHAR
from fullbore_backend.tokenizer.splits import SPLITS

WORDS = [
    *("the", "quick", "brown", "fox's", "DON'T", "we'll", "Hello", "WORLD", "helloWorld"),
    *(
        "XMLHttp",
        "naïve",
        "12345",
        "007",
        "3.14",
        "½",
        "你好世界",
        "日本語",
        "こんにちは",
        "한국어",
    ),
    *(
        "привет",
        "العربية",
        "हिन्दी",
        "🙂",
        "👩‍👧",
        "//",
        "!=",
        "==>",
        "{}()",
        "...",
        "'S",
        "'ll\t\t",
    ),
    *("x\n\n", "y", "\r\n", "z", "  12"),
]


def texts(count: int = 300) -> list[str]:
    """Mixtures of words, blanks and single characters."""
    rng = random.Random(11)
    blanks = ["", " ", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u3000", "\xa0"]
    mixed = [
        "".join(rng.choice(WORDS) + rng.choice(blanks) for _ in range(12)) for _ in range(count)
    ]
    return ["", " ", "  ", "\n", " a", "a ", *mixed, *(text.lower() for text in mixed[:50])]


def reference(path: Path) -> Any:
    """Transformers' fast tokenizer of the file."""
    import transformers.integrations.gguf as gguf_integration

    architecture, fields, _ = gguf_integration.get_gguf_tokenizer(str(path))
    backend, _ = gguf_integration.convert_gguf_tokenizer(architecture, fields)
    return backend


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A small vocabulary: all bytes, and merges taken from the words, enough to tell cuts."""
    spelled = ["".join(BYTE_TO_CHAR[b] for b in text.encode()) for text in texts(60)]
    tokens, merges = list(BYTE_TO_CHAR.values()), []
    known = set(tokens)
    rng = random.Random(5)
    while len(merges) < 1200:
        text = rng.choice(spelled[6:])
        start = rng.randrange(len(text) - 1)
        left = max(
            (text[start:stop] for stop in range(start + 1, start + 9) if text[start:stop] in known),
            key=len,
        )
        rest = text[start + len(left) :]
        right = max(
            (rest[:stop] for stop in range(1, 9) if rest[:stop] in known), key=len, default=""
        )
        if right and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    types = [1] * len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", "<tool>"],
        "tokenizer.ggml.token_type": [*types, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_byte_level_cuts_equal_transformers(write_gguf: Callable[..., Path], pre: str) -> None:
    """For each rule that transformers knows too."""
    path = write_gguf(byte_level_metadata(pre))
    tokenizer, expected = load_tokenizer(path), reference(path)
    if SPLITS[pre].ignore_merges:  # transformers leaves out what the original files set
        expected.model.ignore_merges = True
    for text in [*texts(), "a<|end|>b<tool>c", " <|end|> "]:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_cut_keeps_all_text(pre: str) -> None:
    """No rule loses or doubles a character."""
    cutter = SPLITS[pre].pre_tokenizer()
    for text in texts(40):
        pieces = "".join(piece for piece, _ in cutter.pre_tokenize_str(text))
        assert pieces == "".join(BYTE_TO_CHAR[b] for b in text.encode())


def test_an_unknown_cut_is_refused(write_gguf: Callable[..., Path]) -> None:
    """Guessing would give worse answers without a sign."""
    with pytest.raises(ModelError, match="rule 'martian', which is unknown"):
        load_tokenizer(write_gguf(byte_level_metadata("martian")))


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """Scored pieces with byte fallback, in which `</s>` could be merged from text."""
    rng = random.Random(3)
    source = "▁" + "▁".join(WORDS[:14]) + "▁</s>▁<s>▁▁▁▁"
    pieces = {source[i : i + n] for n in (1, 2, 3, 4, 6) for i in range(len(source) - n)}
    pieces |= {"<", "/", "s", ">", "</", "s>", "</s", "<s"}
    ordinary = sorted(pieces - {"<s>", "</s>", "<unk>"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *ordinary, "<tool>"]
    scores = [0.0] * 259 + [-float(rng.randrange(2000)) for _ in ordinary] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(ordinary) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def test_sentencepiece_equals_transformers(write_gguf: Callable[..., Path]) -> None:
    """Merges from scores, the blank at the start, and bytes for what has no piece."""
    path = write_gguf(sentencepiece_metadata())
    tokenizer, expected = load_tokenizer(path), reference(path)
    for text in [*texts(), "</s>a <s> b</s>", "a<tool>b", "▁x ▁"]:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == ids, text
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        pushed = tokenizer.detokenizer()
        assert "".join(pushed.push([i]) for i in ids) + pushed.flush() == tokenizer.decode(ids)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode_prompt("</s>").count(1) == 1


def test_text_cannot_be_merged_into_a_control_token(write_gguf: Callable[..., Path]) -> None:
    """Though the vocabulary has the halves of one."""
    tokenizer = load_tokenizer(write_gguf(sentencepiece_metadata()))
    for text in ("</s>", "a</s>", "<s></s> <s>", "</s" + ">"):
        ids = tokenizer.encode(text)
        assert not {1, 2} & set(ids)
        assert tokenizer.decode(ids) == text


def test_no_blank_is_added_when_the_file_says_so(write_gguf: Callable[..., Path]) -> None:
    """`add_space_prefix` false: nothing is put before the text, and nothing taken away."""
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load_tokenizer(write_gguf(metadata))
    assert tokenizer.token_bytes(tokenizer.encode("the")[0])[:1] == b"t"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_gemma_equals_transformers(write_gguf: Callable[..., Path]) -> None:
    """Blanks by a normaliser, and merges in the order of the vocabulary."""
    path = write_gguf(sentencepiece_metadata(), architecture="gemma3")
    tokenizer, expected = load_tokenizer(path), reference(path)
    for text in texts():
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"tokenizer.ggml.model": "t5"}, "kind 't5'", id="unknown kind"),
        pytest.param({"tokenizer.ggml.tokens": 3}, "no list of strings", id="no tokens"),
        pytest.param({"tokenizer.ggml.token_type": [1]}, "has 1 entries for", id="too few types"),
        pytest.param({"tokenizer.ggml.merges": ["a"]}, "not a pair", id="half a merge"),
        pytest.param({"tokenizer.ggml.merges": ["a €"]}, "cannot be used", id="unknown token"),
    ],
)
def test_broken_metadata_is_refused(
    write_gguf: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    """Naming the file and the fault."""
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(write_gguf({**byte_level_metadata("gpt-2"), **change}))
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, (1456,)),
        ({"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4}, (1456, 3, 4)),
        ({"tokenizer.ggml.eot_token_id": 1456}, (1456,)),
    ],
    ids=["eos", "eos, eot and eom", "the same twice"],
)
def test_every_end_token_counts(
    write_gguf: Callable[..., Path], extra: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """End of sequence, of turn, of message."""
    tokenizer = load_tokenizer(write_gguf({**byte_level_metadata("gpt-2"), **extra}))
    assert tokenizer.eos_token_ids == expected
