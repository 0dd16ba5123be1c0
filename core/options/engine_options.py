"""Every engine option, declared once: the command line, Python keywords, YAML file and docs table come from here.

A field's annotation is its type, its default is its default, and `Option` carries its constraint and what a
person needs to read. `parsing.parse_options` reads them from Python, `parsing.add_options` from a
command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.core.options.model_options import MODEL, ModelOptions
from headrace.core.options.option import Option

CACHE, SCHEDULER, PROCESS, PARALLEL = "KV cache", "Scheduler", "Process", "Parallel execution"


class Options(ModelOptions, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked. What was decided from it is a `Plan` (see plan.py)."""

    block_size: Annotated[int, Option(CACHE, "Size of one block", "tokens", minimum=1, maximum=256)] = 16
    disable_hybrid_kv_cache_manager: Annotated[
        bool, Option(CACHE, "Keep all tokens of layers with a sliding window too, as if they attended to all")
    ] = False
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        Option(
            CACHE,
            "Type that keys and values are kept in; auto is dtype, or float16 beside weights that are computed packed. "
            "8 bits have a scale for each token and head, or in fp8 (fp8_e4m3) and fp8_e5m2 a checkpoint's own",
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool, Option(CACHE, "Take an fp8 cache's scales from what is written even where the checkpoint has some")
    ] = False
    gpu_memory_utilization: Annotated[
        float,
        Option(
            CACHE,
            "Share of the memory to use, whatever others have taken: of a GPU's, or of the machine's or container's",
            minimum=0.01,
            maximum=1.0,
        ),
    ] = 0.9
    cpu_offload_gb: Annotated[
        float,
        Option(
            MODEL,
            "On a GPU, how much of its weights to keep in the host's memory; whole layers, copied to the GPU ahead of "
            "their use in every step, so each step takes at least as long as the copies",
            "GiB",
            minimum=0.0,
        ),
    ] = 0.0
    enable_sleep_mode: Annotated[
        bool,
        Option(CACHE, "Allow LLM.sleep to give the engine's memory back; over HTTP (/sleep) with server_dev_mode"),
    ] = False
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(
            CACHE,
            "Exact size of the cache; overrides the share",
            "bytes",
            minimum=1,
            default_text="from the share of memory; on a CPU at most 4 GiB",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        Option(
            CACHE,
            "Exact number of blocks, one of which stays empty; overrides both",
            "blocks",
            minimum=2,
            default_text="from the size of the cache",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Option(CACHE, "Reuse blocks of equal prompt beginnings")] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxhash", "builtin"],
        Option(CACHE, "What names a block; builtin is Python's hash and differs between processes"),
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
        Option(
            SCHEDULER, "Longest queue; a request beyond it is rejected with a time to come back", "requests", minimum=1
        ),
    ] = 100_000
    max_client_requests: Annotated[
        int,
        Option(
            SCHEDULER,
            "Most unfinished requests of a client, as a process of the HTTP server; others get a time to come back",
            "requests",
            minimum=1,
        ),
    ] = 100_000
    max_client_inbox_mb: Annotated[
        float,
        Option(
            SCHEDULER,
            "Most that one client's messages may take on their way to the scheduler; further requests are rejected",
            "MB",
            minimum=0.001,
        ),
    ] = 256.0
    max_client_unread_messages: Annotated[
        int,
        Option(
            SCHEDULER,
            "Most messages, one for each step that brought a client something, that wait for one client to read them; "
            "one that leaves more unread is dismissed, and its requests end with the cause",
            "messages",
            minimum=1,
        ),
    ] = 100_000
    max_client_unread_mb: Annotated[
        float,
        Option(
            SCHEDULER,
            "How much of that may wait, counting messages of 4 KiB and more; a single one may be larger",
            "MB",
            minimum=0.001,
        ),
    ] = 1024.0
    enable_chunked_prefill: Annotated[
        bool, Option(SCHEDULER, "Compute long prompts in pieces between other requests' tokens")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Option(SCHEDULER, "Order of waiting requests: of arrival, or by priority first")
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
            "Guess tokens ahead and check them together; the output is the same. method ngram takes what followed the "
            "last prompt_lookup_min to prompt_lookup_max tokens earlier in the request, at most num_speculative_tokens "
            'at once, such as {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, '
            '"prompt_lookup_min": 2}; with more than disable_by_batch_size requests nothing is guessed',
            short="-sc",
        ),
    ] = {}
    structured_outputs_config: Annotated[
        dict[str, Any],
        Option(
            SCHEDULER,
            "How the grammars of structured outputs are followed: backend (auto, which takes llguidance, or the extra "
            "xgrammar; one that is named is made ready at the start), disable_fallback, disable_any_whitespace, "
            "disable_additional_properties, enable_in_reasoning, and reasoning_parser, the format of reasoning after "
            "which grammars begin, and which a thinking_token_budget ends (a server's own reasoning_parser comes "
            "first)",
        ),
    ] = {}
    reasoning_config: Annotated[
        dict[str, Any],
        Option(
            SCHEDULER,
            "How reasoning is set off: reasoning_parser as above, reasoning_start_str in the place of the format's own "
            "start, and reasoning_end_str, forced when a thinking_token_budget is spent: the format's end, after words "
            "that lead to it",
        ),
    ] = {}
    stream_interval: Annotated[
        int,
        Option(SCHEDULER, "Tokens of an output that are sent together; its first is sent at once", "tokens", minimum=1),
    ] = 1
    logits_processors: Annotated[
        tuple[str, ...],
        Option(
            MODEL,
            "module:Class of logits processors, besides those that installed packages register under "
            "headrace.logits_processors or vllm.logits_processors; see docs/server.md",
        ),
    ] = ()
    scheduler_cls: Annotated[
        str,
        Option(
            SCHEDULER,
            "module:Class, or a plugin's name, of a class derived from headrace.core.schedule.scheduler.Scheduler",
            default_text="that one",
        ),
    ] = ""

    tensor_parallel_size: Annotated[
        int,
        Option(
            PARALLEL, "Worker processes that share every layer's weights among them", "ranks", minimum=1, short="-tp"
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Option(PARALLEL, "Groups of workers, each with a run of the layers", "stages", minimum=1, short="-pp")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Option(
            PARALLEL,
            "Engines that serve as one on this machine, whose cores and memory they divide: each has all of the model, "
            "and a request of one that dies goes on at another",
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
            "Which of them an engine-core is that is started by itself: 0 to data_parallel_size - 1",
            minimum=0,
            short="-dpn",
        ),
    ] = 0
    data_parallel_size_local: Annotated[
        int | None,
        Option(PARALLEL, "How many of them this machine has", "engines", minimum=0, default_text="all", short="-dpl"),
    ] = None
    coordinator: Annotated[
        tuple[str, ...],
        Option(
            PARALLEL,
            "Addresses of coordinators (`headrace coordinator`). An engine-core announces itself to each; `headrace "
            "serve` and LLM use the engines that they tell of, instead of starting one",
            "addresses",
        ),
    ] = ()
    pipeline_layer_partition: Annotated[
        tuple[int, ...],
        Option(
            PARALLEL,
            "How many layers each pipeline stage has, first stage first, as in 14,16",
            "layers",
            minimum=1,
            default_text="as even as can be",
        ),
    ] = ()
    enable_expert_parallel: Annotated[
        bool,
        Option(
            PARALLEL,
            "Divide the experts of a mixture whole: among the tensor-parallel ranks, instead of "
            "each expert's rows; with data_parallel_size on a CPU among the ranks of all engines, which then compute "
            "every step together and fail together",
            short="-ep",
        ),
    ] = False
    expert_placement_strategy: Annotated[
        Literal["linear", "round_robin"],
        Option(
            PARALLEL,
            "Which whole experts a rank has: linear, a run of neighbours, or round_robin, each rank one in turn, which "
            "spreads groups of experts that are chosen together",
        ),
    ] = "linear"
    enable_eplb: Annotated[
        bool,
        Option(
            PARALLEL,
            "Count what each expert computes, and move experts between the ranks of an engine so that all have as much "
            "to do, on CPUs; with enable_expert_parallel",
        ),
    ] = False
    eplb_config: Annotated[
        dict[str, Any],
        Option(
            PARALLEL,
            "How enable_eplb does it: every step_interval (3000) steps, by the loads of the last window_size (1000); "
            "num_redundant_experts (0) of each layer's experts have copies, which take memory and divide the tokens of "
            "the busiest; log_balancedness (false) logs each log_balancedness_interval (1) steps how even loads were",
        ),
    ] = {}
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        Option(
            PARALLEL,
            "What starts the engines: mp as processes of this machine; ray where the Ray of RAY_ADDRESS or this host "
            "(else a new one) places them and coordinators that tell of them, again and elsewhere when they die",
            short="-dpb",
        ),
    ] = "mp"
    data_parallel_meeting: Annotated[
        str,
        Option(
            PARALLEL,
            "Name by which engines of this machine that share experts find each other, the same for all that are "
            "started one by one",
            default_text="a new one, of engines that are started together",
        ),
    ] = ""
    disable_custom_all_reduce: Annotated[
        bool,
        Option(
            PARALLEL,
            "On GPUs, leave even small sums over the tensor-parallel ranks to NCCL, where they would go through memory "
            "of each other's GPUs",
        ),
    ] = False
    distributed_executor_backend: Annotated[
        str,
        Option(
            PARALLEL,
            "What runs the model: uni (the engine core's own process), mp (a worker process for each rank), "
            "ray (the same, placed by Ray), external_launcher (the caller is one of several ranks that torchrun "
            "started, all with the same requests), or module:Class or a plugin's name of an Executor",
            default_text="auto: mp where there is more than one rank, else uni",
        ),
    ] = "auto"
    worker_cls: Annotated[
        str,
        Option(
            PARALLEL,
            "What each worker of mp runs: module:Class of a Rank, made with the options and place=, its rank",
            default_text="auto: what uni runs",
        ),
    ] = "auto"
    step_timeout: Annotated[
        float,
        Option(
            PARALLEL,
            "How long the workers of mp may take for one step; after that the one that hangs is named and the engine "
            "ends",
            "seconds",
            minimum=0.1,
        ),
    ] = 300.0
    max_parallel_loading_workers: Annotated[
        int | None,
        Option(
            PARALLEL,
            "Most workers of a host that read weights at once, which bounds what that takes of memory and disk",
            "workers",
            minimum=1,
            default_text="all of them",
        ),
    ] = None
    nnodes: Annotated[
        int,
        Option(
            PARALLEL,
            "Hosts that share the ranks evenly. The one with node_rank 0 serves; start engine-core with the same "
            "options on the others, in any order",
            "nodes",
            minimum=1,
            short="-n",
        ),
    ] = 1
    node_rank: Annotated[int, Option(PARALLEL, "Which of the hosts this is", minimum=0, short="-r")] = 0
    master_addr: Annotated[str, Option(PARALLEL, "Address of the host with node_rank 0, as the others reach it")] = (
        "127.0.0.1"
    )
    master_port: Annotated[int, Option(PARALLEL, "Port on which it waits for the others", minimum=0, maximum=65535)] = (
        29501
    )
    node_join_timeout: Annotated[
        float, Option(PARALLEL, "How long the hosts wait for each other at the start", "seconds", minimum=0.1)
    ] = 300.0

    startup_timeout: Annotated[
        float,
        Option(
            PROCESS,
            "How long the engine may take to start, a model's download included; after that what hangs is named and "
            "the start has failed: workers at once, an engine-core by itself 5 s later",
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
            "How long engine and client may hear nothing of each other, as where one is stopped or swapped out, until "
            "the other takes it for dead",
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
            "extension may take; after that it is answered as failed and the engine serves on. One that takes longer "
            "to go to sleep ends, and so does, 5 s after twice as long, one of which a worker process does not answer "
            "a command at all",
            "seconds",
            minimum=0.1,
        ),
    ] = 1800.0
    worker_extension_cls: Annotated[
        str,
        Option(
            PROCESS,
            "module:Class whose instances live in each worker, made with its rank or with nothing; LLM.collective_rpc "
            "calls their methods, and LLM.call_extension their handle(payload: dict) -> dict",
        ),
    ] = ""
    profiler_config: Annotated[
        dict[str, Any],
        Option(PROCESS, 'Where start_profile writes, such as {"torch_profiler_dir": "/tmp/profiles"}'),
    ] = {}
    disable_log_stats: Annotated[bool, Option(PROCESS, "Do not log load and throughput every 10 s")] = False

    @property
    def num_engines_here(self) -> int:
        """Engines of data_parallel_size that this machine has."""
        local = self.data_parallel_size_local
        return self.data_parallel_size if local is None else local

    @property
    def shares_experts(self) -> bool:
        """Whether engine cores divide experts among them: those of several ranks do if they have a name to meet at."""
        meets = self.tensor_parallel_size * self.pipeline_parallel_size == 1 or bool(self.data_parallel_meeting)
        return self.enable_expert_parallel and self.data_parallel_size > 1 and meets
