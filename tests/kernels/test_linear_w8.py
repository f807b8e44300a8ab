"""Products with 8-bit weights: int8 and fp8, each kernel against its torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullbore_backend.kernels.linear_fp8 import Fp8Weight, linear_fp8_torch, quantize_fp8
from fullbore_backend.kernels.linear_int8 import Int8Weight, linear_int8_torch, quantize_int8
from fullbore_backend.kernels.linear_w8 import linear_fp8_triton, linear_int8_triton
from fullbore_backend.kernels.quantize_rows import LARGEST, quantize_rows_torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (tokens, inputs, rows): ragged tiles, several tiles of tokens, inputs that are split and not.
SHAPES = [(1, 40, 5), (5, 300, 70), (17, 128, 130), (3, 1536, 64), (130, 256, 129)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def representable(tokens: int, inputs: int, kind: torch.dtype) -> torch.Tensor:
    """fp32 numbers that ``kind`` holds with a scale of 1 / 64: what is quantised is not rounded.

    So both sides multiply the same. (Triton's interpreter rounds to e4m3 as no hardware does.)
    """
    x = (randn(tokens, inputs) * 30).clamp(-127, 127).round()
    if kind == torch.float8_e4m3fn:
        x = (x.sign() * x.abs().clamp(min=1)).to(kind).float()
    x[:, ::128] = LARGEST[kind]
    return x / 64


def exact(
    x: torch.Tensor, weight: Int8Weight | Fp8Weight, bias: torch.Tensor | None, group: int | None
) -> torch.Tensor:
    """The product of what both factors stand for, in fp64."""
    kind = torch.int8 if isinstance(weight, Int8Weight) else torch.float8_e4m3fn
    values, scales = quantize_rows_torch(x, kind, group)
    wide = scales.double().repeat_interleave(group or weight.inputs, 1)[:, : weight.inputs]
    out = (values.double() * wide) @ weight.dequantize().double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize(
    "quantize", [quantize_int8, quantize_fp8, "blocks"], ids=["int8", "fp8", "fp8 blocks"]
)
def test_a_weight_comes_back(quantize: Callable[[torch.Tensor], Int8Weight | Fp8Weight]) -> None:
    weight = randn(200, 300)
    weight[3] = 0.0
    made = quantize_fp8(weight, 128) if quantize == "blocks" else quantize(weight)
    assert (made.rows, made.inputs) == (200, 300)
    back = made.dequantize()
    assert back.dtype == torch.float32
    bound = weight.abs().amax() / 254 if isinstance(made, Int8Weight) else weight.abs() / 16 + 1e-4
    assert ((back - weight).abs() <= bound * 1.001).all()
    assert torch.equal(back[3], torch.zeros(300))


@pytest.mark.parametrize("block", [None, 128])
def test_weights_are_joined(block: int | None) -> None:
    """Blocks only where one ends with the part."""
    first, second = quantize_fp8(randn(128, 160), block), quantize_fp8(randn(70, 160), block)
    assert first.joins(second)
    assert second.joins(first) == (block is None)
    assert not first.joins(quantize_fp8(randn(128, 160), 128 if block is None else None))
    assert not first.joins(quantize_int8(randn(128, 160)))
    joined = Fp8Weight.concat([first, second])
    assert torch.equal(joined.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    one, other = quantize_int8(randn(4, 160)), quantize_int8(randn(5, 160))
    assert one.joins(other)
    assert not one.joins(first)
    joined_int8 = Int8Weight.concat([one, other]).to(torch.device("cpu"))
    assert torch.equal(joined_int8.dequantize(), torch.cat((one.dequantize(), other.dequantize())))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    with_bias: bool,
    device: torch.device,
    assert_as_exact: Callable[..., None],
) -> None:
    tokens, inputs, rows = shape
    x = representable(2 * tokens, inputs, torch.int8).to(device, dtype)[::2]
    weight = quantize_int8(randn(rows, inputs, seed=1)).to(device)
    bias = randn(rows, seed=2).to(device, dtype) if with_bias else None
    twin = linear_int8_torch(x, weight, bias)
    assert_as_exact(linear_int8_triton(x, weight, bias), twin, exact(x, weight, bias, None))


def test_int8_of_any_numbers(device: torch.device, assert_as_exact: Callable[..., None]) -> None:
    """The error of quantising activations is the twin's too."""
    x, weight = randn(20, 500).to(device), quantize_int8(randn(70, 500, seed=1)).to(device)
    plain = x.double() @ weight.dequantize().double().T
    assert_as_exact(linear_int8_triton(x, weight), linear_int8_torch(x, weight), plain)


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    block: int | None,
    native: bool,
    device: torch.device,
    assert_as_exact: Callable[..., None],
) -> None:
    tokens, inputs, rows = shape
    x = representable(2 * tokens, inputs, torch.float8_e4m3fn).to(device, dtype)[::2]
    weight = quantize_fp8(randn(rows, inputs, seed=1), block).to(device)
    bias = randn(rows, seed=2).to(device, dtype)
    twin = linear_fp8_torch(x, weight, bias)
    got = linear_fp8_triton(x, weight, bias, native=native)
    assert_as_exact(got, twin, exact(x, weight, bias, block))


def test_widened_weights_leave_activations_as_they_are(
    device: torch.device, assert_as_exact: Callable[..., None]
) -> None:
    x = randn(3, 256).to(device, torch.float16)
    weight = quantize_fp8(randn(40, 256, seed=1), 128).to(device)
    plain = x.double() @ weight.dequantize().double().T
    got = linear_fp8_triton(x, weight, native=False)
    assert_as_exact(got, plain.to(x.dtype), plain, floor=2.0**-10)


def test_every_byte_is_widened(device: torch.device) -> None:
    """Subnormals and signed zeros too; not NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(-1, 1).expand(-1, 16).contiguous()
    weight = Fp8Weight(values=codes.view(torch.float8_e4m3fn), scales=torch.ones(len(codes)))
    got = linear_fp8_triton(torch.eye(16, device=device), weight.to(device), native=False)
    assert torch.equal(got.cpu(), weight.dequantize().T)


@pytest.mark.parametrize("linear", [linear_int8_triton, linear_fp8_triton], ids=["int8", "fp8"])
def test_no_tokens(linear: Callable[..., torch.Tensor], device: torch.device) -> None:
    quantize = quantize_int8 if linear is linear_int8_triton else quantize_fp8
    out = linear(torch.empty(0, 32, device=device), quantize(randn(7, 32)).to(device))
    assert out.shape == (0, 7)


def test_the_same_rows_give_the_same_bits_beside_others(device: torch.device) -> None:
    """A token does not depend on its neighbours, nor on which program was first."""
    x = randn(9, 1536).to(device)
    weight = quantize_int8(randn(70, 1536, seed=1)).to(device)
    assert torch.equal(linear_int8_triton(x, weight)[4:5], linear_int8_triton(x[4:5], weight))
