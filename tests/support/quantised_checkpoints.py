"""Tiny quantised checkpoints in the published layouts, and the transformers model with their exact values.

A writer takes a matrix [n, k] float32, and returns its tensors under the format's names and their dequantised values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from model_driver import Driver
from safetensors.torch import save_file
from torch import Tensor

from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.kernels.grouped import InputRounding

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by the suffix of the module's name, and the values [n, k] float32."""
Writer = Callable[[str, Tensor], Written]


def write(
    folder: Path, model: Any, quantization_config: Mapping[str, Any], writer: Writer, skip: tuple[str, ...] = ()
) -> Any:
    """Writes the checkpoint, with every linear layer stored by `writer` except those whose names contain a part in
    `skip`. Returns the model in float64 with the stored values."""
    state, stored = tiny_models.state_of(model), dict[str, Tensor]()
    exact = dict(model.state_dict())
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        is_linear = tensor.dim() == 2 and ("proj" in name or ".experts." in name)
        if not is_linear or any(part in name for part in skip):
            stored[name] = tensor.contiguous().clone()
            continue
        tensors, values = writer(module, tensor.float())
        stored |= {f"{module}{suffix}": each.contiguous().clone() for suffix, each in tensors.items()}
        _put(exact, name, values)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = dict(quantization_config)
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(exact)
    model.config._experts_implementation = "eager"  # the others compute no float64
    return model.double()


def _put(state: dict[str, Tensor], name: str, values: Tensor) -> None:
    """Stores values in a model's state dict, in which experts are stacked."""
    if name in state:
        state[name] = values
        return
    start, index, kind, _ = name.rsplit(".", 3)
    stack = state[f"{start}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"]
    if kind == "down_proj":
        stack[int(index)] = values
    else:
        half = stack.shape[1] // 2
        stack[int(index), slice(0, half) if kind == "gate_proj" else slice(half, None)] = values


@contextmanager
def inputs_rounded(model: Any, inputs: InputRounding) -> Iterator[list[float]]:
    """Inside, transformers rounds the inputs of the layers' linear products.

    Yields a list to which each product appends the least distance, in codes, of its inputs from a border between two
    codes: at a border an error of the last bit decides. A negative largest magnitude lies on one, at -127.5.
    """
    product, clearances = F.linear, []
    kept = {module.weight.data_ptr() for name, module in model.named_modules() if name.endswith(("lm_head", ".gate"))}

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() in kept:
            return product(x, weight, bias)
        _, scale, zero = inputs.of(x.double())
        codes = x.double() / scale + zero
        within = codes[(codes > -128) & (codes < 127)]  # the others are clamped to the last code
        clearances.append(float((within - within.floor() - 0.5).abs().min()))
        return product(inputs.rounded(x.float()).to(x.dtype), weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", rounded)
        yield clearances


TEXT = torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(0))
"""A fixed text, for its perplexity."""


def perplexities(decoder: CpuDecoder | Decoder, model: Any) -> tuple[float, float]:
    """The perplexities of TEXT: the decoder's, which computes every prefix, and the model's in its own dtype."""
    driver = Driver(decoder, num_blocks=400)
    logits = [driver.greedy([TEXT[:end].tolist()], 1, chunk=64)[1][0] for end in range(1, len(TEXT))]
    with torch.no_grad():
        exact = model(TEXT[None], use_cache=False).logits[0, :-1]
    own, expected = (float(F.cross_entropy(each.double(), TEXT[1:]).exp()) for each in (torch.cat(logits), exact))
    return own, expected


