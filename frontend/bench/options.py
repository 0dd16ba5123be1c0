"""The options of `headrace bench`, declared as the engine's options are. Names are those of `vllm bench`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec

from headrace.core.options.option import Option, Secret
from headrace.frontend.request.parameters.sampling_fields import flag_fields
from headrace.frontend.request.parameters.sampling_params import FIELDS

WORKLOAD, TARGET, TRAFFIC, SAMPLING, RESULT, RUN = (
    "Workload",
    "Server under test",
    "Traffic",
    "Sampling",
    "Result",
    "Run",
)
DatasetName = Literal[
    "random", "random-rerank", "prefix_repetition", "sharegpt", "burstgpt", "timed_trace", "custom", "mixed"
]
Backend = Literal[
    "openai",
    "vllm",
    "openai-chat",
    "openai-embeddings",
    "openai-embeddings-chat",
    "vllm-pooling",
    "infinity-embeddings",
    "vllm-rerank",
]


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests to send. The same options and seed give the same requests."""

    dataset_name: Annotated[DatasetName, Option(WORKLOAD, "Kind of requests")] = "random"
    dataset_path: Annotated[
        str | None, Option(WORKLOAD, "File of the dataset; the random ones and prefix_repetition have none")
    ] = None
    num_prompts: Annotated[int, Option(WORKLOAD, "Number of requests", "requests", minimum=1)] = 1000
    seed: Annotated[int, Option(WORKLOAD, "Random seed of prompts, lengths and arrival times")] = 0
    input_len: Annotated[
        int | None, Option(WORKLOAD, "Replaces the dataset's own option for prompt length", "tokens", minimum=1)
    ] = None
    output_len: Annotated[
        int | None, Option(WORKLOAD, "Replaces the dataset's own option for output length", "tokens", minimum=1)
    ] = None
    no_oversample: Annotated[
        bool, Option(WORKLOAD, "Do not repeat the requests of a dataset that has fewer than num_prompts")
    ] = False
    disable_shuffle: Annotated[bool, Option(WORKLOAD, "Do not shuffle the dataset's requests")] = False

    random_input_len: Annotated[int, Option(WORKLOAD, "random: prompt length", "tokens", minimum=1)] = 1024
    random_output_len: Annotated[int, Option(WORKLOAD, "random: output length", "tokens", minimum=1)] = 128
    random_prefix_len: Annotated[
        int, Option(WORKLOAD, "random: length of a prefix that all prompts share", "tokens", minimum=0)
    ] = 0
    random_range_ratio: Annotated[
        float,
        Option(
            WORKLOAD, "random: lengths vary uniformly by up to this share in both directions", minimum=0, maximum=0.99
        ),
    ] = 0.0
    random_vocab_size: Annotated[
        int, Option(WORKLOAD, "Number of token ids to draw from if no tokenizer is known", "tokens", minimum=8)
    ] = 10_000

    random_batch_size: Annotated[
        int,
        Option(
            WORKLOAD,
            "random: inputs of one request for vectors; random-rerank: documents of one query, each of the length of "
            "a prompt",
            "texts",
            minimum=1,
        ),
    ] = 1

    prefix_repetition_prefix_len: Annotated[int, Option(WORKLOAD, "Length of each prefix", "tokens", minimum=1)] = 256
    prefix_repetition_suffix_len: Annotated[
        int, Option(WORKLOAD, "Length of what follows the prefix", "tokens", minimum=1)
    ] = 256
    prefix_repetition_num_prefixes: Annotated[int, Option(WORKLOAD, "Number of prefixes", "prefixes", minimum=1)] = 10
    prefix_repetition_output_len: Annotated[int, Option(WORKLOAD, "Output length", "tokens", minimum=1)] = 128

    sharegpt_output_len: Annotated[
        int | None,
        Option(WORKLOAD, "sharegpt: output length", "tokens", minimum=1, default_text="that of the file's answer"),
    ] = None
    custom_output_len: Annotated[
        int | None,
        Option(
            WORKLOAD,
            "custom: output length; -1 is each line's output_tokens",
            "tokens",
            minimum=1,
            words={"-1": None},
            default_text="each line's output_tokens, else 256",
        ),
    ] = None
    timed_trace_chunk_hash_size: Annotated[
        int, Option(WORKLOAD, "timed_trace: tokens that one hash id stands for", "tokens", minimum=1)
    ] = 16
    timed_trace_sec_multiplier: Annotated[
        float, Option(WORKLOAD, "timed_trace, burstgpt: turns a timestamp into seconds; 0.001 for milliseconds")
    ] = 1.0
    timed_trace_label_timestamp: Annotated[str, Option(WORKLOAD, "timed_trace: field with the arrival time")] = (
        "timestamp"
    )
    timed_trace_label_input_length: Annotated[str, Option(WORKLOAD, "timed_trace: field with the prompt length")] = (
        "input_length"
    )
    timed_trace_label_output_length: Annotated[str, Option(WORKLOAD, "timed_trace: field with the output length")] = (
        "output_length"
    )
    timed_trace_label_hash_ids: Annotated[str, Option(WORKLOAD, "timed_trace: field with the hash ids")] = "hash_ids"


class TargetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server under test, and how to send requests to it."""

    backend: Annotated[
        Backend,
        Option(
            TARGET,
            "API to use: openai and vllm are /v1/completions, openai-chat is /v1/chat/completions, openai-embeddings "
            "and openai-embeddings-chat are /v1/embeddings, vllm-pooling is /pooling, infinity-embeddings is "
            "/embeddings, vllm-rerank is /v1/rerank",
        ),
    ] = "openai"
    base_url: Annotated[
        str | None,
        Option(TARGET, "URL of the server, such as http://127.0.0.1:8000", default_text="from host and port"),
    ] = None
    host: Annotated[str, Option(TARGET, "Host of the server")] = "127.0.0.1"
    port: Annotated[int, Option(TARGET, "Port of the server", minimum=1, maximum=65535)] = 8000
    endpoint: Annotated[str | None, Option(TARGET, "Path of the API", default_text="the backend's")] = None
    header: Annotated[tuple[Secret, ...], Option(TARGET, "Headers to send, as KEY=VALUE")] = ()
    insecure: Annotated[bool, Option(TARGET, "Do not check the server's certificate")] = False
    model: Annotated[str | None, Option(TARGET, "Name of the model", default_text="the server's first model")] = None
    served_model_name: Annotated[
        str | None, Option(TARGET, "Name of the model in requests, if it is another than model")
    ] = None
    lora_modules: Annotated[
        tuple[str, ...], Option(TARGET, "LoRA adapters of the server; each request uses one of them as its model")
    ] = ()
    lora_assignment: Annotated[
        Literal["random", "round-robin"], Option(TARGET, "How requests are distributed among lora_modules")
    ] = "random"
    tokenizer: Annotated[
        str | None,
        Option(
            TARGET,
            "A folder with tokenizer.json, or that file, if prompts are to be sent as text",
            default_text="none: random prompts are sent as token ids, or for openai-chat as detokenized text",
        ),
    ] = None
    request_id_prefix: Annotated[
        str | None, Option(TARGET, "Send the header X-Request-Id with this prefix and a number, from 0 on")
    ] = None
    profile: Annotated[
        bool, Option(TARGET, "Profile the server during the run (POST /start_profile and /stop_profile)")
    ] = False
    ready_check_timeout_sec: Annotated[
        float, Option(TARGET, "How long to wait until the server is ready", "seconds", minimum=0)
    ] = 0.0
    connect_timeout: Annotated[float, Option(TARGET, "Time limit of opening a connection", "seconds", minimum=0.01)] = (
        30.0
    )
    stall_timeout: Annotated[
        float,
        Option(
            TARGET, "Time without data from the server after which a request fails as stalled", "seconds", minimum=0.01
        ),
    ] = 600.0
    request_timeout: Annotated[float, Option(TARGET, "Time limit of one request", "seconds", minimum=0.01)] = 21_600.0


class TrafficOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests are sent."""

    request_rate: Annotated[float, Option(TRAFFIC, "Requests per second; inf sends all at once")] = float("inf")
    burstiness: Annotated[
        float,
        Option(
            TRAFFIC,
            "Shape of the gamma-distributed intervals: 1 is a Poisson process, less is burstier, inf is constant",
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None,
        Option(TRAFFIC, "Maximum number of concurrent requests; others wait in the client", "requests", minimum=1),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        Option(TRAFFIC, "How the request rate grows from ramp_up_start_rps to ramp_up_end_rps"),
    ] = None
    ramp_up_start_rps: Annotated[float | None, Option(TRAFFIC, "Requests per second at the start")] = None
    ramp_up_end_rps: Annotated[float | None, Option(TRAFFIC, "Requests per second at the end")] = None
    self_timed: Annotated[
        bool | None, Option(TRAFFIC, "Send requests at the dataset's own times", default_text="on for timed_trace")
    ] = None
    num_warmups: Annotated[int, Option(TRAFFIC, "Warm-up requests, which are not measured", "requests", minimum=0)] = 0
    goodput: Annotated[
        tuple[str, ...],
        Option(
            TRAFFIC,
            "Service level objectives in ms, within which a request counts as good, such as ttft:500 tpot:50 e2el:5000",
        ),
    ] = ()


SHAPING = flag_fields(FIELDS, ("max_tokens", "min_tokens"))


class BodyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request's body, besides the sampling fields in SHAPING."""

    logprobs: Annotated[int | None, Option(SAMPLING, "Number of log-probabilities per token to ask for", minimum=0)] = (
        None
    )
    ignore_eos: Annotated[bool, Option(SAMPLING, "Continue generating after an end-of-sequence token")] = False
    extra_body: Annotated[dict[str, Any], Option(SAMPLING, "Additional fields of the request body, as JSON")] = {}


SamplingOptions = cast(
    type[BodyOptions],
    msgspec.defstruct(
        "SamplingOptions", SHAPING, bases=(BodyOptions,), frozen=True, kw_only=True, forbid_unknown_fields=True
    ),
)
"""Fields of every request's body. A field that is not given is not sent, so that the server's default applies."""


class ResultOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the result is shown and saved."""

    output_json: Annotated[str | None, Option(RESULT, "Write the result to this file")] = None
    save_result: Annotated[
        bool, Option(RESULT, "Write the result to a file that is named after the benchmark and the time")
    ] = False
    result_dir: Annotated[str | None, Option(RESULT, "Folder for save_result", default_text="the current one")] = None
    result_filename: Annotated[str | None, Option(RESULT, "File name for save_result")] = None
    report: Annotated[
        Literal["html"] | None,
        Option(RESULT, "Also write the result as one self-contained page with figures and plots, beside its file"),
    ] = None
    label: Annotated[str | None, Option(RESULT, "Name of the run, which is stored in the result")] = None
    metadata: Annotated[tuple[str, ...], Option(RESULT, "KEY=VALUE pairs that are stored in the result")] = ()
    machine_probe: Annotated[
        bool, Option(RESULT, "Measure memory bandwidth and matrix rates for the result (3 s, before the run)")
    ] = True
    disable_tqdm: Annotated[bool, Option(RESULT, "Show no progress bar")] = False


class ServingResultOptions(ResultOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ResultOptions, with those for a benchmark of a server."""

    save_detailed: Annotated[bool, Option(RESULT, "Store the generated texts in the result, too")] = False
    percentile_metrics: Annotated[
        str, Option(RESULT, "Metrics with percentiles in the result, of ttft,tpot,itl,e2el")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Option(RESULT, "Which percentiles, such as 50,90,99")] = "50,90,99"


class LatencyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the batches, and how many are timed."""

    input_len: Annotated[int, Option(RUN, "Prompt length", "tokens", minimum=1)] = 32
    output_len: Annotated[int, Option(RUN, "Output length", "tokens", minimum=1)] = 128
    batch_size: Annotated[int, Option(RUN, "Requests in the batch", "requests", minimum=1)] = 8
    n: Annotated[int, Option(RUN, "Outputs of each request", "outputs", minimum=1)] = 1
    num_iters_warmup: Annotated[int, Option(RUN, "Warm-up runs, which are not measured", "runs", minimum=0)] = 10
    num_iters: Annotated[int, Option(RUN, "Measured runs", "runs", minimum=1)] = 30
    disable_detokenize: Annotated[bool, Option(RUN, "Do not detokenize the outputs")] = False


class ThroughputOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the offline throughput benchmark."""

    lora_path: Annotated[
        str | None,
        Option(
            RUN,
            "LoRA adapter of all requests; it is loaded under max_loras names, among which they are distributed. Needs "
            "enable_lora",
        ),
    ] = None
    n: Annotated[int, Option(RUN, "Outputs of each request", "outputs", minimum=1)] = 1
    num_warmups: Annotated[int, Option(RUN, "Warm-up requests, which are not measured", "requests", minimum=0)] = 0
    disable_detokenize: Annotated[bool, Option(RUN, "Do not detokenize the outputs")] = False


class StartupOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many cold and warm starts are timed."""

    num_iters_cold: Annotated[int, Option(RUN, "Cold starts: no compiled kernels are cached", "starts", minimum=0)] = 3
    num_iters_warmup: Annotated[int, Option(RUN, "Warm-up starts, which are not measured", "starts", minimum=0)] = 1
    num_iters_warm: Annotated[int, Option(RUN, "Warm starts: compiled kernels are cached", "starts", minimum=0)] = 3


class OverheadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the measurements without a model."""

    running: Annotated[tuple[str, ...], Option(RUN, "Numbers of running requests at which the core is measured")] = (
        "1",
        "32",
        "256",
    )
    num_steps: Annotated[int, Option(RUN, "Steps of the core for each of them", "steps", minimum=10)] = 1000
    num_idle_streams: Annotated[int, Option(RUN, "Open streams whose memory is measured", "streams", minimum=10)] = 500
