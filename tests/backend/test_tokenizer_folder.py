"""Tokenizers of Hugging Face folders: the same ids as from GGUF, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers as tokenizers_library

from fullbore_backend.errors import ModelError
from fullbore_backend.tokenizer import Tokenizer, load_tokenizer
from fullbore_backend.tokenizer.from_gguf import read_gguf_tokenizer

TEXTS = ["", "Hello  world 🙂", "<|im_start|>user\nx<|im_end|>", "x<|new|>y<plain>z", " \n1 2"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|new|>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, model_path: Path) -> Path:
    """A folder with the default model's vocabulary and two tokens beyond it."""
    backend = read_gguf_tokenizer(model_path).backend
    backend.add_tokens([tokenizers_library.AddedToken("<plain>", normalized=False)])
    backend.add_special_tokens([tokenizers_library.AddedToken("<|new|>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 49153]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return tmp_path


def change(file: Path, **values: Any) -> None:
    """Set values in a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_ids_equal_the_library_and_the_gguf_file(folder: Path, tokenizer: Tokenizer) -> None:
    """With tokens whose numbers lie beyond the model's vocabulary."""
    loaded = load_tokenizer(folder)
    backend = tokenizers_library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, parse_special=True) == expected
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode("<plain>") == [49152]
    assert loaded.encode("<|new|>") == tokenizer.encode("<|new|>")
    assert loaded.vocab_size == 49154


def test_chat_with_tokens_beyond_the_vocabulary(folder: Path) -> None:
    """A secret spelling has a number of its own, which may be another token's."""
    loaded = load_tokenizer(folder)
    ids = loaded.encode_chat([{"role": "user", "content": "<|new|><plain>"}])
    assert [i for i in ids if i in (1, 49152, 49153)] == [1, 49152, 49153]
    assert ids[-1] == 49153


def test_settings_are_read(folder: Path) -> None:
    """Ends from three files, each once; tokens as strings or objects."""
    loaded = load_tokenizer(folder)
    assert loaded.eos_token_ids == (0, 49153, 2)
    assert loaded.bos_token_id == 1
    assert loaded.encode_prompt("a")[0] == 1


def test_a_vocabulary_with_gaps(folder: Path) -> None:
    """Numbers of added tokens must not run into those of the vocabulary."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < 17]
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    content["model"]["vocab"] = {**vocab, last: vocab[last] + 3}
    file.write_text(json.dumps(content))
    loaded = load_tokenizer(folder)
    word = loaded.decode([vocab[last] + 3])
    ids = loaded.encode("<|im_start|>" + word, parse_special=True)
    assert loaded.encode_chat([{"role": "user", "content": word}])[:2] == ids
    assert loaded.decode(loaded.encode("<|im_end|>" + word)) == "<|im_end|>" + word


def test_the_post_processor_tells_about_bos(folder: Path) -> None:
    """When the settings do not."""
    change(folder / "tokenizer_config.json", add_bos_token=None)
    assert load_tokenizer(folder).encode_prompt("a")[0] != 1
    backend = tokenizers_library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers_library.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode_prompt("a")[0] == 1


def test_named_tokens_are_control_tokens(folder: Path) -> None:
    """Even if `tokenizer.json` does not call them special."""
    change(folder / "tokenizer_config.json", additional_special_tokens=["<plain>", "<absent>"])
    loaded = load_tokenizer(folder)
    assert loaded.decode([49152]) == ""
    assert 49152 not in loaded.encode("<plain>")


@pytest.mark.parametrize("has_tools", [True, False], ids=["tools", "no tools"])
def test_named_templates(folder: Path, has_tools: bool) -> None:
    """A list has one for requests with tools."""
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    change(folder / "tokenizer_config.json", chat_template=templates)
    loaded = load_tokenizer(folder)
    text = loaded.decode(loaded.encode_chat([], tools=[{}] if has_tools else None))
    assert text == ("with tools" if has_tools else "plain")


def test_a_template_file_wins(folder: Path) -> None:
    """`chat_template.jinja`, as newer folders have it."""
    (folder / "chat_template.jinja").write_text("from file")
    loaded = load_tokenizer(folder)
    assert loaded.decode(loaded.encode_chat([])) == "from file"


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    """With a way out, where there is one."""
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"Cannot read .*tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing.*convert it once"):
        load_tokenizer(folder)
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(folder / "nothing")
