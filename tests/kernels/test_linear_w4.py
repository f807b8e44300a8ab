"""Products with 4-bit weights: packing, and the kernel against its torch twin."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from fullbore_backend.kernels.linear_int4 import Int4Weight, linear_int4_torch, quantize_int4
from fullbore_backend.kernels.linear_w4 import linear_int4_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (inputs, group): with chunks that are whole and not, and groups of every size in both.
SIZES = [(128, 128), (384, 128), (256, 64), (128, 32), (576, 64), (576, 32), (32, 32)]
ZEROS = ["symmetric", "whole", "fractions"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(
    rows: int, inputs: int, group: int, zeros: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random codes, scales and zeros."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, inputs), generator=generator, dtype=torch.uint8)
    scales = 0.01 + torch.rand(rows, inputs // group, generator=generator)
    if zeros == "symmetric":
        return codes, scales, None
    drawn = torch.rand(scales.shape, generator=generator) * 17
    return codes, scales, drawn.floor() if zeros == "whole" else drawn


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(("inputs", "group"), SIZES, ids=str)
def test_codes_come_back(inputs: int, group: int, zeros: str) -> None:
    codes, scales, drawn = parts(5, inputs, group, zeros)
    weight = Int4Weight.from_codes(codes, scales, drawn)
    assert (weight.rows, weight.inputs, weight.group) == (5, inputs, group)
    assert torch.equal(weight.codes(), codes)
    expected = torch.empty(5, inputs)
    for row, at in product(range(5), range(inputs)):
        zero = 8 if drawn is None else drawn[row, at // group]
        expected[row, at] = (codes[row, at].float() - zero) * scales[row, at // group]
    assert torch.equal(weight.dequantize(), expected)


def test_the_order_of_bits_is_the_documented_one() -> None:
    codes, scales, _ = parts(1, 128, 128, "symmetric")
    words = Int4Weight.from_codes(codes, scales).values.view(torch.int32)[0].tolist()
    for word, i, upper in product(range(16), range(4), range(2)):
        assert words[word] >> (4 * i + 16 * upper) & 15 == codes[0, 32 * i + 2 * word + upper]


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes, scales, _ = parts(4, 256, 64, "symmetric")
    with pytest.raises(ValueError, match=r"scales of shape \(4, 3\)"):
        Int4Weight.from_codes(codes, scales[:, :3])
    with pytest.raises(ValueError, match=r"scales of shape \(3, 4\)"):
        Int4Weight.from_codes(codes, scales[:3])
    with pytest.raises(ValueError, match="zeros of shape"):
        Int4Weight.from_codes(codes, scales, scales[:3])


@pytest.mark.parametrize("kinds", list(product(ZEROS, ZEROS)), ids=str)
def test_weights_are_joined(kinds: tuple[str, str]) -> None:
    first, second = (
        Int4Weight.from_codes(*parts(rows, 128, 64, kind, seed=rows))
        for rows, kind in zip((3, 4), kinds, strict=True)
    )
    fits = (kinds[0] == "symmetric") == (kinds[1] == "symmetric")
    assert first.joins(second) == fits
    assert not first.joins(Int4Weight.from_codes(*parts(3, 128, 32, kinds[0])))
    if fits:
        joined = Int4Weight.concat([first, second]).to(torch.device("cpu")).dequantize()
        assert torch.equal(joined, torch.cat((first.dequantize(), second.dequantize())))


@pytest.mark.parametrize(("inputs", "group"), SIZES, ids=str)
def test_quantising_is_off_by_half_a_step(inputs: int, group: int) -> None:
    weight = randn(20, inputs) + 0.5
    weight[2, :group] = 0.0
    weight[3, :group] = 2.5
    weight[4, :group] = -2.5
    made = quantize_int4(weight, group)
    steps = made.scales.repeat_interleave(group, 1)
    assert ((made.dequantize() - weight).abs() <= 0.5001 * steps).all()
    torch.testing.assert_close(made.dequantize()[2:5, :group], weight[2:5, :group])


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "group"), SIZES, ids=str)
def test_product(
    inputs: int,
    group: int,
    dtype: torch.dtype,
    zeros: str,
    with_bias: bool,
    device: torch.device,
    assert_as_exact: Callable[..., None],
) -> None:
    weight = Int4Weight.from_codes(*parts(70, inputs, group, zeros)).to(device)
    x = randn(5, 2, inputs).to(device, dtype)[:, 1]
    bias = randn(70, seed=2).to(device, dtype) if with_bias else None
    exact = x.double() @ weight.dequantize().double().T
    exact = exact if bias is None else exact + bias.double()
    twin = linear_int4_torch(x, weight, bias)
    assert_as_exact(linear_int4_triton(x, weight, bias), twin, exact)


@pytest.mark.parametrize("scales", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 17, 40, 64, 65, 130])
def test_numbers_of_tokens(
    tokens: int,
    group: int,
    scales: torch.dtype,
    device: torch.device,
    assert_as_exact: Callable[..., None],
) -> None:
    """Each has tiles of its own; scales are of any type, and zeros of theirs."""
    codes, wide, drawn = parts(131, 256, group, "fractions")
    assert drawn is not None
    weight = Int4Weight.from_codes(codes, wide.to(scales), drawn.to(scales)).to(device)
    x = randn(tokens, 256).to(device, torch.float16)
    exact = x.double() @ weight.dequantize().double().T
    assert_as_exact(linear_int4_triton(x, weight), linear_int4_torch(x, weight), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_far_from_the_codes(
    dtype: torch.dtype, device: torch.device, assert_as_exact: Callable[..., None]
) -> None:
    """As of groups whose weights are all of one sign; some are whole, and too large for a byte."""
    codes, scales, _ = parts(70, 256, 32, "symmetric")
    zeros = (randn(70, 8, seed=3) * 300).round(decimals=1)
    weight = Int4Weight.from_codes(codes, scales, zeros).to(device)
    x = randn(5, 256).to(device, dtype)
    exact = x.double() @ weight.dequantize().double().T
    assert_as_exact(linear_int4_triton(x, weight), linear_int4_torch(x, weight), exact)


def test_inputs_that_are_split(device: torch.device, assert_as_exact: Callable[..., None]) -> None:
    """Into parts of several steps, with a bias that is added once."""
    weight = Int4Weight.from_codes(*parts(33, 4736, 128, "whole")).to(device)
    x, bias = randn(2, 4736).to(device, torch.float16), randn(33).to(device, torch.float16)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    assert_as_exact(linear_int4_triton(x, weight, bias), linear_int4_torch(x, weight, bias), exact)


def test_no_tokens(device: torch.device) -> None:
    weight = Int4Weight.from_codes(*parts(7, 64, 32, "whole")).to(device)
    assert linear_int4_triton(torch.empty(0, 64, device=device), weight).shape == (0, 7)


def test_a_token_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    weight = Int4Weight.from_codes(*parts(70, 576, 32, "whole")).to(device)
    x = randn(9, 576).to(device)
    assert torch.equal(linear_int4_triton(x, weight)[4:5], linear_int4_triton(x[4:5], weight))
