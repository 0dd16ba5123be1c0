"""The engine options of the model and its tokenizer: what it is, where it comes from, and how it is read.

A part of `engine_options.Options`, which says how a field is declared.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.core.options.option import Option, Secret

MODEL, TOKENIZER = "Model", "Tokenizer"
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
FileFormat = Literal["safetensors", "pt", "gguf", "mistral", "sharded_state", "tensorizer"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str,
        Option(
            MODEL,
            "A folder, a .gguf file, or a name of the Hugging Face hub, or ModelScope's: docs/models.md",
            default_text="the demo model, SmolLM2-135M-Instruct",
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], Option(MODEL, "Names the model answers to", default_text="the value of model")
    ] = ()
    dtype: Annotated[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        Option(
            MODEL,
            "Type of weights and activations; auto is the checkpoint's own, bfloat16 for a float32 one and for GGUF",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            MODEL,
            "What computes: auto (the first GPU where there is one, else the CPU), cpu, cuda or cuda:INDEX",
            forms=("auto", "cpu", "cuda", "cuda:INDEX"),
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Option(MODEL, "On a GPU, start every decode step anew instead of replaying a CUDA graph of it")
    ] = False
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...],
        Option(
            MODEL,
            "On a GPU, the numbers of requests that decode graphs are captured for; others are padded to the next",
            "requests",
            minimum=1,
            default_text="1, 2, 4, then every 8 up to 256 and every 16 beyond",
        ),
    ] = ()
    batch_invariant: Annotated[
        bool,
        Option(
            MODEL,
            "On a GPU, compute a request's numbers in the same order whatever shares its batch and however its prompt "
            "is cut up, so that its tokens are the same; slower",
        ),
    ] = False
    max_cudagraph_capture_size: Annotated[
        int | None,
        Option(
            MODEL,
            "On a GPU, the most requests that a decode graph is captured for",
            "requests",
            minimum=1,
            default_text="max_num_seqs, at most 512",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        Option(
            MODEL,
            "Quantise float weights as they are loaded: int8 and int4, on a CPU in blocks of 8 or 4 bits (embedding "
            "and head always 8), on a GPU in groups, fp8 on a GPU with a scale for each row, bitsandbytes (NF4) and "
            "experts_int8 (experts alone). gguf, awq, gptq and the other formats of docs/quantization.md insist on a "
            "checkpoint that is stored so, which is computed as it is stored anyway",
            default_text="as the checkpoint stores them",
            short="-q",
        ),
    ] = None
    quantization_group_size: Annotated[
        int,
        Option(MODEL, "How many neighbouring weights share a scale under int8 and int4: 32, 64 or 128", "weights"),
    ] = 32
    max_model_len: Annotated[
        int | None,
        Option(
            MODEL,
            "Longest prompt plus output; -1 or auto asks for the default",
            "tokens",
            minimum=1,
            words={"auto": None, "-1": None},
            default_text="what the model was trained for, shortened to the memory with a warning",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", FileFormat, "bitsandbytes", "runai_streamer", "fastsafetensors", "dummy"],
        Option(
            MODEL,
            "How to read the weights; hf is auto, mistral its consolidated files, sharded_state those that "
            "save-sharded-state wrote for these ranks, tensorizer one file that this library wrote of a Hugging Face "
            "model, bitsandbytes any that are quantised so or become it, runai_streamer and fastsafetensors are "
            "libraries (extras of these names, as tensorizer is) that read safetensors whole into memory, dummy makes "
            "random ones of the right shape; npcache is pt, whose files are mapped into memory anyway",
            words={"hf": "auto", "npcache": "pt"},
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, Any],
        Option(
            MODEL,
            "Of load_format tensorizer: tensorizer_uri (a path, or an http or s3 URI) or tensorizer_dir, which are the "
            "model's folder else; num_readers, verify_hash, encryption_keyfile, s3_endpoint",
        ),
    ] = {}
    safetensors_load_strategy: Annotated[
        Literal["lazy", "eager", "prefetch"],
        Option(
            MODEL,
            "How safetensors files are read: lazy (memory-mapped, the parts that are needed), eager (each file whole "
            "into memory first: for network file systems), prefetch (memory-mapped, and the page cache filled ahead by "
            "background reads of whole files)",
        ),
    ] = "lazy"
    use_tqdm_on_load: Annotated[
        bool | None,
        Option(MODEL, "Show a progress bar while weights are read", default_text="on where stderr is a terminal"),
    ] = None
    revision: Annotated[str | None, Option(MODEL, "Branch, tag or commit of a hub model", default_text="main")] = None
    download_dir: Annotated[
        str | None, Option(MODEL, "Where hub models are kept", default_text="the hub's own cache")
    ] = None
    ignore_patterns: Annotated[tuple[str, ...], Option(MODEL, "Files of a hub model that are not fetched")] = ()
    config_format: Annotated[
        Literal["auto", "hf", "mistral"],
        Option(
            MODEL,
            "Which config is read: hf (config.json), mistral (params.json, whose weights are the consolidated files), "
            "auto the first where there is one",
        ),
    ] = "auto"
    hf_config_path: Annotated[str | None, Option(MODEL, "Where another config.json lies", default_text="none")] = None
    hf_token: Annotated[
        Secret | None,
        Option(
            MODEL,
            "Token for private and gated models of the hub. Others see it on a command line: HF_TOKEN in the "
            "environment, or a config file, is read by this user alone",
            words={"true": None},
            default_text="the environment's HF_TOKEN, else that of `hf auth login`; true is the default",
            alone="true",
        ),
    ] = None
    trust_remote_code: Annotated[bool, Option(MODEL, "Allow code that a checkpoint ships to run")] = False
    code_revision: Annotated[
        str | None,
        Option(MODEL, "Branch, tag or commit of a hub model's code", default_text="revision, or main elsewhere"),
    ] = None
    model_impl: Annotated[
        Literal["auto", "headrace", "transformers"],
        Option(
            MODEL,
            "What computes the model: headrace (a family of this package or of a plugin), transformers (its code, with "
            "the paged cache and attention of this engine; on a CPU, one rank), auto the first where it can",
            words={"vllm": "headrace"},
        ),
    ] = "auto"
    hf_overrides: Annotated[dict[str, Any], Option(MODEL, "Fields that replace those of the model's config")] = {}
    generation_config: Annotated[
        str,
        Option(
            MODEL,
            "Where sampling defaults come from: auto (the model's generation_config.json), vllm (none), or a folder",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], Option(MODEL, 'Defaults in the place of those, such as {"top_p": 0.5, "max_new_tokens": 64}')
    ] = {}
    max_logprobs: Annotated[
        int, Option(MODEL, "Most log-probabilities a request may ask for per token; -1 is the vocabulary", minimum=-1)
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Option(
            MODEL,
            "What is reported of output tokens: raw is the model's own, processed what tokens are drawn from, after "
            "penalties, processors, temperature and truncation; a prompt's are raw_logprobs. With others than "
            "raw_logprobs a GPU waits for the host in each step that reports",
        ),
    ] = "raw_logprobs"
    seed: Annotated[
        int | None,
        Option(
            MODEL,
            "From which requests without a seed draw theirs, in order of arrival; none draws it at random",
            minimum=-(2**63),
            maximum=2**63 - 1,
            words={"none": None},
        ),
    ] = 0

    tokenizer: Annotated[
        str | None, Option(TOKENIZER, "A folder or the name of a hub model", default_text="the model's own")
    ] = None
    tokenizer_revision: Annotated[
        str | None, Option(TOKENIZER, "Branch, tag or commit of a hub tokenizer", default_text="main")
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "mistral"],
        Option(
            TOKENIZER,
            "mistral reads tekken.json or tokenizer.model.v1 to v7, and makes its chat template by mistral-common (the "
            "extra mistral), even where a tokenizer.json lies beside it; auto, which hf is too, where none does",
            words={"hf": "auto"},
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool, Option(TOKENIZER, "Run without a tokenizer: prompts and outputs are token ids")
    ] = False
