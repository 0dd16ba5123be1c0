"""GGUF files: config, names, row order and numbers as in the checkpoint they came from, and damaged files by name."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import CASES
from gguf_tensors import in_turn
from model_driver import DictSource
from thinned import every
from tiny_gguf import finish, save_gguf, save_tensors

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import config_at_hand, open_checkpoint
from headrace.executor.checkpoints.declared_weights import as_declared
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import model_weights
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight


def random_matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


SAID_OTHERWISE = {
    "chatglm, glm4": "its config and its names are ChatGLM's, of which a file cannot be told",
    "gemma4, experts": "the size of the vocabulary of inputs of each layer, which it has none of",
    "hunyuan-dense, alpha": "the rotary base that its alpha makes, in float32",
    "falcon-h1": "its multipliers are in the matrices",
    "falcon-h1, normed": "its multipliers are in the matrices",
}
"""Cases whose files say the same model in other words, and what. `test_gguf_families.py` compares all cases' tokens."""


@pytest.mark.parametrize("name", every(6, [name for name in CASES if name not in SAID_OTHERWISE]))
def test_a_gguf_file_gives_the_config_and_the_weights_of_the_checkpoint_it_came_from(name: str, tmp_path: Path) -> None:
    case = CASES[name].make()
    checkpoint = open_checkpoint(Options(model=str(case.save(tmp_path / "model.gguf"))))
    config, state = dict(case.config), dict(case.state)
    if "value_heads_in_turn" in checkpoint.config:
        config["value_heads_in_turn"] = True
        state = {name: in_turn(name, tensor, config) for name, tensor in state.items()}
    spec, original = spec_from_config(checkpoint.config), spec_from_config(config)
    assert replace(spec, architecture="") == replace(original, architecture="")  # some stand for another of their shape
    assert (checkpoint.format, checkpoint.dtype_name) == ("gguf", "float32")
    assert checkpoint.eos_token_ids == ((case.config["eos_token_id"],) if "eos_token_id" in case.config else ())
    weights, expected = as_declared(spec, checkpoint.weights()), as_declared(original, DictSource(state))
    ignorable = re.compile("|".join((*original.names.ignorable, r"^lm_head\.weight$")))
    read, held = ({each for each in of.names() if not ignorable.search(each)} for of in (weights, expected))
    assert read == held
    for weight in (each.name for each in model_weights(spec)):
        assert weights.shape(weight) == expected.shape(weight)
        torch.testing.assert_close(weights.get(weight), expected.get(weight), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda k: k.name
)
def test_parts_of_quantised_weights_equal_the_whole_cut(kind: Kind, tmp_path: Path) -> None:
    model = tiny_models.build("llama", hidden_size=128, head_dim=32)
    weights = GGUFFile(save_gguf(model, tmp_path / "model.gguf", kind)).weights()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        original = model.state_dict()[name]
        whole = weights.get(name)
        step = (original.max() - original.min()).item() / (256 if kind in (Kind.F16, Kind.BF16, Kind.Q8_0) else 12)
        torch.testing.assert_close(whole.float(), original, rtol=0, atol=step)
        for rows, columns in ((slice(3, 77), None), (None, slice(5, 70)), (slice(64, 128), slice(32, 64))):
            part = weights.get(name, rows, columns)
            assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])
    if kind in (Kind.F16, Kind.BF16):
        assert weights.get("lm_head.weight").dtype == {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]


