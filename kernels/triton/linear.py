"""Linear layers on the GPU: for few tokens by `small_linear_kernel`, for more by the tensor cores.

Which serves how many rows is in `configs`. Dense weights of many rows go to torch's matrix product (cuBLAS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.quantised import NO_ZERO, QuantisedLinear, dequantise
from headrace.kernels.reference.rows import DenseLinear, LinearWeight
from headrace.kernels.triton import configs
from headrace.kernels.triton.configs import MatrixTiles, invariant_matrix_tiles, matrix_tiles, power_of_two
from headrace.kernels.triton.linear_kernels import linear_kernel, merge_kernel, round_tokens_kernel
from headrace.kernels.triton.linear_packed import (
    DENSE,
    E4M3_BYTES,
    E4M3_IN_HARDWARE,
    INT4,
    INT4_BLOCK,
    INT8,
    Packed,
    pack_int4,
    unpack_int4,
)
from headrace.kernels.triton.linear_small import ALONE, Around, fits, multiply_small

ROWS_TOGETHER = 8
MERGED_COLUMNS = 1024


def multiply(
    x: Tensor, packed: Packed, tiles: MatrixTiles, x_scales: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., in_features] -> [..., out_features] in x's dtype, summed in float32.

    With x_scales [rows, 1] x is e4m3 as bytes, and the result of the dtype that is given.
    """
    flat = x.reshape(-1, packed.in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    num_rows, out_features = len(flat), len(packed.codes)
    out = torch.empty((num_rows, out_features), dtype=dtype or x.dtype, device=x.device)
    num_tiles = -(-num_rows // tiles.block_m) * -(-out_features // tiles.block_n)
    partials = None
    if tiles.splits > 1:
        partials = torch.empty((tiles.splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    if num_tiles:
        linear_kernel[(num_tiles, tiles.splits)](
            flat,
            packed.codes,
            packed.scales,
            packed.shifts,
            packed.bias,
            x_scales,
            partials,
            out,
            num_rows,
            out_features,
            packed.in_features,
            1 if packed.scales is None else packed.scales.shape[1],
            flat.stride(0),
            packed.codes.stride(0),
            out_features,
            KIND=packed.kind,
            GROUP=packed.group,
            SPLITS=tiles.splits,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=INT4_BLOCK if packed.kind == INT4 else tiles.block_k,
            ROWS_TOGETHER=ROWS_TOGETHER,
            PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    if partials is not None and num_tiles:
        merge_kernel[(num_rows, -(-out_features // MERGED_COLUMNS))](
            partials, packed.bias, out, num_rows, out_features, SPLITS=tiles.splits, BLOCK=MERGED_COLUMNS, num_warps=4
        )
    return out.view(*x.shape[:-1], out_features)


class Fusable:
    """What a weight of few rows can do in one launch with what stands around it."""

    _packed: Packed
    _device: configs.Device
    most_fused_rows = 0
    """Of x, up to which `apply_fused` serves."""

    def _prepare(self, packed: Packed) -> None:
        self._packed, self._device = packed, configs.device_of(packed.codes)
        if fits(packed):
            self.most_fused_rows = configs.most_small_rows(packed.bits, packed.rounds_input)

    def _is_small(self, x: Tensor) -> bool:
        return 0 < x.numel() <= self.most_fused_rows * self._packed.in_features

    def apply_fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + activate_and_multiply(rms_norm(x) W^T + bias), without what is None: `linear_small.Around`."""
        return self._apply_small(x, Around(norm, activation, residual))

    def _apply_small(self, x: Tensor, around: Around = ALONE) -> Tensor:
        codes = self._packed.codes
        num_rows, shape = x.numel() // self._packed.in_features, (codes.shape[0], codes.shape[1])
        least = 1 if around.activation is None else 2
        is_int4 = self._packed.kind == INT4
        tiles = configs.small_tiles(self._device, num_rows, shape, codes.itemsize, is_int4, least)
        return multiply_small(x, self._packed, tiles, around)


class TritonLinear(Fusable, QuantisedLinear):
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
            kind = E4M3_IN_HARDWARE if configs.device_of(codes).has_fp8 else E4M3_BYTES
        self._prepare(Packed(kind, stored, self.scales, shift, bias, in_features, group, self.rounds_input))
        if batch_invariant:
            self.most_fused_rows = 0
        self._batch_invariant = batch_invariant

    def apply(self, x: Tensor) -> Tensor:
        if self._is_small(x):
            return self._apply_small(x)
        if self._batch_invariant:
            return multiply(x, self._packed, invariant_matrix_tiles(self._device, x.element_size()))
        return multiply(x, self._packed, self._tiles(x))

    def _tiles(self, x: Tensor) -> MatrixTiles:
        packed = self._packed
        shape = (len(packed.codes), packed.in_features)
        return matrix_tiles(self._device, x.numel() // shape[1], x.element_size(), shape, packed.kind == INT4)

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


class SmallLinear(Fusable, DenseLinear):
    """A dense weight: torch's, but for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._prepare(Packed(DENSE, self.weight, None, None, bias, weight.shape[1], 0))

    def apply(self, x: Tensor) -> Tensor:
        return self._apply_small(x) if self._is_small(x) else super().apply(x)


class InvariantLinear(DenseLinear):
    """A dense weight multiplied in tiles of one size, whatever the number of tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._packed = Packed(DENSE, self.weight, None, None, bias, weight.shape[1], 0)
        self._device = configs.device_of(weight)

    def apply(self, x: Tensor) -> Tensor:
        return multiply(x, self._packed, invariant_matrix_tiles(self._device, x.element_size()))


class ScaledLinear(TritonLinear):
    """e4m3 weights and inputs. Whichever of three kernels multiplies, a token's inputs are rounded with its own scale,
    so that a request's answer does not follow another rounding when its batch grows: the one launch of few rows, tiles
    that widen e4m3 where torch's 128 wide ones would leave multiprocessors idle, and torch._scaled_mm.
    """

    rounds_input = True

    def apply(self, x: Tensor) -> Tensor:
        if self._is_small(x):
            return self._apply_small(x)
        num_rows = x.numel() // x.shape[-1]
        if num_rows < configs.least_scaled_mm_rows(self._device, len(self.codes)):
            return self.apply_tiled(x)
        return self.apply_scaled(x)

    def apply_tiled(self, x: Tensor, tiles: MatrixTiles | None = None) -> Tensor:
        """`apply` in tiles, by default those of the table."""
        codes, scales = round_tokens(x.reshape(-1, x.shape[-1]))
        product = multiply(codes.view(torch.uint8), self._packed, tiles or self._tiles(x), scales, x.dtype)
        return product.view(*x.shape[:-1], len(self.codes))

    def apply_scaled(self, x: Tensor) -> Tensor:
        """`apply` by torch._scaled_mm."""
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
    return ScaledLinear(weight, scales.float(), bias)


def linear(weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference.linear`."""
    return InvariantLinear(weight, bias) if batch_invariant else SmallLinear(weight, bias)
