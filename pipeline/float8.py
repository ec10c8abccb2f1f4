"""Rows of hidden states in one byte a value, float8 e4m3 with a scale of its own for each row.

A row is the H values of one token at one layer. Its scale is the power of two s = 2^e with the
smallest e for which its largest value still rounds to one that float8 has, max |x| ≤ 464 · s:

    code = round(x / s), to nearest even        value = code · s

e4m3fn ("FP8 Formats for Deep Learning", arXiv:2209.05433) has 3 bits of mantissa, subnormals from
2^-9 and a largest value of 448; what lies under 464 rounds down to it. Scales that are powers of
two are those of the OCP Microscaling formats (E8M0, one byte). They cost next to no accuracy, for
e4m3 is itself a floating-point format, and make what is read exact: a code times a power of two is
a bfloat16, and what was read is encoded into the same codes and scales again.
"""

import torch

CODES, SCALES = torch.float8_e4m3fn, torch.float8_e8m0fnu
LARGEST = 464.0  # times the scale: halfway from 448 to what would come next
# So that every value read is a normal number in bfloat16 and float32: 2^-117 · 2^-9 = 2^-126, and
# 448 · 2^119 = 3.0e38 is what becomes of a larger one.
LEAST_EXPONENT, LARGEST_EXPONENT = -117, 119
LEAST_VALUE = 2.0**-126  # a row whose values are all smaller (subnormal in float32) is stored as 0


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite values [..., H] of any float type → codes [..., H] and scales [...].

    torch turns an infinity into 448 without a word, so the caller looks for these before.
    """
    values = values.float()
    largest = values.abs().amax(dim=-1)  # [...]
    mantissa, exponent = torch.frexp(largest / LARGEST)  # mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(LEAST_EXPONENT, LARGEST_EXPONENT)
    is_zero = largest < LEAST_VALUE
    scales = torch.exp2(exponent.masked_fill(is_zero, 0).float())
    codes = (values / scales[..., None]).masked_fill_(is_zero[..., None], 0.0)
    return codes.to(CODES), scales.to(SCALES)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [..., H] and scales [...] → values [..., H], exact in bfloat16."""
    return codes.to(torch.bfloat16).mul_(scales.to(torch.bfloat16)[..., None])