I_QUANTS = [kind for kind in Kind if kind.name.startswith(("IQ", "TQ"))]
QUANTISED = [kind for kind in gguf.quants._type_traits if kind != Kind.BF16]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make random scales, infinite ones among them
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda k: k.name)
def test_every_type_that_gguf_can_dequantise_is_read(kind: Kind, tmp_path: Path) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    packed = rng.integers(0, 256, size=(8, 512 // block_size * block_bytes), dtype=np.uint8)
    path = save_tensors(
        tmp_path / "model.gguf",
        {"token_embd.weight": (random_matrix(10, 256), Kind.F32), "blk.0.ffn_down.weight": (packed, kind)},
    )
    file = GGUFFile(path)
    expected = gguf.quants.dequantize(packed, kind)
    found = file.weights().get("model.layers.0.mlp.down_proj.weight")
    assert found.shape == (8, 512)
    np.testing.assert_array_equal(found.numpy(), expected)
    kept = file.weights().packed("model.layers.0.mlp.down_proj.weight")
    if isinstance(kept, GroupedWeight):
        np.testing.assert_array_equal(kept.floats().numpy(), expected)
        assert file.kept_bytes == kept.nbytes + 10 * 256 * 4
        assert file.weights().stored("model.layers.0.mlp.down_proj.weight").group == kept.group
    else:
        assert isinstance(kept, tuple)
        assert kept[0] == kind.name
        np.testing.assert_array_equal(kept[1], packed)
    assert isinstance(kept, GroupedWeight) == (kind in (*I_QUANTS, Kind.Q3_K, Kind.MXFP4, Kind.NVFP4))


def test_packed_query_rows_are_in_the_order_of_the_dequantised_ones(tmp_path: Path) -> None:
    model = tiny_models.build("llama", hidden_size=128, head_dim=32)
    weights = GGUFFile(save_gguf(model, tmp_path / "model.gguf", Kind.Q4_1)).weights()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        packed = weights.packed(name)
        assert isinstance(packed, tuple)
        np.testing.assert_array_equal(gguf.quants.dequantize(packed[1], Kind.Q4_1), weights.get(name).numpy())
    assert weights.packed("model.norm.weight") is None


def test_a_split_model_is_read_whole_and_a_missing_part_is_named(tmp_path: Path) -> None:
    def write(index: int, tensor: str) -> Path:
        path = tmp_path / f"m-0000{index + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
            writer.add_uint32(f"llama.{key}", 4)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor(tensor, random_matrix(4, 4, index))
        return finish(writer, path)

    first = write(0, "token_embd.weight")
    with pytest.raises(ModelError, match=r"first of 2 files; m-00002-of-00002\.gguf should lie beside it"):
        GGUFFile(first)
    second = write(1, "output.weight")
    weights = open_checkpoint(Options(model=str(tmp_path))).weights()
    assert weights.names() == {"model.embed_tokens.weight", "lm_head.weight"}
    np.testing.assert_array_equal(weights.get("lm_head.weight").numpy(), random_matrix(4, 4, 1))
    with pytest.raises(ModelError, match="give the first"):
        GGUFFile(second)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"tensors": ["token_embd.weight"]}, "has the tensor token_embd.weight, which another part of .* has too"),
        ({"split.no": 0}, "m-00002-of-00002.gguf is no part of .*: its metadata key split.no is 0; 1 is expected"),
        ({"split.count": 3}, "its metadata key split.count is 3; 2 is expected"),
        (
            {"tensors": ["output_norm.weight"]},
            "have 2 tensors, and by the metadata key split.tensors.count there are 3",
        ),
    ],
)
def test_parts_of_different_models_are_not_put_together(second: dict[str, Any], message: str, tmp_path: Path) -> None:
    """As after a file was fetched again, copied under the wrong name or cut in parts anew."""
    own: dict[str, Any] = {"tensors": ["output.weight", "output_norm.weight"]}
    parts: list[dict[str, Any]] = [{"tensors": ["token_embd.weight"]}, own | second]
    for index, given in enumerate(parts):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{index + 1}-of-00002.gguf", "llama")
        for key, value in {"split.no": index, "split.count": 2, "split.tensors.count": 3}.items():
            writer.add_uint16(key, given.get(key, value))
        for tensor in given["tensors"]:
            writer.add_tensor(tensor, random_matrix(4, 4, index))
        finish(writer, tmp_path / f"m-0000{index + 1}-of-00002.gguf")
    with pytest.raises(ModelError, match=message):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def tiny_file(folder: Path) -> Path:
    return save_tensors(
        folder / "model.gguf",
        {
            "token_embd.weight": (random_matrix(10, 256), Kind.F32),
            "blk.0.attn_q.weight": (gguf.quants.quantize(random_matrix(256, 256), Kind.Q8_0), Kind.Q8_0),
        },
    )


def set_type(data: bytearray, tensor: str, number: int) -> bytearray:
    at = data.index(tensor.encode()) + len(tensor) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", number)
    return data