def affine(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Quantises a weight: codes [n, k] int64, scales [n, groups] float16, zeros [n, groups] int64, and the values.

    order: the inputs in the order in which they are grouped."""
    n, k = weight.shape
    group = k if group == -1 else group
    placed = weight if order is None else weight[:, order]
    groups, top = placed.view(n, -1, group), (1 << bits) - 1
    if symmetric:
        scales = groups.abs().amax(-1) / ((top - 1) / 2)
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (most - least) / top
        zeros = (-least / scales).round().long().clamp(1, top)
    scales = scales.half()
    wide = scales.float()[..., None]
    codes = ((groups / wide).round().long() + zeros[..., None]).clamp(0, top)
    values = ((codes - zeros[..., None]) * wide).view(n, k)
    codes = codes.view(n, k)
    if order is not None:
        back = torch.argsort(order)
        codes, values = codes[:, back], values[:, back]
    return codes, scales, zeros, values


def packed(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [rows, count] to [rows, ceil(count * bits / 32)] int32 as one bit stream, lowest bits first."""
    stream = (codes[..., None] >> torch.arange(bits) & 1).flatten(1)
    stream = F.pad(stream, (0, -stream.shape[1] % 32)).view(len(codes), -1, 32)
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def in_planes(codes: Tensor, bits: int) -> Tensor:
    """As `packed`, in GPTQModel's planar layout: for 32 codes the words of the lower bits, then those of the higher."""
    words, first = [], 0
    for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]:
        words.append(packed(codes >> first & ((1 << width) - 1), width).unflatten(1, (-1, width)))
        first += width
    return torch.cat(words, -1).flatten(1)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    desc_act: bool = False,
    v2: bool = False,
    planar: bool = False,
) -> tuple[dict[str, Any], Writer]:
    put = in_planes if planar else packed
    v2 = v2 or planar

    def writer(module: str, weight: Tensor) -> Written:
        k = weight.shape[1]
        size = k if group == -1 else group
        # All matrices of one input have the same order, since they share the Hessian.
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if desc_act else None
        codes, scales, zeros, values = affine(weight, bits, group, symmetric=symmetric, order=order)
        g_idx = torch.arange(k) // size
        if order is not None:
            g_idx = g_idx[torch.argsort(order)]
        n = weight.shape[0]
        tensors = {
            ".qweight": put(codes, bits).T,
            ".qzeros": put((zeros - (0 if v2 else 1)).T, bits),
            ".scales": scales.T,
            ".g_idx": g_idx.to(torch.int32),
            ".bias": torch.zeros(n, dtype=torch.float16),
        }
        return tensors, values

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": symmetric}
    return config | {"checkpoint_format": "gptq_p" if planar else "gptq_v2" if v2 else "gptq"}, writer


def awq_words(codes: Tensor) -> Tensor:
    in_order = codes.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)
    return packed(in_order, 4)


def awq(group: int = 32) -> tuple[dict[str, Any], Writer]:
    def writer(module: str, weight: Tensor) -> Written:
        codes, scales, zeros, values = affine(weight, 4, group, symmetric=False)
        return {".qweight": awq_words(codes.T), ".qzeros": awq_words(zeros.T), ".scales": scales.T}, values

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, writer


