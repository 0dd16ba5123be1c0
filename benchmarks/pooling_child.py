"""One peer of `pooling_peers.py`, in its own environment: measures the cases it is given and prints them as JSON.

PEERS/bin/python benchmarks/pooling_child.py PEER FOLDER SHAPE CASES.json
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pooling_folders import num_tokens, pairs_of, texts_of

Embed = Callable[[list[str]], Any]
Inputs = dict[str, Any]
"""input_ids and attention_mask, [batch, length] int64 arrays."""


def sentence_transformers(folder: Path, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=32, show_progress_bar=False)


def cross_encoder(folder: Path, dtype: str) -> Callable[[list[tuple[str, str]]], Any]:
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    return lambda pairs: model.predict(pairs, batch_size=32, show_progress_bar=False)


def exported(folder: Path) -> Path:
    """The model as ONNX, exported by torch: from ids and mask to the last hidden states."""
    import torch
    import transformers

    file = folder / "model.onnx"
    if file.exists():
        return file
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return found

    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "states")}
    torch.onnx.export(
        States(), (ids, ids), str(file), input_names=["input_ids", "attention_mask"], output_names=["states"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    return file


def onnxruntime(folder: Path, dtype: str) -> Embed:
    """int8 is onnxruntime's dynamic quantisation."""
    import onnxruntime

    file = exported(folder)
    if dtype == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantised = folder / "model_int8.onnx"
        if not quantised.exists():
            quantize_dynamic(str(file), str(quantised), weight_type=QuantType.QInt8, per_channel=True)
        file = quantised
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return in_batches(folder, lambda given: session.run(["states"], given)[0])


def openvino(folder: Path, dtype: str) -> Embed:
    """int8 is NNCF's quantisation after training, calibrated with other texts of the mix."""
    import openvino

    core = openvino.Core()
    model = core.read_model(exported(folder))
    if dtype == "int8":
        import nncf

        tokenize = tokenizer_of(folder)
        samples = nncf.Dataset(texts_of("mix", 260)[200:], lambda text: tokenize([text]))
        model = nncf.quantize(model, samples, model_type=nncf.ModelType.TRANSFORMER, subset_size=60)
    precision = "bf16" if dtype == "bfloat16" else "f32"
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    return in_batches(folder, lambda given: compiled(given)[0])


def vllm(folder: Path, dtype: str) -> Embed:
    model = vllm_engine(folder, dtype)
    return lambda texts: model.embed(texts, use_tqdm=False)


def vllm_engine(folder: Path, dtype: str) -> Any:
    from vllm import LLM

    return LLM(str(folder), runner="pooling", dtype=dtype, max_model_len=512)


def fastembed(folder: Path, dtype: str) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    exported(folder)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model=folder.name, pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf=folder.name), dim=width,
        model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding(folder.name, specific_model_path=str(folder))
    return lambda texts: list(model.embed(texts, batch_size=32))


def infinity(folder: Path, dtype: str) -> Embed:
    import asyncio

    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    arguments = EngineArgs(
        model_name_or_path=str(folder), engine="torch", device="cpu", dtype=dtype, model_warmup=False, batch_size=32
    )
    engine, loop = AsyncEmbeddingEngine.from_args(arguments), asyncio.new_event_loop()
    loop.run_until_complete(engine.astart())
    return lambda texts: loop.run_until_complete(engine.embed(texts))[0]


def llama_cpp_python(folder: Path, dtype: str) -> Embed:
    import llama_cpp
    from pooling_gguf import gguf_of_bert

    # Each token of a batch is compared with all others in it: batches of 2,048 take 2.7 times as long.
    model = llama_cpp.Llama(
        str(gguf_of_bert(folder, dtype)), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=2,
        n_threads_batch=2, verbose=False,
    )  # fmt: skip
    return lambda texts: model.embed(texts, normalize=True, truncate=False)


def tokenizer_of(folder: Path) -> Callable[[list[str]], Inputs]:
    import numpy as np
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def tokenize(texts: list[str]) -> Inputs:
        encoded = tokenizer(texts, padding=True, return_tensors="np")
        return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}

    return tokenize


def in_batches(folder: Path, states_of: Callable[[Inputs], Any]) -> Embed:
    """Batches of 32 sorted by length, as fastembed's and sentence-transformers' are."""
    import numpy as np

    tokenize = tokenizer_of(folder)

    def embed(texts: list[str]) -> Any:
        order, found = sorted(range(len(texts)), key=lambda index: -len(texts[index])), [None] * len(texts)
        for first in range(0, len(texts), 32):
            batch = order[first : first + 32]
            given = tokenize([texts[index] for index in batch])
            states = states_of(given)
            mask = given["attention_mask"][:, :, None]
            pooled = (states * mask).sum(1) / mask.sum(1)
            for index, vector in zip(batch, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True):
                found[index] = vector
        return found

    return embed


PEERS = {
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "fastembed": fastembed,
    "openvino": openvino,
    "infinity-emb": infinity,
    "llama-cpp-python": llama_cpp_python,
    "vllm": vllm,
}
MOST_S = 30.0
"""After this time a case has no further rounds, so that large models are measured in a few minutes."""


def measured(run: Callable[[], Any], tokens: int, rounds: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    run()  # warms up
    seconds = list[float]()
    while len(seconds) < rounds and not (seconds and time.perf_counter() - began_s > MOST_S):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "tokens": tokens, "tok_s": tokens / sorted(seconds)[len(seconds) // 2]}


def main() -> None:
    peer, folder, cases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    library, _, dtype = peer.partition(" ")
    results: dict[str, Any] = {}
    if any(case["kind"] == "rerank" for case in cases):
        pairs = pairs_of()[: cases[0]["count"]]
        if library == "vllm":
            model = vllm_engine(folder, dtype)
            score: Callable[[list[tuple[str, str]]], Any] = lambda pairs: model.score(  # noqa: E731
                pairs[0][0], [document for _, document in pairs], use_tqdm=False
            )
        else:
            score = cross_encoder(folder, dtype)
        tokens = num_tokens([" ".join(pair) for pair in pairs])
        results["rerank"] = measured(lambda: score(pairs), tokens, cases[0]["rounds"])
    else:
        embed = PEERS[library](folder, dtype)
        for case in cases:
            texts = texts_of(case["kind"], case["count"])
            results[case["name"]] = measured(functools.partial(embed, texts), num_tokens(texts), case["rounds"])
    print(json.dumps(results), flush=True)
    if library == "infinity-emb":
        os._exit(0)  # its threads never end


if __name__ == "__main__":
    main()