def set_offset(data: bytearray, tensor: str, offset: int) -> bytearray:
    at = data.index(tensor.encode()) + len(tensor) + 4 + 2 * 8 + 4
    data[at : at + 8] = struct.pack("<Q", offset)
    return data


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[:-7], r"truncated .*: tensor blk\.0\.attn_q\.weight \(Q8_0 \[256, 256\]\) lies at bytes \d+ to"),
        (lambda d: d[:200], r"header goes on beyond the end of the file at 200 bytes"),
        (lambda d: d[:10], r"header goes on beyond the end of the file at 10 bytes"),
        (lambda d: b"", r"not a GGUF file: it is empty"),
        (lambda d: b"PK\x03\x04" + d[4:], r"not a GGUF file: it begins with b'PK\\x03\\x04' where b'GGUF'"),
        (lambda d: b"version https://git-lfs.github.com/spec/v1\n", r"not a GGUF file"),
        (lambda d: d[:4] + struct.pack("<I", 9) + d[8:], r"GGUF version 9; versions 2 and 3"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], r"big-endian"),
        (lambda d: set_type(d, "blk.0.attn_q.weight", 4711), r"tensor blk\.0\.attn_q\.weight is of unknown type 4711"),
        (lambda d: set_type(d, "blk.0.attn_q.weight", Kind.I8), r"attn_q\.weight is of type I8 \(24\), which cannot"),
        (lambda d: set_offset(d, "blk.0.attn_q.weight", 1 << 40), r"attn_q\.weight .* but the file ends at \d+"),
        (lambda d: set_offset(d, "blk.0.attn_q.weight", (1 << 64) - 32), r"attn_q\.weight .* but the file ends at"),
        (lambda d: set_offset(d, "blk.0.attn_q.weight", 32), r"attn_q\.weight is said to lie at 32 .* end at 10240;"),
        (lambda d: set_offset(d, "blk.0.attn_q.weight", 10239), r"attn_q\.weight is said to lie at 10239 of the"),
        (lambda d: set_type(d, "token_embd.weight", Kind.F16), r"is said to lie at 10240 .* before it end at 5120;"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], r"truncated or damaged"),
        (lambda d: d.replace(b"llama.block_count", b"llama.block_kount"), r"lacks the metadata key llama\.block_count"),
        (lambda d: d.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0plamo"), r"architecture plamo; supported"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_what_is_wrong_with_it(
    damage: Callable[[bytearray], bytes], message: str, tmp_path: Path
) -> None:
    path = tiny_file(tmp_path)
    path.write_bytes(bytes(damage(bytearray(path.read_bytes()))))
    with pytest.raises(ModelError, match=message) as raised:
        open_checkpoint(Options(model=str(path))).weights()
    assert str(path) in str(raised.value)


def test_no_byte_of_a_header_can_be_changed_into_anything_but_a_model_error(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        data[rng.integers(0, 700)] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            weights = open_checkpoint(Options(model=str(path))).weights()
            for name in weights.names():
                weights.get(name)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.demo_model
@pytest.mark.system
def test_the_demo_models_tensors_equal_transformers_own_dequantised_ones(demo_model_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = open_checkpoint(Options(model=str(demo_model_path)))
    # from_pretrained(gguf_file=...) does this too, but only where accelerate is installed.
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    theirs = load_gguf_checkpoint(str(demo_model_path), return_tensors=True, model_to_load=skeleton)
    ours = checkpoint.weights()
    assert ours.names() == theirs["tensors"].keys()
    for name, expected in theirs["tensors"].items():
        assert torch.equal(ours.get(name), expected), name
    # <|im_end|>, and what llama.cpp takes for ends besides: <|endoftext|> and <reponame>.
    assert (checkpoint.dtype_name, checkpoint.eos_token_ids) == ("Q4_1", (2, 4, 0))
    checkpoint.config["eos_token_id"] = checkpoint.eos_token_ids[0]
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(theirs["config"].pop("rms_norm_eps"), rel=1e-6)
    shared = checkpoint.config.keys() & theirs["config"].keys()
    assert len(shared) >= 11
    for key in shared:
        assert checkpoint.config[key] == theirs["config"][key], key


@pytest.mark.demo_model
def test_the_demo_model_is_found_by_the_name_that_it_is_served_under(
    demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name, by_none = (open_checkpoint(Options(model=name)) for name in (demo_model_path.name.split(".")[0], ""))
    assert by_name.name == by_none.name == "SmolLM2-135M-Instruct"
    assert config_at_hand(Options(model=by_name.name)) == config_at_hand(Options()) != {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / by_name.name).mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):  # a folder of that name comes first
        open_checkpoint(Options(model=by_name.name))


@pytest.mark.parametrize("kind", I_QUANTS, ids=lambda kind: kind.name)
def test_i_quants_and_ternary_types_are_turned_into_numbers(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 100, size=(256, 256 // block * size), dtype=np.uint8)
    path = save_tensors(
        tmp_path / "model.gguf",
        {"token_embd.weight": (random_matrix(10, 256), Kind.F32), "blk.0.attn_q.weight": (packed, kind)},
    )
    weights, name = GGUFFile(path).weights(), "model.layers.0.self_attn.q_proj.weight"
    found, kept = weights.get(name, slice(0, 64)), weights.packed(name)
    whole = gguf.quants.dequantize(packed, kind).reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(found.numpy(), whole[:64])
    assert isinstance(kept, GroupedWeight)
    np.testing.assert_array_equal(kept.floats().numpy(), whole)
