"""GGUF files of every architecture that is read, written as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import CASES, Source, mixture, plain
from test_mixtures import MIXTURE_ERROR, error, logits_of, program_of

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.sources.gguf.config import ARCHITECTURES
from headrace.executor.checkpoints.sources.gguf.encoders import ENCODERS
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.checkpoints.sources.gguf.mixtures import MIXTRAL
from headrace.executor.models.families import spec_from_config

NEW_TOKENS = 64
"""With the prompts, whose chunks have 24 tokens at most, several times the windows of the tiny models."""
PAGE = Path(__file__).parents[2] / "docs/models.md"
GGUF_COLUMN = re.compile(r"^\| `(\w+)` \|(?:[^|]*\|){4} (\w*) *\|", re.MULTILINE)


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name].make()
    path = case.save(tmp_path / "model.gguf")
    prompts = shared_prefix(case.config.get("vocab_size") or case.config["padded_vocab_size"])
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    options = TIGHT | {"max_model_len": max(map(len, prompts)) + NEW_TOKENS, "num_gpu_blocks_override": 80}
    with LLM(str(path), **options, kv_cache_dtype="float32") as llm:
        outputs = generate_all_at_once(llm, prompts, params)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == case.logits(prompt, answer).argmax(-1).tolist()
    assert len({token for answer in answers for token in answer}) > 3, "the model answers one thing"


def test_every_architecture_that_the_page_of_models_says_is_read_from_gguf_is_compared() -> None:
    by_others = {each.architecture for each in ENCODERS.values()}  # test_gguf_encoders
    compared = {source.architecture for source in CASES.values()} | by_others
    promised = {each.architecture for each in (*ARCHITECTURES.values(), MIXTRAL)}
    said = {architecture for architecture, said in GGUF_COLUMN.findall(PAGE.read_text()) if said == "yes"}
    assert promised <= said == compared


BLOCKS = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
PACKED = [
    (mixture("gpt_oss", **BLOCKS), Kind.MXFP4),
    (mixture("kimi_k2", **BLOCKS, **LATENT), Kind.Q8_0),
    (mixture("minimax_m2", **BLOCKS), Kind.Q4_0),
    (plain("gpt_neox", **BLOCKS), Kind.Q8_0),
    (plain("phi3", **BLOCKS), Kind.Q4_0),
]


@pytest.mark.parametrize(("source", "kind"), PACKED, ids=lambda each: getattr(each, "architecture", None) or each.name)
def test_quantised_matrices_are_computed_as_they_are_stored(source: Source, kind: Kind, tmp_path: Path) -> None:
    """Of blocks of 32, fused ones and those of experts among them."""
    file = GGUFFile(source.make().save(tmp_path / "model.gguf", kind))
    spec = spec_from_config(file.config)
    packed = program_of(spec, file.weights(), keep_packed=True)
    assert packed.weight_bytes < 0.6 * program_of(spec, file.weights()).weight_bytes
    exact = logits_of(program_of(spec, file.weights()))
    assert 0 < error(logits_of(packed), exact) < MIXTURE_ERROR
