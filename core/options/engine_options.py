"""Every engine option, declared once: the command line, Python keywords, YAML keys and docs derive from here.

A field has the option's type and default; its `Option` has the constraints and the help. `parsing.parse_options` reads
options from Python, `parsing.add_options` from a command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.core.options.adapters import MOST_RANK
from headrace.core.options.model_options import MODEL, ModelOptions
from headrace.core.options.option import Option

CACHE, SCHEDULER, PROCESS, PARALLEL = "KV cache", "Scheduler", "Process", "Parallel execution"
ADAPTERS = "Adapters (LoRA)"


class Options(ModelOptions, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options as the user gave them. The decisions made from them are a `Plan` (plan.py)."""

    block_size: Annotated[int, Option(CACHE, "Size of one block", "tokens", minimum=1, maximum=256)] = 16
    disable_hybrid_kv_cache_manager: Annotated[
        bool, Option(CACHE, "Keep all tokens in sliding-window layers too, as if they attended to all of them")
    ] = False
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        Option(
            CACHE,
            "Type in which keys and values are stored; auto is dtype, or float16 beside packed weights. 8-bit types "
            "have a scale for each token and head; fp8 (fp8_e4m3) and fp8_e5m2 use a checkpoint's own scales if it "
            "has them",
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool, Option(CACHE, "Compute an fp8 cache's scales from the values written, even if the checkpoint has scales")
    ] = False
    mamba_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Option(
            CACHE,
            "Type in which recurrent layers keep their states, and convolutions their past inputs, between steps; auto "
            "is float32. They are computed in float32, so with 16 bits an answer depends on where its steps end",
        ),
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Option(CACHE, "The type of the states alone; auto is mamba_cache_dtype"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Option(
            CACHE,
            "Share of the total memory to use, whatever other processes use: a GPU's, or the machine's or container's",
            minimum=0.01,
            maximum=1.0,
        ),
    ] = 0.9
    cpu_offload_gb: Annotated[
        float,
        Option(
            MODEL,
            "On a GPU, how much of its weights to keep in host memory: whole layers, copied to the GPU ahead of "
            "their use in every step, so each step takes at least as long as the copies",
            "GiB",
            minimum=0.0,
        ),
    ] = 0.0
    enable_sleep_mode: Annotated[
        bool,
        Option(CACHE, "Allow LLM.sleep to free the engine's memory; over HTTP (/sleep) with server_dev_mode"),
    ] = False
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(
            CACHE,
            "Exact size of the cache; overrides gpu_memory_utilization",
            "bytes",
            minimum=1,
            default_text="from the share of memory; on a CPU at most 4 GiB",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        Option(
            CACHE,
            "Exact number of blocks, one of which stays empty; overrides gpu_memory_utilization and "
            "kv_cache_memory_bytes",
            "blocks",
            minimum=2,
            default_text="from the size of the cache",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Option(CACHE, "Reuse the cached blocks of equal prompt prefixes")] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxhash", "builtin"],
        Option(CACHE, "Hash that identifies a block; builtin is Python's hash and differs between processes"),
    ] = "sha256"

    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            SCHEDULER,
            "Most tokens computed in one step; prompt tokens with log-probabilities count as more",
            "tokens",
            minimum=1,
            default_text="2048, 8192 on a GPU of 70 GiB or more; more where max_num_seqs or whole prefills need it",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(
            SCHEDULER,
            "Most requests running at once",
            "requests",
            minimum=1,
            default_text="256, 1024 on a GPU of 70 GiB or more; max_num_batched_tokens where that is less",
        ),
    ] = None
    max_waiting_requests: Annotated[
        int,
        Option(SCHEDULER, "Longest queue; further requests are rejected with a retry time", "requests", minimum=1),
    ] = 100_000
    max_client_requests: Annotated[
        int,
        Option(
            SCHEDULER,
            "Most unfinished requests of one client (such as an HTTP process); further ones are rejected with a "
            "retry time",
            "requests",
            minimum=1,
        ),
    ] = 100_000
    max_client_inbox_mb: Annotated[
        float,
        Option(
            SCHEDULER,
            "Most memory for one client's messages on their way to the scheduler; further requests are rejected",
            "MB",
            minimum=0.001,
        ),
    ] = 256.0
    max_client_unread_messages: Annotated[
        int,
        Option(
            SCHEDULER,
            "Most messages (one per step with output for the client) that may wait for one client to read them; a "
            "client with more is disconnected, and its requests end with the cause",
            "messages",
            minimum=1,
        ),
    ] = 100_000
    max_client_unread_mb: Annotated[
        float,
        Option(
            SCHEDULER,
            "Most memory for one client's unread messages, counting messages of 4 KiB and more; a single one may be "
            "larger",
            "MB",
            minimum=0.001,
        ),
    ] = 1024.0
    enable_chunked_prefill: Annotated[
        bool, Option(SCHEDULER, "Compute long prompts in chunks, between other requests' tokens")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Option(SCHEDULER, "Order of waiting requests: by arrival (fcfs), or by priority first"),
    ] = "fcfs"
    async_scheduling: Annotated[
        bool | None,
        Option(
            SCHEDULER,
            "Plan the next step while one runs",
            default_text="on where workers or a GPU run the model; off in the engine core's own process on a CPU",
        ),
    ] = None
    speculative_config: Annotated[
        dict[str, Any],
        Option(
            SCHEDULER,
            "Draft tokens ahead and verify them together; the output is the same. Method ngram drafts the tokens "
            "that followed an earlier occurrence of the last prompt_lookup_min to prompt_lookup_max tokens in the "
            'request, at most num_speculative_tokens at once, such as {"method": "ngram", "num_speculative_tokens": '
            '5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}. Method suffix also drafts from past outputs: '
            '{"method": "suffix"}; a draft is at most suffix_decoding_max_spec_factor (1.0) times as long as its '
            "match. What is not likely enough to be worth its time is left out, as measured in steps before. With more "
            "than disable_by_batch_size requests nothing is drafted",
            short="-sc",
        ),
    ] = {}
    structured_outputs_config: Annotated[
        dict[str, Any],
        Option(
            SCHEDULER,
            "Structured outputs: backend (auto, which is llguidance, or the extra xgrammar; a backend that is set is "
            "initialised at the start), disable_fallback, disable_any_whitespace, disable_additional_properties, "
            "enable_in_reasoning, and reasoning_parser, the format of the reasoning after which grammars apply and "
            "which a thinking_token_budget ends (a server's own reasoning_parser takes precedence)",
        ),
    ] = {}
    reasoning_config: Annotated[
        dict[str, Any],
        Option(
            SCHEDULER,
            "Markers of reasoning: reasoning_parser as in structured_outputs_config, reasoning_start_str instead of "
            "the format's start marker, and reasoning_end_str, forced when a thinking_token_budget is spent: the "
            "format's end marker, after text that leads to it",
        ),
    ] = {}
    stream_interval: Annotated[
        int,
        Option(
            SCHEDULER,
            "Number of an output's tokens that are sent together; the first token is sent at once",
            "tokens",
            minimum=1,
        ),
    ] = 1
    logits_processors: Annotated[
        tuple[str, ...],
        Option(
            MODEL,
            "module:Class of logits processors, in addition to those that installed packages register under "
            "headrace.logits_processors or vllm.logits_processors; see docs/server.md",
        ),
    ] = ()
    scheduler_cls: Annotated[
        str,
        Option(
            SCHEDULER,
            "module:Class, or a plugin's name, of a class derived from headrace.core.schedule.scheduler.Scheduler",
            default_text="that class",
        ),
    ] = ""

    enable_lora: Annotated[
        bool,
        Option(
            ADAPTERS,
            "Let requests add adapters to the model's weights: each is loaded when it is first needed, beside running "
            "requests",
        ),
    ] = False
    max_loras: Annotated[
        int | None,
        Option(
            ADAPTERS,
            "Most distinct adapters of the requests that run at once; requests with others wait, and are passed by "
            "those behind them for a bounded number of steps",
            "adapters",
            minimum=1,
            default_text="8, or max_cpu_loras where that is less",
        ),
    ] = None
    max_cpu_loras: Annotated[
        int | None,
        Option(
            ADAPTERS,
            "Most adapters in memory, at least max_loras. Any number may be registered: those that were used least "
            "recently, are not pinned and have no requests make room, and are read again when they are needed",
            "adapters",
            minimum=1,
            default_text="64, or max_loras where that is more",
        ),
    ] = None
    max_lora_rank: Annotated[
        int,
        Option(
            ADAPTERS,
            "Highest rank of an adapter; an adapter takes the memory of its own rank",
            minimum=1,
            maximum=MOST_RANK,
        ),
    ] = MOST_RANK
    lora_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Option(ADAPTERS, "Type in which adapters are kept and multiplied; auto is dtype"),
    ] = "auto"
    lora_target_modules: Annotated[
        tuple[str, ...],
        Option(
            ADAPTERS,
            "Modules that adapters may change, by the ends of their names, such as q_proj v_proj; an adapter's "
            "matrices of others are left out",
            default_text="all",
        ),
    ] = ()

    tensor_parallel_size: Annotated[
        int,
        Option(
            PARALLEL, "Worker processes that divide every layer's weights among them", "ranks", minimum=1, short="-tp"
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Option(PARALLEL, "Groups of workers, each with consecutive layers", "stages", minimum=1, short="-pp")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Option(
            PARALLEL,
            "Engines that serve as one on this machine and divide its cores and memory: each has the whole model, "
            "and when one dies, its requests continue on another",
            "engines",
            minimum=1,
            maximum=1024,
            short="-dp",
        ),
    ] = 1
    data_parallel_rank: Annotated[
        int,
        Option(
            PARALLEL,
            "Rank of this engine-core, if it is started by itself: 0 to data_parallel_size - 1",
            minimum=0,
            short="-dpn",
        ),
    ] = 0
    data_parallel_size_local: Annotated[
        int | None,
        Option(
            PARALLEL,
            "How many of the data_parallel_size engines run on this machine",
            "engines",
            minimum=0,
            default_text="all",
            short="-dpl",
        ),
    ] = None
    coordinator: Annotated[
        tuple[str, ...],
        Option(
            PARALLEL,
            "Addresses of coordinators (`headrace coordinator`). An engine-core announces itself to each; `headrace "
            "serve` and LLM use the engines that they list, instead of starting one",
            "addresses",
        ),
    ] = ()
    pipeline_layer_partition: Annotated[
        tuple[int, ...],
        Option(
            PARALLEL,
            "Number of layers in each pipeline stage, first stage first, such as 14,16",
            "layers",
            minimum=1,
            default_text="as even as possible",
        ),
    ] = ()
    enable_expert_parallel: Annotated[
        bool,
        Option(
            PARALLEL,
            "Give each rank whole experts of a mixture: among the tensor-parallel ranks, instead of dividing each "
            "expert's rows; with data_parallel_size on a CPU among the ranks of all engines, which then compute "
            "every step together and fail together",
            short="-ep",
        ),
    ] = False
    expert_placement_strategy: Annotated[
        Literal["linear", "round_robin"],
        Option(
            PARALLEL,
            "Which whole experts a rank has: linear (consecutive ones), or round_robin (one per rank in turn, which "
            "spreads groups of experts that are often chosen together)",
        ),
    ] = "linear"
    enable_eplb: Annotated[
        bool,
        Option(
            PARALLEL,
            "Count the tokens of each expert, and move experts between the ranks of an engine to balance their load, "
            "on CPUs; with enable_expert_parallel",
        ),
    ] = False
    eplb_config: Annotated[
        dict[str, Any],
        Option(
            PARALLEL,
            "Settings of enable_eplb: it moves experts every step_interval (3000) steps, by the loads of the last "
            "window_size (1000); num_redundant_experts (0) of each layer's experts have copies, which take memory "
            "and share the tokens of the busiest experts; log_balancedness (false) logs every "
            "log_balancedness_interval (1) steps how even the loads were",
        ),
    ] = {}
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        Option(
            PARALLEL,
            "What starts the engines: mp starts processes on this machine; ray has the Ray cluster of RAY_ADDRESS or "
            "of this host (else a new local one) place them and their coordinators, and replace them when they die",
            short="-dpb",
        ),
    ] = "mp"
    data_parallel_meeting: Annotated[
        str,
        Option(
            PARALLEL,
            "Name under which engines of this machine that share experts find each other; the same for all engines "
            "that are started one by one",
            default_text="a new name for engines that are started together",
        ),
    ] = ""
    disable_custom_all_reduce: Annotated[
        bool,
        Option(
            PARALLEL,
            "On GPUs, use NCCL also for small sums over the tensor-parallel ranks, which would otherwise go through "
            "peer GPU memory",
        ),
    ] = False
    distributed_executor_backend: Annotated[
        str,
        Option(
            PARALLEL,
            "What runs the model: uni (the engine core's own process), mp (one worker process per rank), ray (the "
            "same, placed by Ray), external_launcher (the caller is one of several ranks that torchrun started, all "
            "with the same requests), or module:Class or a plugin's name of an Executor",
            default_text="auto: mp with more than one rank, else uni",
        ),
    ] = "auto"
    worker_cls: Annotated[
        str,
        Option(
            PARALLEL,
            "What each worker of mp runs: module:Class of a Rank, constructed with the options and place=, its rank",
            default_text="auto: what uni runs",
        ),
    ] = "auto"
    step_timeout: Annotated[
        float,
        Option(
            PARALLEL,
            "How long the workers of mp may take for one step; after that the error names the worker that hangs, and "
            "the engine ends",
            "seconds",
            minimum=0.1,
        ),
    ] = 300.0
    max_parallel_loading_workers: Annotated[
        int | None,
        Option(
            PARALLEL,
            "Most workers of a host that read weights at the same time, which limits the memory and disk load of "
            "reading",
            "workers",
            minimum=1,
            default_text="all workers",
        ),
    ] = None
    nnodes: Annotated[
        int,
        Option(
            PARALLEL,
            "Hosts that share the ranks evenly. The host with node_rank 0 serves; start engine-core with the same "
            "options on the others, in any order",
            "nodes",
            minimum=1,
            short="-n",
        ),
    ] = 1
    node_rank: Annotated[int, Option(PARALLEL, "Number of this host, from 0 to nnodes - 1", minimum=0, short="-r")] = 0
    master_addr: Annotated[str, Option(PARALLEL, "Address of the host with node_rank 0, as the others reach it")] = (
        "127.0.0.1"
    )
    master_port: Annotated[
        int, Option(PARALLEL, "Port on which the host with node_rank 0 waits for the others", minimum=0, maximum=65535)
    ] = 29501
    node_join_timeout: Annotated[
        float, Option(PARALLEL, "How long the hosts wait for each other at the start", "seconds", minimum=0.1)
    ] = 300.0

    startup_timeout: Annotated[
        float,
        Option(
            PROCESS,
            "How long the engine may take to start, including the model's download; after that the start fails and "
            "the error names what hangs: workers at once, an engine-core itself 5 s later",
            "seconds",
            minimum=0.1,
        ),
    ] = 3600.0
    shutdown_timeout: Annotated[
        float, Option(PROCESS, "How long running requests may take to finish at shutdown", "seconds", minimum=0)
    ] = 30.0
    peer_timeout: Annotated[
        float | None,
        Option(
            PROCESS,
            "How long engine and client may hear nothing from each other, for example while one is suspended or "
            "swapped out, before the other is considered dead",
            "seconds",
            minimum=1,
            maximum=86400,
            default_text="the environment's HEADRACE_PEER_TIMEOUT, else 60",
        ),
    ] = None
    control_timeout: Annotated[
        float,
        Option(
            PROCESS,
            "How long reading weights again (reload_weights, wake_up), writing a profile or a call of the worker "
            "extension may take; after that the command fails and the engine continues to serve. An engine that "
            "takes longer to go to sleep ends. If a worker process does not answer a command at all, the engine ends "
            "5 s after twice this time",
            "seconds",
            minimum=0.1,
        ),
    ] = 1800.0
    worker_extension_cls: Annotated[
        str,
        Option(
            PROCESS,
            "module:Class with one instance in each worker, constructed with its rank or without arguments; "
            "LLM.collective_rpc calls its methods, and LLM.call_extension its handle(payload: dict) -> dict",
        ),
    ] = ""
    profiler_config: Annotated[
        dict[str, Any],
        Option(PROCESS, 'Where start_profile writes, such as {"torch_profiler_dir": "/tmp/profiles"}'),
    ] = {}
    disable_log_stats: Annotated[bool, Option(PROCESS, "Do not log load and throughput every 10 s")] = False
    kv_cache_metrics: Annotated[
        bool,
        Option(
            PROCESS,
            "Measure how long blocks stay in the prefix cache and when they are used there: the metrics "
            "kv_block_*_seconds",
        ),
    ] = False
    kv_cache_metrics_sample: Annotated[
        float,
        Option(PROCESS, "Share of the blocks that kv_cache_metrics follows, above 0", minimum=1e-6, maximum=1),
    ] = 0.01
    enable_mfu_metrics: Annotated[
        bool,
        Option(
            PROCESS,
            "Estimate what a rank computes and moves, from the model's config: the metrics estimated_*_per_gpu_total",
        ),
    ] = False

    @property
    def named_kv_cache_dtype(self) -> str:
        """kv_cache_dtype by its own name."""
        return {"fp8": "fp8_e4m3"}.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def history_type(self) -> Literal["float32", "float16", "bfloat16"]:
        """Type of the past inputs of convolutions."""
        return "float32" if self.mamba_cache_dtype == "auto" else self.mamba_cache_dtype

    @property
    def state_type(self) -> Literal["float32", "float16", "bfloat16"]:
        """Type of the states of recurrent layers."""
        return self.history_type if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype

    @property
    def num_engines_here(self) -> int:
        """How many of the data_parallel_size engines run on this machine."""
        local = self.data_parallel_size_local
        return self.data_parallel_size if local is None else local

    @property
    def shares_experts(self) -> bool:
        """Whether the engines divide experts among themselves. Engines of several ranks do so only if
        data_parallel_meeting is set."""
        meets = self.tensor_parallel_size * self.pipeline_parallel_size == 1 or bool(self.data_parallel_meeting)
        return self.enable_expert_parallel and self.data_parallel_size > 1 and meets
