"""Linear layers with packed weights on the GPU, and a dense one whose sums do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.reference import DenseLinear, LinearWeight
from headrace.kernels.reference_quantised import NO_ZERO, QuantisedLinear, dequantise
from headrace.kernels.triton import configs
from headrace.kernels.triton.configs import MatrixTiles, invariant_matrix_tiles, matrix_tiles, power_of_two
from headrace.kernels.triton.linear_kernels import linear_kernel, round_tokens_kernel

DENSE, INT8, E4M3_BYTES, E4M3_IN_HARDWARE, INT4 = range(5)
INT4_BLOCK = 64
"""Bytes of packed weights that are unpacked at a time: the low halves belong before the high ones."""
ROWS_TOGETHER = 8


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as `linear_kernel` reads it."""

    kind: int
    codes: Tensor  # [out_features, bytes or values]
    scales: Tensor | None  # [out_features, num_groups] float32 or float16
    shifts: Tensor | None  # of 4 bits alone, as scales: zero * scale
    bias: Tensor | None
    in_features: int
    group: int
    """Inputs of a scale; 0 where a row has one."""


def multiply(x: Tensor, packed: Packed, tiles: MatrixTiles) -> Tensor:
    """x [..., in_features] -> [..., out_features] in x's dtype, summed in float32."""
    flat = x.reshape(-1, packed.in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out_features = len(packed.codes)
    out = torch.empty((len(flat), out_features), dtype=x.dtype, device=x.device)
    num_tiles = -(-len(flat) // tiles.block_m) * -(-out_features // tiles.block_n)
    if num_tiles:
        linear_kernel[(num_tiles,)](
            flat,
            packed.codes,
            packed.scales,
            packed.shifts,
            packed.bias,
            out,
            len(flat),
            out_features,
            packed.in_features,
            1 if packed.scales is None else packed.scales.shape[1],
            flat.stride(0),
            packed.codes.stride(0),
            out_features,
            KIND=packed.kind,
            GROUP=packed.group,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=INT4_BLOCK if packed.kind == INT4 else tiles.block_k,
            ROWS_TOGETHER=ROWS_TOGETHER,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out.view(*x.shape[:-1], out_features)


class TritonLinear(QuantisedLinear):
    """Weights of 8 or 4 bits. Its results do not depend on the batch when `batch_invariant`."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        zeros: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> None:
        kept = scales if scales.dtype == torch.float16 else scales.float()
        super().__init__(codes, kept.contiguous(), bias)
        self._batch_invariant = batch_invariant
        device = configs.device_of(codes)
        in_features = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
        group = 0 if self.scales.shape[1] == 1 else in_features // self.scales.shape[1]
        if codes.dtype == torch.uint8:
            zero = NO_ZERO if zeros is None else zeros.float()
            shift = (zero * self.scales.float()).to(self.scales.dtype)
            stored, group, kind = pack_int4(codes), in_features // self.scales.shape[1], INT4
            self.codes = stored
        elif codes.dtype == torch.int8:
            stored, shift, kind = codes.contiguous(), None, INT8
        else:
            stored, shift = codes.contiguous().view(torch.uint8), None
            kind = E4M3_IN_HARDWARE if device.has_fp8 else E4M3_BYTES
        self._packed = Packed(kind, stored, self.scales, shift, bias, in_features, group)
        self._device = device

    def apply(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // max(1, x.shape[-1])
        if self._batch_invariant:
            tiles = invariant_matrix_tiles(self._device, x.element_size())
        else:
            tiles = matrix_tiles(self._device, num_rows, x.element_size(), self._packed.kind == INT4)
        return multiply(x, self._packed, tiles)

    def _rows(self, rows: Tensor | slice) -> Tensor:
        if self._packed.kind != INT4:
            return super()._rows(rows)
        scales, shifts = self.scales[rows].float(), self._packed.shifts
        assert shifts is not None, "4 bits come with shifts"
        codes = unpack_int4(self.codes[rows], self._packed.in_features)
        raw = dequantise(codes, torch.ones_like(scales), torch.zeros_like(scales)).unflatten(1, (scales.shape[1], -1))
        return (raw * scales[..., None] - shifts[rows].float()[..., None]).flatten(1)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._packed.shifts is None else self._packed.shifts.nbytes)


class InvariantLinear(DenseLinear):
    """A dense weight multiplied in tiles of one size, whatever the number of tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._packed = Packed(DENSE, self.weight, None, None, bias, weight.shape[1], 0)
        self._device = configs.device_of(weight)

    def apply(self, x: Tensor) -> Tensor:
        return multiply(x, self._packed, invariant_matrix_tiles(self._device, x.element_size()))


class ScaledLinear(QuantisedLinear):
    """e4m3 weights and inputs, multiplied by the tensor cores as they are, through torch._scaled_mm."""

    def apply(self, x: Tensor) -> Tensor:
        codes, scales = round_tokens(x.reshape(-1, x.shape[-1]))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product = torch._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales.view(1, -1), bias=bias, out_dtype=x.dtype
        )
        return product.view(*x.shape[:-1], len(self.codes))


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_quantised.round_tokens`, for x [num_rows, size]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, size = x.shape
    codes = torch.empty((num_rows, size), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = power_of_two(size)
        round_tokens_kernel[(num_rows,)](
            x, codes, scales, size, x.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return codes.view(torch.float8_e4m3fn), scales


def pack_int4(codes: Tensor) -> Tensor:
    """[out, in / 2] bytes of neighbours -> [out, padded] bytes as `linear_kernel` wants them, done once at load."""
    width = 2 * INT4_BLOCK
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % width)).unflatten(1, (-1, 2, INT4_BLOCK))
    return (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1).contiguous()


def unpack_int4(stored: Tensor, in_features: int) -> Tensor:
    """The reverse of `pack_int4`."""
    blocks = stored.unflatten(1, (-1, INT4_BLOCK))
    nibbles = torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, :in_features]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def linear_int8(codes: Tensor, scales: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference_quantised.linear_int8`."""
    return TritonLinear(codes, scales, bias, None, batch_invariant)


def linear_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, batch_invariant: bool = False
) -> LinearWeight:
    """As `reference_quantised.linear_int4`; the codes are laid out anew."""
    return TritonLinear(codes, scales, bias, zeros, batch_invariant)


def linear_fp8(weight: Tensor, scales: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference_quantised.linear_fp8`."""
    return TritonLinear(weight, scales, bias, None, batch_invariant)


def linear_fp8_dynamic(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """As `reference_quantised.linear_fp8_dynamic`."""
    return ScaledLinear(weight, scales.float().contiguous(), bias)


def linear(weight: Tensor, bias: Tensor | None) -> LinearWeight:
    """As `reference.linear`, batch-invariant."""
    return InvariantLinear(weight, bias)