def fp8(kind: str) -> tuple[dict[str, Any], Writer]:
    """Kinds: `matrix` has one scale, `rows` one per row, and all others one per block of 32 x 64; `chunks` has blocks
    of their own in each quarter of a qkv_proj."""
    rows, columns = {"matrix": (1 << 20, 1 << 20), "rows": (1, 1 << 20)}.get(kind, (32, 64))
    in_blocks, of_two = kind not in ("matrix", "rows"), kind.startswith("exponents")

    def writer(module: str, weight: Tensor) -> Written:
        codes, scales, values = in_fp8(weight, rows, columns, of_two)
        if kind == "chunks" and module.endswith("qkv_proj"):
            codes, scales, values = in_fp8_by_chunk(weight, rows, columns, 4)
        if in_blocks:
            if of_two:
                exponents = (scales.log2() + 127).to(torch.uint8)
                scales = exponents if kind.endswith("bytes") else exponents.view(torch.float8_e8m0fnu)
            return {".weight": codes, ".weight_scale_inv": 1 / scales if kind == "divisors" else scales}, values
        return {".weight": codes, ".weight_scale": scales[0, 0] if kind == "matrix" else scales}, values

    config: dict[str, Any] = {"quant_method": "fbgemm_fp8" if kind == "rows" else "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [rows, columns]} if in_blocks else {}
    return config | ({"weight_scale_semantics": "inverse"} if kind == "divisors" else {}), writer


def in_fp8(weight: Tensor, rows: int, columns: int, of_two: bool = False) -> tuple[Tensor, ...]:
    """codes in fp8, scales [ceil(n / rows), ceil(k / columns)], powers of two with of_two, and the values."""
    n, k = weight.shape
    scales = torch.empty(-(-n // rows), -(-k // columns))
    wide = torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            if of_two:
                scales[i, j] = scales[i, j].log2().ceil().exp2()
            wide[part] = scales[i, j]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def in_fp8_by_chunk(weight: Tensor, rows: int, columns: int, chunks: int) -> tuple[Tensor, ...]:
    """As `in_fp8`, with blocks that begin anew in each chunk of the rows."""
    each = zip(*(in_fp8(chunk, rows, columns) for chunk in weight.chunk(chunks)), strict=True)
    return tuple(torch.cat(part) for part in each)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def in_fp4(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k], scales [n, groups] -> bytes of two codes, the first in the low half, and the values."""
    n, k = weight.shape
    scaled = (weight.view(n, scales.shape[1], -1) / scales[..., None]).view(n, k)
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = nearest + 8 * (scaled < 0)
    values = E2M1[nearest] * torch.where(scaled < 0, -1.0, 1.0)
    whole = (values.view(n, scales.shape[1], -1) * scales[..., None]).view(n, k)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), whole


def nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of groups of 16 in fp8, their common factor, and the products of both in float32."""
    most = weight.abs().max() / (448 * 6)
    scales = (weight.view(len(weight), -1, 16).abs().amax(-1) / 6 / most).to(torch.float8_e4m3fn)
    return scales, most, scales.float() * most


def mxfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents of groups of 32 as e8m0, and the scales."""
    most = weight.view(len(weight), -1, 32).abs().amax(-1)
    exponents = (most / 6).log2().ceil()
    return (exponents + 127).to(torch.uint8), exponents.exp2()


def modelopt(algorithm: str) -> tuple[dict[str, Any], Writer]:
    def writer(module: str, weight: Tensor) -> Written:
        if algorithm == "FP8":
            codes, scales, values = in_fp8(weight, 1 << 20, 1 << 20)
            return {".weight": codes, ".weight_scale": scales[0, 0], ".input_scale": torch.ones(())}, values
        small, most, scales = nvfp4_scales(weight)
        codes, values = in_fp4(weight, scales)
        tensors = {".weight": codes, ".weight_scale": small, ".weight_scale_2": most, ".input_scale": torch.ones(())}
        return tensors, values

    return {"quant_method": "modelopt", "quant_algo": algorithm}, writer


def modelopt_mixed(num_layers: int = 4) -> tuple[dict[str, Any], Writer]:
    """Attention in FP8, and the FFN in NVFP4."""
    settings: dict[str, dict[str, Any]] = {
        "self_attn": {"quant_algo": "FP8"},
        "mlp": {"quant_algo": "NVFP4", "group_size": 16},
    }
    modules = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layers = {f"model.layers.{n}.{each}": settings[each.split(".")[0]] for n in range(num_layers) for each in modules}

    def writer(module: str, weight: Tensor) -> Written:
        return modelopt(layers[module]["quant_algo"])[1](module, weight)

    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, writer


def quark(dtype: str) -> tuple[dict[str, Any], Writer]:
    def writer(module: str, weight: Tensor) -> Written:
        if dtype == "fp8_e4m3":
            codes, scales, values = in_fp8(weight, 1, 1 << 20)
            return {".weight": codes, ".weight_scale": scales[:, 0]}, values
        if dtype == "int8":
            codes, scales, values = in_int8(weight)
            return {".weight": codes, ".weight_scale": scales[:, 0]}, values
        if dtype in ("int4", "uint4"):
            codes, scales, zeros, values = affine(weight, 4, 32, symmetric=dtype == "int4")
            sign = 8 if dtype == "int4" else 0
            tensors = {".weight": awq_words((codes ^ sign).T), ".weight_zero_point": awq_words((zeros ^ sign).T)}
            return tensors | {".weight_scale": scales.T}, values
        if dtype.startswith("fp6"):
            codes, exponents, values = in_mxfp6(weight, mantissa=int(dtype[-1]))
            return {".weight": codes, ".weight_scale": exponents}, values
        exponents, scales = mxfp4_scales(weight)
        codes, values = in_fp4(weight, scales)
        return {".weight": codes, ".weight_scale": exponents}, values

    weights: dict[str, Any] = {"dtype": dtype, "symmetric": dtype != "uint4", "group_size": None}
    if dtype.endswith("int4"):
        weights["group_size"] = 32
    elif dtype.startswith(("fp4", "fp6")):
        weights |= {"group_size": 32, "symmetric": None, "scale_format": "e8m0"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weights}, "exclude": ["lm_head"]}, writer


def in_mxfp6(weight: Tensor, mantissa: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k * 3 / 4] uint8, exponents [n, k / 32] uint8 and the values (OCP Microscaling formats, 5.3.2)."""
    n, k = weight.shape
    bias = {3: 1, 2: 3}[mantissa]
    levels = torch.tensor(
        [
            (code % (1 << mantissa)) * 2.0 ** (1 - bias - mantissa)
            if code < 1 << mantissa
            else ((1 << mantissa) + code % (1 << mantissa)) * 2.0 ** ((code >> mantissa) - bias - mantissa)
            for code in range(32)
        ]
    )
    groups = weight.reshape(n, -1, 32)
    exponents = (groups.abs().amax(-1) / levels[-1]).log2().ceil()
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    values = levels[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    four = (codes | (scaled < 0).long() << 5).view(n, -1, 4)
    bits = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
    packed = torch.stack([bits & 255, bits >> 8 & 255, bits >> 16], -1).to(torch.uint8).view(n, -1)
    return packed, (exponents + 127).to(torch.uint8), values.view(n, k)


def in_int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes, scales [n, 1] and the values."""
    scales = weight.abs().amax(-1, keepdim=True) / 127
    codes = (weight / scales).round().clamp(-127, 127)
    return codes.to(torch.int8), scales, codes * scales


def compressed(scheme: str, inputs: InputRounding | None = None, **weights: Any) -> tuple[dict[str, Any], Writer]:
    """inputs: how inputs are rounded to int8."""
    layout, own = COMPRESSED[scheme]

    def writer(module: str, weight: Tensor) -> Written:
        tensors, values = own(weight)
        if inputs is not None and inputs.scale is not None:
            tensors[".input_scale"] = torch.tensor([inputs.scale])
            tensors[".input_zero_point"] = torch.tensor([inputs.zero], dtype=torch.int8)
        return tensors, values

    activations = None
    if inputs is not None:
        dynamic, symmetric = inputs.scale is None, not inputs.shifted and inputs.zero == 0
        activations = {"num_bits": 8, "type": "int", "dynamic": dynamic, "symmetric": symmetric}
    weights = {"symmetric": True, "actorder": None} | weights | OF_SCHEMES.get(scheme, {})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"]}, writer


def _pack_quantized(bits: int, group: int, symmetric: bool, ordered: bool = False) -> Callable[[Tensor], Written]:
    def write_one(weight: Tensor) -> Written:
        k = weight.shape[1]
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if ordered else None
        codes, scales, zeros, values = affine(weight, bits, group, symmetric=symmetric, order=order)
        tensors = {".weight_packed": packed(codes, bits), ".weight_scale": scales}
        tensors[".weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors[".weight_zero_point"] = packed(zeros.T, bits).T
        if order is not None:
            tensors[".weight_g_idx"] = (torch.arange(k) // group)[torch.argsort(order)].to(torch.int32)
        return tensors, values

    return write_one


def _int_quantized_of_4_bits(weight: Tensor) -> Written:
    codes, scales, _, values = affine(weight, 4, 32, symmetric=True)
    return {".weight": (codes - 8).to(torch.int8), ".weight_scale": scales}, values


def _int_quantized(weight: Tensor) -> Written:
    codes, scales, values = in_int8(weight)
    return {".weight": codes, ".weight_scale": scales}, values


def _float_quantized(weight: Tensor) -> Written:
    codes, scales, values = in_fp8(weight, 1, 1 << 20)
    return {".weight": codes, ".weight_scale": scales}, values


def _mxfp8(weight: Tensor) -> Written:
    codes, scales, values = in_fp8(weight, 1, 32, of_two=True)
    return {".weight": codes, ".weight_scale": (scales.log2() + 127).to(torch.uint8)}, values


def _nvfp4(weight: Tensor) -> Written:
    small, most, _ = nvfp4_scales(weight)
    divisor = (1 / most)[None]
    codes, values = in_fp4(weight, small.float() / divisor)
    return {".weight_packed": codes, ".weight_scale": small, ".weight_global_scale": divisor}, values


def _mxfp4(weight: Tensor) -> Written:
    exponents, scales = mxfp4_scales(weight)
    codes, values = in_fp4(weight, scales)
    return {".weight_packed": codes, ".weight_scale": exponents}, values


COMPRESSED: dict[str, tuple[str, Callable[[Tensor], Written]]] = {
    "W4A16": ("pack-quantized", _pack_quantized(4, 32, symmetric=True)),
    "W4A16 zeros": ("pack-quantized", _pack_quantized(4, 32, symmetric=False)),
    "W4A16 ordered": ("pack-quantized", _pack_quantized(4, 32, symmetric=True, ordered=True)),
    "W8A16": ("pack-quantized", _pack_quantized(8, -1, symmetric=True)),
    "W3A16 zeros": ("pack-quantized", _pack_quantized(3, 32, symmetric=False)),
    "W5A16": ("pack-quantized", _pack_quantized(5, 32, symmetric=True)),
    "W8A8": ("int-quantized", _int_quantized),
    "W4A8": ("int-quantized", _int_quantized_of_4_bits),
    "fp8": ("float-quantized", _float_quantized),
    "MXFP8": ("mxfp8-quantized", _mxfp8),
    "NVFP4": ("nvfp4-pack-quantized", _nvfp4),
    "MXFP4": ("mxfp4-pack-quantized", _mxfp4),
}
OF_SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16 zeros": {"symmetric": False},
    "W3A16 zeros": {"symmetric": False},
    "W4A16 ordered": {"actorder": "group"},
}
"""Further fields of the weights in the config."""
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
W3, W5 = W4 | {"num_bits": 3}, W4 | {"num_bits": 5}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
F4 = {"num_bits": 4, "type": "float", "strategy": "group"}
F8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}


def bitsandbytes(kind: str) -> tuple[dict[str, Any], Writer]:
    """Kinds: int8, or 4 bits with a table of values in blocks of 32, with `double` quantisation or without. "nf4 as
    bfloat16" stores the bytes of the codes as bfloat16."""

    def writer(module: str, weight: Tensor) -> Written:
        if kind == "int8":
            codes, scales, values = in_int8(weight)
            return {
                ".weight": codes,
                ".SCB": scales[:, 0] * 127,
                ".weight_format": torch.zeros((), dtype=torch.uint8),
            }, values
        n, k = weight.shape
        table = NF4 if kind.startswith("nf4") else FP4
        blocks = weight.reshape(-1, 32)
        most = blocks.abs().amax(-1)
        nested: dict[str, Tensor] = {}
        state: dict[str, Any] = {"quant_type": kind[:3], "blocksize": 32, "dtype": "float16", "shape": [n, k]}
        if kind.endswith("double"):
            offset = float(most.mean())
            inner = (most - offset).view(-1, 32)
            largest = inner.abs().amax(-1)
            levels = torch.linspace(-1, 1, 256)
            stored = ((inner / largest[:, None])[..., None] - levels).abs().argmin(-1)
            nested = {".weight.nested_absmax": largest, ".weight.nested_quant_map": levels}
            state |= {"nested_blocksize": 32, "nested_offset": offset}
            most = (levels[stored] * largest[:, None]).flatten() + offset
            nested[".weight.absmax"] = stored.flatten().to(torch.uint8)
        codes = ((blocks / most[:, None])[..., None] - table).abs().argmin(-1)
        values = (table[codes] * most[:, None]).view(n, k)
        flat = codes.flatten()
        name = f".weight.quant_state.bitsandbytes__{kind[:3]}"
        packed = (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)
        tensors = {
            ".weight": packed.view(torch.bfloat16 if kind.endswith("bfloat16") else torch.uint8)[:, None],
            ".weight.absmax": most,
            ".weight.quant_map": table,
            name: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        return tensors | nested, values

    config = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    return config | ({} if kind == "int8" else {"bnb_4bit_quant_type": kind[:3]}), writer


def torchao(kind: str) -> tuple[dict[str, Any], Writer]:
    """kind: a config class of torchao without "Config": Float8..., Int8... or Intx... (4 bits with zero points)."""

    def writer(module: str, weight: Tensor) -> Written:
        if kind.startswith("Float8"):
            codes, scales, values = in_fp8(weight, 1, 1 << 20)
            return {"._weight_qdata": codes, "._weight_scale": scales}, values
        if "Intx" in kind:
            unsigned, half, zeros, values = affine(weight, 4, 32, symmetric=False)
            tensors = {"._weight_qdata": unsigned - 8, "._weight_zero_point": zeros - 8}
            return {name: each.to(torch.int8) for name, each in tensors.items()} | {"._weight_scale": half}, values
        codes, scales, values = in_int8(weight)
        zero_points = torch.zeros_like(scales).to(torch.int8)
        return {"._weight_qdata": codes, "._weight_scale": scales, "._weight_zero_point": zero_points}, values

    data = {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}} if "Intx" in kind else {}
    chosen = {"_type": f"{kind}Config", "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": chosen}}, writer


def hqq(bits: int) -> tuple[dict[str, Any], Writer]:
    def writer(module: str, weight: Tensor) -> Written:
        groups, in_byte = weight.reshape(-1, 32), 8 // bits
        least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (most - least) / ((1 << bits) - 1)
        zero = -least / scale
        codes = (groups / scale + zero).round().clamp(0, (1 << bits) - 1)
        slabs = codes.to(torch.uint8).chunk(in_byte)
        stored = torch.zeros_like(slabs[0])
        for slab in slabs:
            stored = stored << bits | slab if bits < 8 else slab
        tensors = {".W_q": stored, ".scale": scale, ".zero": zero, ".shape": torch.tensor(weight.shape)}
        return tensors | {".nbits": torch.tensor(bits)}, ((codes - zero) * scale).view(weight.shape)

    weights = {"nbits": bits, "group_size": 32, "axis": 1, "channel_wise": True}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}, writer


NF4 = torch.tensor(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105003, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ]
)  # fmt: skip
FP4 = torch.tensor([0, 0.0052083333, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25])
FP4 = torch.cat((FP4, -FP4))
