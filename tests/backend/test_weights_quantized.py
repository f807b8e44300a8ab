"""Quantised checkpoints: packed here from known codes, read, and run beside the wide weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fullbore_backend.config import Precision
from fullbore_backend.errors import ModelError
from fullbore_backend.kernels import AttentionBatch, KvPages, select_ops
from fullbore_backend.kernels.linear_fp8 import Fp8Weight
from fullbore_backend.kernels.linear_int4 import Int4Weight
from fullbore_backend.kernels.linear_int8 import Int8Weight
from fullbore_backend.layers.linear import Linear
from fullbore_backend.models import Decoder, build_model
from fullbore_backend.weights import open_checkpoint
from fullbore_backend.weights.quantize import in_precision

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LARGE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}  # whole blocks of 128
Parts = dict[str, torch.Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[Parts, torch.Tensor]]


def config(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": sizes["hidden_size"] // sizes["head_dim"],
        "num_key_value_heads": sizes["hidden_size"] // sizes["head_dim"] // 2,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **sizes,
    }


def linear_shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Every linear map but the head: outputs and inputs."""
    hidden, middle, dim = (
        settings[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    query, kv = (settings[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes = {}
    for layer in range(settings["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj"] = (rows, hidden)
        shapes[f"{at}.self_attn.o_proj"] = (hidden, query)
        shapes[f"{at}.mlp.gate_proj"] = shapes[f"{at}.mlp.up_proj"] = (middle, hidden)
        shapes[f"{at}.mlp.down_proj"] = (hidden, middle)
    return shapes


def other_tensors(settings: Mapping[str, Any]) -> Parts:
    generator = torch.Generator().manual_seed(3)
    hidden = settings["hidden_size"]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": randn(settings["vocab_size"], hidden),
        "lm_head.weight": randn(settings["vocab_size"], hidden) * 0.2,
        "model.norm.weight": 1 + 0.1 * randn(hidden),
    }
    for layer in range(settings["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * randn(hidden)
    return tensors


def packed(values: np.ndarray[Any, Any], bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """(rows, columns) to words of 32 bits along the columns.

    :param order: which column of a word's has its lowest bits, and so on; by default the first.
    """
    per_word = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        word, place = divmod(column, per_word)
        shift = bits * (list(order).index(place) if order else place)
        words[:, word] |= values[:, column].astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32).copy())


def draw(
    random: np.random.Generator, rows: int, groups: int, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """Scales as a checkpoint has them, (rows, groups)."""
    return torch.from_numpy(random.uniform(0.01, 0.03, (rows, groups))).to(dtype)


def wide(
    codes: np.ndarray[Any, Any],
    zeros: np.ndarray[Any, Any],
    scales: torch.Tensor,
    groups: np.ndarray[Any, Any],
) -> torch.Tensor:
    """By the definition: each code less its group's zero, times its group's scale."""
    values = (codes - zeros[:, groups]) * scales.double().numpy()[:, groups]
    return torch.from_numpy(values).float()


def awq(random: np.random.Generator, rows: int, inputs: int) -> tuple[Parts, torch.Tensor]:
    group, order = 32, (0, 2, 4, 6, 1, 3, 5, 7)
    codes = random.integers(0, 16, (rows, inputs))
    zeros = random.integers(0, 16, (rows, inputs // group))
    scales = draw(random, rows, inputs // group)
    parts = {
        "qweight": packed(codes.T, 4, order),
        "qzeros": packed(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }
    return parts, wide(codes, zeros, scales, np.arange(inputs) // group)


def gptq(
    *, bits: int = 4, version: int = 1, group: int = 32, act_order: bool = False, sym: bool = False
) -> Packer:
    def pack(random: np.random.Generator, rows: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        size = inputs if group < 0 else group
        count, middle = inputs // size, 1 << bits - 1
        codes = random.integers(0, 2 * middle, (rows, inputs))
        zeros = random.integers(version == 1, 2 * middle, (rows, count))
        if sym:
            zeros[:] = middle
        scales = draw(random, rows, count)
        groups = np.arange(inputs) // size
        if act_order:
            random.shuffle(groups)
        parts = {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed(zeros.T - (version == 1), bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "bias": torch.zeros(rows, dtype=torch.float16),  # as it is often found
        }
        return parts, wide(codes, zeros, scales, groups)

    return pack


def fp8(part: str, shape: Callable[[int, int], tuple[int, ...]], block: int = 0) -> Packer:
    def pack(random: np.random.Generator, rows: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        values = torch.from_numpy(random.normal(0, 100, (rows, inputs))).clamp(-448, 448)
        weight = values.to(torch.float8_e4m3fn)
        scales = torch.from_numpy(random.uniform(1e-4, 3e-4, shape(rows, inputs))).float()
        spread = scales.double()
        if block:
            spread = spread.repeat_interleave(block, 0).repeat_interleave(block, 1)
            spread = spread[:rows, :inputs]
        parts = {"weight": weight, part: scales, "input_scale": torch.ones(1)}
        return parts, (weight.double() * spread).float()

    return pack


def pack_quantized(
    *, bits: int = 4, group: int = 32, asymmetric: bool = False, act_order: bool = False
) -> Packer:
    def pack(random: np.random.Generator, rows: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        size = inputs if group < 0 else group
        middle = 1 << bits - 1
        codes = random.integers(-middle, middle, (rows, inputs))
        zeros = np.zeros((rows, inputs // size), np.int64)
        scales = draw(random, rows, inputs // size, torch.bfloat16)
        groups = np.arange(inputs) // size
        parts = {
            "weight_packed": packed(codes + middle, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if asymmetric:
            zeros = random.integers(-middle, middle, zeros.shape)
            parts["weight_zero_point"] = packed(zeros.T + middle, bits).T.contiguous()
        if act_order:
            random.shuffle(groups)
            parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return parts, wide(codes, zeros, scales, groups)

    return pack


def int_quantized(*, groups: int = 1, asymmetric: bool = False, whole: bool = False) -> Packer:
    def pack(random: np.random.Generator, rows: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        codes = random.integers(-127, 128, (rows, inputs))
        zeros = np.zeros((rows, groups), np.int64)
        scales = draw(random, rows, groups, torch.float32) / 16
        parts = {"weight": torch.from_numpy(codes.astype(np.int8))}
        parts["weight_scale"] = scales
        if whole:
            scales[:] = scales[0, 0]
            parts["weight_scale"] = scales[0, :1].clone()
        if asymmetric:
            zeros = random.integers(-20, 20, zeros.shape)
            parts["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return parts, wide(codes, zeros, scales, np.arange(inputs) * groups // inputs)

    return pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A format: what a configuration says of it, how it is packed, and what is to come of it.

    :param kept: the kind that its weights keep; ``None`` if they are widened.
    """

    settings: dict[str, Any]
    pack: Packer
    kept: type | None
    sizes: Mapping[str, int] | None = None


def compressed(form: str, bits: int = 4, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
CASES = {
    "awq": Case(settings=AWQ, pack=awq, kept=Int4Weight),
    "gptq": Case(settings=GPTQ, pack=gptq(), kept=Int4Weight),
    "gptq symmetric": Case(settings=GPTQ | {"sym": True}, pack=gptq(sym=True), kept=Int4Weight),
    "gptq one group": Case(
        settings=GPTQ | {"group_size": -1}, pack=gptq(group=-1), kept=Int4Weight
    ),
    "gptq groups of 16": Case(settings=GPTQ | {"group_size": 16}, pack=gptq(group=16), kept=None),
    "gptq 2": Case(
        settings=GPTQ | {"checkpoint_format": "gptq_v2"}, pack=gptq(version=2), kept=Int4Weight
    ),
    "gptq act-order": Case(
        settings=GPTQ | {"desc_act": True}, pack=gptq(act_order=True), kept=None
    ),
    "gptq 8 bits": Case(settings=GPTQ | {"bits": 8}, pack=gptq(bits=8), kept=None),
    "fp8 blocks": Case(
        settings=BLOCKS,
        pack=fp8("weight_scale_inv", lambda *shape: tuple(-(-s // 128) for s in shape), 128),
        kept=Fp8Weight,
        sizes=LARGE,
    ),
    "fp8 other blocks": Case(
        settings=BLOCKS | {"weight_block_size": [32, 32]},
        pack=fp8("weight_scale_inv", lambda *shape: tuple(-(-s // 32) for s in shape), 32),
        kept=None,
    ),
    "fp8 tensor": Case(settings=FP8, pack=fp8("weight_scale", lambda *_: ()), kept=Fp8Weight),
    "fbgemm": Case(
        settings={"quant_method": "fbgemm_fp8"},
        pack=fp8("weight_scale", lambda rows, _: (rows, 1)),
        kept=Fp8Weight,
    ),
    "packed": Case(
        settings=compressed("pack-quantized", group_size=32),
        pack=pack_quantized(),
        kept=Int4Weight,
    ),
    "packed, zeros": Case(
        settings=compressed("pack-quantized", group_size=32, symmetric=False),
        pack=pack_quantized(asymmetric=True),
        kept=Int4Weight,
    ),
    "packed, act-order": Case(
        settings=compressed("pack-quantized", group_size=32, actorder="group"),
        pack=pack_quantized(asymmetric=True, act_order=True),
        kept=None,
    ),
    "packed, 8 bits": Case(
        settings=compressed("pack-quantized", 8, strategy="channel"),
        pack=pack_quantized(bits=8, group=-1),
        kept=None,
    ),
    "int8": Case(
        settings=compressed("int-quantized", 8, strategy="channel"),
        pack=int_quantized(),
        kept=Int8Weight,
    ),
    "int8 tensor": Case(
        settings=compressed("int-quantized", 8, strategy="tensor"),
        pack=int_quantized(whole=True),
        kept=Int8Weight,
    ),
    "int8, zeros": Case(
        settings=compressed("int-quantized", 8, symmetric=False),
        pack=int_quantized(asymmetric=True),
        kept=None,
    ),
    "int8 groups": Case(
        settings=compressed("int-quantized", 8, group_size=16),
        pack=int_quantized(groups=2),
        kept=None,
    ),
    "float8": Case(
        settings=compressed("float-quantized", 8, "float", strategy="channel"),
        pack=fp8("weight_scale", lambda rows, _: (rows, 1)),
        kept=Fp8Weight,
    ),
    "float8 blocks, a mixture": Case(
        settings=compressed("mixed-precision", 8, "float", block_structure=[128, 128]),
        pack=fp8("weight_scale", lambda *shape: tuple(-(-s // 128) for s in shape), 128),
        kept=Fp8Weight,
        sizes=LARGE,
    ),
}


def write(
    folder: Path, case: Case, change: Callable[[Parts], object] = lambda _: None, **more: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint in two shards, and the same weights wide.

    :param change: of the quantised one's tensors; :param more: of the configuration.
    """
    settings = config(case.sizes or SMALL) | more
    random = np.random.default_rng(5)
    tensors, plain = other_tensors(settings), other_tensors(settings)
    for name, shape in linear_shapes(settings).items():
        parts, weight = case.pack(random, *shape)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        plain[f"{name}.weight"] = weight
    change(tensors)
    quantised, other = folder / "quantised", folder / "plain"
    quantised.mkdir()
    other.mkdir()
    # The parts of a weight may lie in several files.
    shards = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file(
            {name: tensors[name] for name in tensors if shards[name] == shard}, quantised / shard
        )
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (quantised / "model.safetensors.index.json").write_text(index)
    changed = settings | {"quantization_config": case.settings}
    (quantised / "config.json").write_text(json.dumps(changed))
    save_file(plain, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(settings))
    return quantised, other


def load(folder: Path, precision: Precision = "auto") -> Decoder:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, select_ops(CPU))
    tensors = checkpoint.tensors(dtype=torch.float32)
    model.load(in_precision(tensors, precision, names=model.linear_weights(), device=CPU))
    model.init_rotary(64)
    return model


@torch.inference_mode()
def logits(model: Decoder, tokens: Sequence[int] = range(1, 25)) -> torch.Tensor:
    count, kv = len(tokens), model.kv
    pages = [
        KvPages(
            k=torch.zeros(2, 16, kv.kv_heads, kv.k_dim), v=torch.zeros(2, 16, kv.kv_heads, kv.v_dim)
        )
        for _ in range(kv.layers)
    ]
    batch = AttentionBatch.build(
        query_lens=[count], context_lens=[count], block_tables=[[0, 1]], block_size=16, device=CPU
    )
    positions = torch.arange(count)
    return model(torch.tensor(tokens), positions, positions, pages, batch)


def kinds(model: Decoder) -> set[type | None]:
    """Of the weights that its linear maps keep, the head's apart."""
    return {
        type(module.packed) if module.is_quantized else None
        for module in model.modules()
        if isinstance(module, Linear) and module is not model.head
    }


@pytest.fixture(params=CASES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Case, Path, Path]:
    case = CASES[request.param]
    return case, *write(tmp_path, case)


def test_weights_come_back(written: tuple[Case, Path, Path]) -> None:
    """All of them, as the definitions of the formats say."""
    _, quantised, plain = written
    found = dict(open_checkpoint(quantised).tensors(dtype=torch.float32))
    for name, want in open_checkpoint(plain).tensors(dtype=torch.float32):
        got = found.pop(name)
        torch.testing.assert_close(
            got if isinstance(got, torch.Tensor) else got.dequantize(), want, rtol=1e-6, atol=1e-7
        )
    assert all(name.endswith(".bias") for name in found)


def test_a_model_runs_as_with_wide_weights(written: tuple[Case, Path, Path]) -> None:
    """Within rounding; where activations are quantised too, within a few per cent."""
    case, quantised, plain = written
    model = load(quantised)
    assert kinds(model) == {case.kept}
    got, want = logits(model), logits(load(plain))
    error = (got - want).abs().max() / want.abs().max()
    assert error < (0.1 if case.kept in (Int8Weight, Fp8Weight) else 1e-4)
    error = (logits(load(quantised, "fp32")) - want).abs().max() / want.abs().max()
    assert error < 1e-4


def test_transformers_reads_fp8_the_same(tmp_path: Path) -> None:
    """It widens to bf16 on a CPU, so within that."""
    pytest.importorskip("accelerate")
    import transformers

    quantised, _ = write(tmp_path, CASES["fp8 blocks"])
    model = transformers.AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    state = model.state_dict()
    for name, got in open_checkpoint(quantised).tensors(dtype=torch.float32):
        weight = got if isinstance(got, torch.Tensor) else got.dequantize()
        torch.testing.assert_close(weight, state[name].float(), rtol=0.01, atol=1e-6)


def test_modules_may_be_left_alone(tmp_path: Path) -> None:
    """Their weights are plain, and what they are joined with is widened."""
    case = CASES["awq"]
    left = "model.layers.1.self_attn.k_proj"

    def widen(tensors: Parts) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{left}.{part}"]
        tensors[f"{left}.weight"] = torch.zeros(linear_shapes(config(SMALL))[left])

    changed = Case(
        settings=case.settings | {"modules_to_not_convert": [left]}, pack=case.pack, kept=None
    )
    quantised, plain = write(tmp_path, changed, widen)
    model = load(quantised)
    assert kinds(model) == {Int4Weight, None}
    tensors = dict(open_checkpoint(plain).tensors(dtype=torch.float32))
    tensors[f"{left}.weight"] = torch.zeros(linear_shapes(config(SMALL))[left])
    other = build_model(config(SMALL), select_ops(CPU))
    other.load(tensors.items())
    other.init_rotary(64)
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


AT = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "awq",
            lambda t: t.pop(f"{AT}.scales"),
            rf"no {AT}.scales, which goes with qweight, qzeros",
        ),
        ("awq", lambda t: t.pop(f"{AT}.qweight"), rf"no {AT}.qweight, which goes with"),
        (
            "awq",
            lambda t: t.update({f"{AT}.qweight": t[f"{AT}.qweight"][:, :-1].clone()}),
            rf"{AT}.qweight of the checkpoint is int32 of shape \(96, 7\)",
        ),
        (
            "awq",
            lambda t: t.update({f"{AT}.qweight": t[f"{AT}.qweight"][:-1].clone()}),
            rf"{AT}.scales .* does not fit a weight of \(64, 95\)",
        ),
        ("gptq", lambda t: t.pop(f"{AT}.qzeros"), rf"no {AT}.qzeros, which goes with"),
        (
            "gptq",
            lambda t: t.update({f"{AT}.qzeros": t[f"{AT}.qzeros"][:, :-2].clone()}),
            rf"{AT}.qzeros: weights of 3 bits are not supported; 4 and 8 are",
        ),
        (
            "gptq",
            lambda t: t.update({f"{AT}.g_idx": t[f"{AT}.g_idx"] + 1}),
            rf"{AT}.g_idx .* 96 inputs in 3 groups were expected",
        ),
        ("fp8 tensor", lambda t: t.pop(f"{AT}.weight_scale"), rf"{AT}.weight .* no scale beside"),
        (
            "fp8 other blocks",
            lambda t: t.update({f"{AT}.weight_scale_inv": torch.ones(2, 2)}),
            rf"{AT}.weight_scale_inv .* does not fit a weight of \(64, 96\)",
        ),
        (
            "fp8 tensor",
            lambda t: t.update({f"{AT}.weight": t[f"{AT}.weight"].float()}),
            rf"{AT}.weight .* is float32 .* a matrix in float8 e4m3 was expected",
        ),
        (
            "packed",
            lambda t: t.pop(f"{AT}.weight_shape"),
            rf"no {AT}.weight_shape, which goes with",
        ),
        (
            "packed",
            lambda t: t.pop(f"{AT}.weight_scale"),
            rf"no {AT}.weight_scale, which goes with",
        ),
        (
            "packed",
            lambda t: t.update({f"{AT}.weight_packed": t[f"{AT}.weight_packed"][:, :9].clone()}),
            rf"{AT}.weight_packed .* \(64, 96\) codes of 4 or 8 bits were expected",
        ),
        (
            "packed, zeros",
            lambda t: t.update({f"{AT}.weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)}),
            rf"{AT}.weight_zero_point .* 64 outputs were expected",
        ),
        (
            "int8",
            lambda t: t.update({f"{AT}.weight_scale": torch.ones(63, 1)}),
            rf"{AT}.weight_scale .* does not fit",
        ),
    ],
)
def test_what_cannot_be_is_named(
    case: str, change: Callable[[Parts], object], message: str, tmp_path: Path
) -> None:
    quantised, _ = write(tmp_path, CASES[case], change)
    with pytest.raises(ModelError, match=message):
        load(quantised)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AWQ | {"version": "gemv"}, "layout 'gemv' is not supported; gemm is"),
        (AWQ | {"bits": 3}, "AWQ with 3 bits"),
        (GPTQ | {"bits": 2}, "weights of 2 bits are not supported; 4 and 8 are"),
        (GPTQ | {"checkpoint_format": "marlin"}, "layout 'marlin'"),
        (FP8 | {"fmt": "e5m2"}, "float8 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (compressed("nvfp4-pack-quantized"), "'nvfp4-pack-quantized' is not supported"),
        (compressed("pack-quantized", 3), "weights of 3 bits"),
        (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (compressed("dense") | {"transform_config": {"config_groups": {}}}, "rotated activations"),
        ({"quant_method": "bitsandbytes"}, "quantised with bitsandbytes"),
    ],
)
def test_what_is_not_known_is_refused_at_once(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config(SMALL) | {"quantization_config": settings})
    )
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("precision", "kind", "allowed"),
    [("int8", Int8Weight, 0.05), ("fp8", Fp8Weight, 0.15), ("int4", Int4Weight, 0.4)],
)
def test_float_weights_are_quantised_as_they_are_read(
    tmp_path: Path, precision: Precision, kind: type, allowed: float
) -> None:
    """All but the output head's; a quantised checkpoint's of another kind too."""
    quantised, plain = write(tmp_path, CASES["gptq act-order"])
    model = load(plain, precision)
    assert kinds(model) == {kind}
    assert model.head is not None
    assert not model.head.is_quantized
    want = logits(load(plain))
    error = (logits(model) - want).abs().max() / want.abs().max()
    assert 0 < error < allowed
    torch.testing.assert_close(logits(load(quantised, precision)), logits(model))


def test_inputs_that_no_group_divides_stay_wide(tmp_path: Path) -> None:
    sizes = SMALL | {"intermediate_size": 80}
    _, plain = write(
        tmp_path, Case(settings=FP8, pack=CASES["fbgemm"].pack, kept=None, sizes=sizes)
    )
    assert kinds(load(plain, "int4")) == {Int4Weight, None}
