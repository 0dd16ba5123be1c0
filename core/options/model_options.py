"""The engine options of the model and its tokenizer: which model, where it comes from, and how it is loaded.

A part of `engine_options.Options`; that module's docstring describes how a field is declared.
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
            "A folder, a .gguf file, or a name on the Hugging Face hub or ModelScope: docs/models.md",
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
            "Type of weights and activations; auto is the checkpoint's own, or bfloat16 if that is float32 or the "
            "file is GGUF",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            MODEL,
            "Device that computes: auto (the first GPU if there is one, else the CPU), cpu, cuda or cuda:INDEX",
            forms=("auto", "cpu", "cuda", "cuda:INDEX"),
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Option(MODEL, "On a GPU, launch every decode step anew instead of replaying its CUDA graph")
    ] = False
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...],
        Option(
            MODEL,
            "On a GPU, the batch sizes for which decode graphs are captured; other batches are padded to the next size",
            "requests",
            minimum=1,
            default_text="1, 2, 4, then every 8 up to 256 and every 16 beyond",
        ),
    ] = ()
    batch_invariant: Annotated[
        bool,
        Option(
            MODEL,
            "Compute a request's numbers in the same order whatever shares its batch and however its prompt is divided "
            "into chunks, so that its tokens are the same; slower on a GPU. The CPU's programs always do, except for "
            "long prompts of models with latent attention (DeepSeek V2 and V3), which this makes slower",
        ),
    ] = False
    max_cudagraph_capture_size: Annotated[
        int | None,
        Option(
            MODEL,
            "On a GPU, the largest batch size for which a decode graph is captured",
            "requests",
            minimum=1,
            default_text="max_num_seqs, at most 512",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        Option(
            MODEL,
            "Quantise float weights while they load: int8 and int4, on a CPU in blocks of 8 or 4 bits (embedding and "
            "head always 8; of encoders int8 rounds the inputs of matrices too), on a GPU in groups; fp8 on a GPU with "
            "one scale per row; bitsandbytes (NF4); experts_int8 (only experts). gguf, awq, gptq and the other formats "
            "of docs/quantization.md require a checkpoint in that format, which needs no option otherwise",
            default_text="as the checkpoint stores them",
            short="-q",
        ),
    ] = None
    quantization_group_size: Annotated[
        int | None,
        Option(
            MODEL,
            "How many consecutive weights share a scale with int8 and int4: 32, 64 or 128",
            "weights",
            default_text="32; 64 where int8 rounds inputs too and rows are as many whole groups",
        ),
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Option(
            MODEL,
            "What the model does: generate tokens, or pool its hidden states into vectors; auto pools if the folder "
            "has sentence-transformers' files, for GGUF files with a pooling_type, for encoders, for classifiers and "
            "with convert, and else generates",
            words=dict.fromkeys(("embed", "embedding", "classify", "score", "reward"), "pooling"),
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Option(
            MODEL,
            "embed makes vectors of a model that generates or has a classifier; beside runner=generate the engine does "
            "both. classify uses the classifier",
            words={"reward": "classify"},
        ),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any],
        Option(
            MODEL,
            "How hidden states are pooled, under vLLM's keys: pooling_type (LAST, CLS, MEAN), use_activation (whether "
            "vectors are scaled to length 1), dimensions (to how many values they are cut)",
        ),
    ] = {}
    max_model_len: Annotated[
        int | None,
        Option(
            MODEL,
            "Longest prompt plus output; -1 or auto selects the default",
            "tokens",
            minimum=1,
            words={"auto": None, "-1": None},
            default_text="the length the model was trained for, reduced to fit the memory with a warning",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", FileFormat, "bitsandbytes", "runai_streamer", "fastsafetensors", "dummy"],
        Option(
            MODEL,
            "How to read the weights: hf is auto; mistral reads Mistral's consolidated files, sharded_state the "
            "files that save-sharded-state wrote for these ranks, tensorizer one file that this library wrote of a "
            "Hugging Face model, bitsandbytes any weights that are or become quantised so; runai_streamer and "
            "fastsafetensors are libraries (extras of these names, as tensorizer is) that read safetensors whole "
            "into memory; dummy makes random weights of the right shape; npcache is pt, whose files are "
            "memory-mapped anyway",
            words={"hf": "auto", "npcache": "pt"},
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, Any],
        Option(
            MODEL,
            "For load_format tensorizer: tensorizer_uri (a path, or an http or s3 URI) or tensorizer_dir, by default "
            "in the model's folder; num_readers, verify_hash, encryption_keyfile, s3_endpoint",
        ),
    ] = {}
    safetensors_load_strategy: Annotated[
        Literal["lazy", "eager", "prefetch"],
        Option(
            MODEL,
            "How safetensors files are read: lazy (memory-mapped, only the needed parts), eager (each whole file "
            "into memory first: for network file systems), prefetch (memory-mapped, while background reads of whole "
            "files fill the page cache ahead)",
        ),
    ] = "lazy"
    use_tqdm_on_load: Annotated[
        bool | None,
        Option(MODEL, "Show a progress bar while weights are read", default_text="on if stderr is a terminal"),
    ] = None
    revision: Annotated[str | None, Option(MODEL, "Branch, tag or commit of a hub model", default_text="main")] = None
    download_dir: Annotated[
        str | None, Option(MODEL, "Folder for downloaded hub models", default_text="the hub's own cache")
    ] = None
    ignore_patterns: Annotated[tuple[str, ...], Option(MODEL, "Files of a hub model that are not downloaded")] = ()
    config_format: Annotated[
        Literal["auto", "hf", "mistral"],
        Option(
            MODEL,
            "Which config is read: hf (config.json), mistral (params.json, with the consolidated files as weights), "
            "auto (hf if there is a config.json, else mistral)",
        ),
    ] = "auto"
    hf_config_path: Annotated[str | None, Option(MODEL, "Path of another config.json", default_text="none")] = None
    hf_token: Annotated[
        Secret | None,
        Option(
            MODEL,
            "Token for private and gated models of the hub. Other users can see it on a command line; HF_TOKEN in "
            "the environment, or a config file, is readable only by this user",
            words={"true": None},
            default_text="the environment's HF_TOKEN, else that of `hf auth login`; true is the default",
            alone="true",
        ),
    ] = None
    trust_remote_code: Annotated[bool, Option(MODEL, "Allow code in a checkpoint to run")] = False
    code_revision: Annotated[
        str | None,
        Option(MODEL, "Branch, tag or commit of a hub model's code", default_text="revision, or main elsewhere"),
    ] = None
    model_impl: Annotated[
        Literal["auto", "headrace", "transformers"],
        Option(
            MODEL,
            "What computes the model: headrace (a family of this package or of a plugin), transformers (its code, "
            "with this engine's paged cache and attention; on a CPU, one rank), auto (headrace if it has the model, "
            "else transformers)",
            words={"vllm": "headrace"},
        ),
    ] = "auto"
    enable_prompt_embeds: Annotated[
        bool, Option(MODEL, "Accept prompt_embeds, embeddings in the place of a prompt's tokens")
    ] = False
    hf_overrides: Annotated[dict[str, Any], Option(MODEL, "Fields that replace those of the model's config")] = {}
    generation_config: Annotated[
        str,
        Option(
            MODEL,
            "Where sampling defaults come from: auto (the model's generation_config.json), vllm (none), or a folder",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Option(
            MODEL,
            'Sampling defaults that replace those of generation_config, such as {"top_p": 0.5, "max_new_tokens": 64}',
        ),
    ] = {}
    max_logprobs: Annotated[
        int,
        Option(
            MODEL,
            "Most log-probabilities that a request may ask for per token; -1 is the size of the vocabulary",
            minimum=-1,
        ),
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Option(
            MODEL,
            "Which values are reported for output tokens: raw are the model's own, processed those that tokens are "
            "drawn from, after penalties, processors, temperature and truncation; a prompt's are always "
            "raw_logprobs. With a mode other than raw_logprobs, a GPU waits for the host in each step that reports",
        ),
    ] = "raw_logprobs"
    seed: Annotated[
        int | None,
        Option(
            MODEL,
            "Seed from which requests without one draw theirs, in order of arrival; none draws it at random",
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
            "mistral reads tekken.json or tokenizer.model.v1 to v7, and takes its chat template from mistral-common "
            "(the extra mistral), even beside a tokenizer.json; auto (hf is the same) does so only without one",
            words={"hf": "auto"},
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool, Option(TOKENIZER, "Run without a tokenizer: prompts and outputs are token ids")
    ] = False
