"""The server's options, declared as the engine's are in core/options/engine_options.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from headrace.core.options.option import Option, Secret
from headrace.core.options.values import option_specs, read_options
from headrace.frontend.fleet.options import ENGINES, HEARTBEAT_TIMEOUT_S, HeartbeatTimeout
from headrace.frontend.fleet.start import default_restarts
from headrace.frontend.http.server.hidden_metrics import hidden_names
from headrace.frontend.text.chat_template import ContentFormat
from headrace.frontend.tracing.options import check_traces
from headrace.ipc.failure import OptionError
from headrace.ipc.process.log import CONFIG_VARIABLE, FORMAT_VARIABLE, LEVEL_VARIABLE

ADDRESS, SECURITY, LIMITS, CHAT, ADAPTERS, STORED, OBSERVED = (
    "Server address",
    "Server security",
    "Server limits",
    "Server chat",
    "Server adapters",
    "Server storage",
    "Server metrics and logs",
)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `headrace serve`, besides the engine's."""

    host: Annotated[
        str | None,
        Option(
            ADDRESS,
            "Interface to listen on; 0.0.0.0 is all of them, as a container needs it, and * those of IPv6 too",
            default_text="the environment's HEADRACE_HOST, else its VLLM_HOST_IP, else 127.0.0.1",
        ),
    ] = None
    port: Annotated[int, Option(ADDRESS, "Port to listen on; 0 takes a free one", minimum=0, maximum=65535)] = 8000
    uds: Annotated[str | None, Option(ADDRESS, "Listen on a Unix socket at this path instead")] = None
    root_path: Annotated[str, Option(ADDRESS, "Path that a reverse proxy puts before every route")] = ""
    api_server_count: Annotated[
        int,
        Option(
            ADDRESS,
            "HTTP processes that share the port and the engines",
            "processes",
            minimum=1,
            maximum=256,
            short="-asc",
        ),
    ] = 1

    data_parallel_start_rank: Annotated[
        int, Option(ENGINES, "Rank of the first data parallel engine that this host starts", minimum=0, short="-dpr")
    ] = 0
    data_parallel_address: Annotated[
        str,
        Option(
            ENGINES,
            "With engines on several hosts: address at which the other hosts reach the one that "
            "serves HTTP. A coordinator listens there on data_parallel_rpc_port",
            "host",
            default_text="127.0.0.1",
            short="-dpa",
        ),
    ] = ""
    data_parallel_rpc_port: Annotated[
        int, Option(ENGINES, "Port of the coordinator at data_parallel_address", minimum=1, maximum=65535, short="-dpp")
    ] = 29550
    data_parallel_hybrid_lb: Annotated[
        bool,
        Option(
            ENGINES,
            "Hybrid load balancing: each host serves HTTP for its own data_parallel_size_local "
            "engines, from data_parallel_start_rank on, and an external load balancer distributes "
            "requests among the hosts",
            short="-dph",
        ),
    ] = False
    data_parallel_external_lb: Annotated[
        bool,
        Option(
            ENGINES,
            "External load balancing: serve HTTP for the one engine of data_parallel_rank; setting "
            "data_parallel_rank implies it",
            short="-dpe",
        ),
    ] = False
    headless: Annotated[
        bool,
        Option(
            ENGINES,
            "Start data_parallel_size_local engines, from data_parallel_start_rank on, for the host at "
            "data_parallel_address, and serve no HTTP",
        ),
    ] = False
    engine: Annotated[
        tuple[str, ...],
        Option(ENGINES, "Addresses of running engine-cores to attach to, instead of starting one; repeatable"),
    ] = ()
    keys: Annotated[
        str | None,
        Option(
            ENGINES,
            "Key file (see `headrace keys`) for engines at tcp:// addresses",
            "file",
            default_text="HEADRACE_KEYS",
        ),
    ] = None
    insecure: Annotated[
        bool,
        Option(ENGINES, "Use engines of other hosts without keys: connections are neither encrypted nor authenticated"),
    ] = False
    restart_engine: Annotated[
        int | None,
        Option(
            ENGINES,
            "How often an engine that has died is restarted; the count begins anew after a minute of "
            "service. Requests that no other engine can take wait for it",
            "times",
            minimum=0,
            default_text="10 with data_parallel_size above 1; else 0, and the server exits with the cause",
        ),
    ] = None
    max_migrations: Annotated[
        int,
        Option(
            ENGINES,
            "How often in a row, without a new token in between, a request whose engine died "
            "continues on another engine, or on the restarted one, with the same tokens that it "
            "would have had; 0: never",
            "times",
            minimum=0,
        ),
    ] = 3
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT_S
    progress_timeout: Annotated[
        float,
        Option(
            ENGINES,
            "Time without a new token, while an engine has requests, after which /health/progress answers 503",
            "seconds",
            minimum=0.1,
        ),
    ] = 60.0

    api_key: Annotated[
        tuple[Secret, ...],
        Option(
            SECURITY,
            "API keys, of which clients need one for every route but health, /metrics and /version; repeatable",
            default_text="the environment's HEADRACE_API_KEY, else its VLLM_API_KEY",
        ),
    ] = ()
    admin_api_key: Annotated[
        tuple[Secret, ...],
        Option(
            SECURITY,
            "Keys for the routes that act on all clients of the server: /scale_elastic_ep and those of "
            "server_dev_mode; repeatable. They open the other routes too. Without one, these routes answer 403 if "
            "there are API keys, and otherwise callers on the same machine",
            default_text="the environment's HEADRACE_ADMIN_API_KEY",
        ),
    ] = ()
    admin_api_key_file: Annotated[str | None, Option(SECURITY, "File with admin keys, one per line")] = None
    guard_metrics: Annotated[bool, Option(SECURITY, "Require an API key for /metrics and /version too")] = False
    api_key_file: Annotated[str | None, Option(SECURITY, "File with API keys, one per line")] = None
    ssl_keyfile: Annotated[str | None, Option(SECURITY, "Private key of ssl_certfile, in PEM")] = None
    ssl_certfile: Annotated[
        str | None, Option(SECURITY, "The server's certificate, in PEM; with it, the server speaks HTTPS")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Option(SECURITY, "CA certificates in PEM, by which client certificates must be signed")
    ] = None
    ssl_cert_reqs: Annotated[
        int, Option(SECURITY, "Client certificates: 0 none, 1 optional, 2 required", minimum=0, maximum=2)
    ] = 0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            SECURITY,
            "Host names that a server without API keys answers to, besides localhost, IP addresses "
            "and --host; *.NAME allows all names below NAME, * all. Protects against DNS rebinding "
            "by web pages",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Option(SECURITY, "Web origins whose pages may call the server (CORS); * is all")
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Option(SECURITY, "HTTP methods that pages of allowed_origins may use (CORS)")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Option(SECURITY, "Headers that pages of allowed_origins may send (CORS)")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Option(SECURITY, "Allow pages of allowed_origins to send credentials (CORS)")
    ] = False

    max_body_bytes: Annotated[int, Option(LIMITS, "Largest request body", "bytes", minimum=1)] = 8 << 20
    max_prompts: Annotated[int, Option(LIMITS, "Maximum number of prompts in one request", "prompts", minimum=1)] = 2048
    max_n: Annotated[int, Option(LIMITS, "Maximum n, the number of outputs for one prompt", "outputs", minimum=1)] = 128
    max_stop_strings: Annotated[
        int, Option(LIMITS, "Maximum number of stop strings in one request", "strings", minimum=0)
    ] = 64
    request_timeout: Annotated[
        float, Option(LIMITS, "Time limit of one request; 0 is no limit", "seconds", minimum=0)
    ] = 0.0
    read_timeout: Annotated[
        float,
        Option(
            LIMITS,
            "Time limit for receiving a request's headers, for receiving its body, and for a client "
            "that does not read its response",
            "seconds",
            minimum=0.1,
        ),
    ] = 30.0
    timeout_keep_alive: Annotated[
        int, Option(LIMITS, "How long an idle connection is kept for the next request", "seconds", minimum=1)
    ] = 60
    sse_keep_alive: Annotated[
        float,
        Option(
            LIMITS, "Time without an event after which a comment is sent to keep a stream open", "seconds", minimum=1
        ),
    ] = 15.0

    strict_requests: Annotated[
        bool,
        Option(
            LIMITS,
            "Refuse request fields that are unknown or have no effect; by default they are ignored, "
            "as vLLM and OpenAI do",
        ),
    ] = False

    chat_template: Annotated[
        str | None, Option(CHAT, "Chat template, or path of a file with one", default_text="the model's own")
    ] = None
    chat_template_content_format: Annotated[
        ContentFormat,
        Option(
            CHAT,
            "Format in which the chat template receives a message's content: string (text), openai "
            "(a list of parts), or auto (as the request has it, if the template supports that)",
        ),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, Option(CHAT, "Accept chat templates in requests; they run in a sandbox")
    ] = False
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Option(
            CHAT,
            'Default variables for the chat template as a JSON object, such as {"enable_thinking": '
            "false}; chat_template_kwargs of a request override them",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Option(
            CHAT,
            "Format of the model's tool calls: a name such as hermes, the path of a YAML file that "
            "declares one, auto (detected by the chat template), or none (calls stay text)",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str | None,
        Option(
            CHAT,
            "Format of the model's reasoning, given as for tool_call_parser",
            default_text="none: reasoning stays part of the content",
        ),
    ] = None
    tool_parser_plugin: Annotated[
        str | None,
        Option(
            CHAT,
            "YAML file that declares a tool call format, which tool_call_parser can name by the "
            "file's name and auto detects by its template_marks. Python files, as vLLM takes them, "
            "are refused",
            "file",
        ),
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None,
        Option(
            CHAT,
            "YAML file that declares a reasoning format, which reasoning_parser can name by the file's name",
            "file",
        ),
    ] = None
    tool_server: Annotated[
        tuple[str, ...],
        Option(
            CHAT,
            "MCP servers whose tools /v1/responses may call: LABEL=URL, URL, or HOST:PORT for "
            "http://HOST:PORT/mcp; separated by commas, or repeated. Needs the package mcp",
            "server",
        ),
    ] = ()
    enable_auto_tool_choice: Annotated[
        bool, Option(CHAT, "Parse tool calls of requests with tools and tool_choice auto")
    ] = True
    tool_strict_level: Annotated[
        Literal["auto", "parameter"],
        Option(
            CHAT,
            "Which tool calls with tool_choice auto are constrained to their tools' schemas, if the "
            "format of calls is known: auto (of tools with strict: true), parameter (of all tools)",
        ),
    ] = "auto"
    response_role: Annotated[str, Option(CHAT, "Role of the messages in chat completions")] = "assistant"

    return_tokens_as_token_ids: Annotated[
        bool, Option(CHAT, "Write tokens in log-probabilities as token_id:ID, unless a request sets it otherwise")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Option(
            CHAT, "Include usage in every event of every stream and at its end, whatever stream_options a request has"
        ),
    ] = False
    enable_per_request_metrics: Annotated[
        bool,
        Option(
            CHAT,
            "Return the times of a request with one output, as `metrics` of the response or of the event with usage",
        ),
    ] = False

    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Option(CHAT, "Serve GET /tokenizer_info, with the special tokens and the chat template (lm-eval reads it)"),
    ] = False

    lora_modules: Annotated[
        tuple[str, ...],
        Option(
            ADAPTERS,
            'LoRA adapters to load at the start: NAME=PATH, or JSON {"name": ..., "path": ..., "base_model_name": ..., '
            '"is_3d_lora_weight": ...}, separated by spaces. Clients name one as their model. Needs enable_lora',
            "adapter",
        ),
    ] = ()
    allow_runtime_lora_updating: Annotated[
        bool | None,
        Option(
            ADAPTERS,
            "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, which affect all clients: see admin_api_key",
            default_text="the environment's HEADRACE_ALLOW_RUNTIME_LORA_UPDATING, else "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING; server_dev_mode serves them too",
        ),
    ] = None
    lora_resolver_cache_dir: Annotated[
        str | None,
        Option(
            ADAPTERS,
            "Folder with LoRA adapters, each in a folder of its name, which are loaded when a request first asks for "
            "them",
            "folder",
            default_text="the environment's HEADRACE_LORA_RESOLVER_CACHE_DIR, else VLLM_LORA_RESOLVER_CACHE_DIR",
        ),
    ] = None
    lora_resolver_hf_repo_list: Annotated[
        str | None,
        Option(
            ADAPTERS,
            "Repositories of the Hugging Face hub, separated by commas, whose LoRA adapters are fetched when a request "
            "first asks for one, as OWNER/REPOSITORY or OWNER/REPOSITORY/FOLDER",
            default_text="the environment's HEADRACE_LORA_RESOLVER_HF_REPO_LIST, else VLLM_LORA_RESOLVER_HF_REPO_LIST",
        ),
    ] = None

    response_store: Annotated[
        str | None,
        Option(
            STORED,
            "SQLite file in which /v1/responses stores responses, so that they survive a restart",
            default_text="memory; with several HTTP processes, a temporary file",
        ),
    ] = None
    response_store_bytes: Annotated[
        int,
        Option(
            STORED,
            "Maximum size of all stored responses, divided equally among the API keys; the least "
            "recently used are deleted first. 0 stores nothing",
            "bytes",
            minimum=0,
        ),
    ] = 64 << 20

    file_store: Annotated[
        str | None,
        Option(
            STORED,
            "Folder in which /v1/files and /v1/batches store files and batches, so that they survive a restart",
            "folder",
            default_text="a temporary folder",
        ),
    ] = None
    file_store_bytes: Annotated[
        int,
        Option(
            STORED,
            "Maximum size of all files, divided equally among the API keys; uploads beyond it are "
            "refused. 0 accepts none",
            "bytes",
            minimum=0,
        ),
    ] = 1 << 30

    ui: Annotated[
        bool,
        Option(OBSERVED, "Serve a page at / with a chat and a live view of the engines; with API keys it asks for one"),
    ] = True
    open: Annotated[bool, Option(OBSERVED, "Show the page in this machine's browser once the server is ready")] = False
    server_dev_mode: Annotated[
        bool,
        Option(
            OBSERVED,
            "Serve vLLM's development routes, such as /pause and /resume, which affect all clients: see admin_api_key",
            default_text="the environment's HEADRACE_SERVER_DEV_MODE=1",
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            OBSERVED,
            "OpenTelemetry collector to which a trace of each request goes, such as http://HOST:4317 by gRPC or, with "
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, http://HOST:4318/v1/traces. Needs the extra otel",
            default_text="no traces",
        ),
    ] = None
    collect_detailed_traces: Annotated[
        str | None,
        Option(
            OBSERVED,
            "Spans of each step in a request's trace: model has the forward passes, worker how long a step took from "
            "its plan to its result, all has both and the planning; several with commas between them. Costs time at "
            "each step of a traced request. Needs otlp_traces_endpoint",
            default_text="none",
        ),
    ] = None
    metrics_prefix: Annotated[
        str, Option(OBSERVED, "Prefix of the metrics' names; vllm suits dashboards made for vLLM")
    ] = "headrace"
    show_hidden_metrics_for_version: Annotated[
        str | None,
        Option(
            OBSERVED,
            "Add the former names of metrics that this version of vLLM still had, for older dashboards: 0.10 has "
            "gpu_cache_usage_perc, gpu_prefix_cache_queries, gpu_prefix_cache_hits and, as 0.11, "
            "time_per_output_token_seconds",
            default_text="none",
        ),
    ] = None
    enable_log_requests: Annotated[
        bool,
        Option(
            OBSERVED,
            "Log a line for each request that ends: its id, client, model, tokens and duration; for probes (health, "
            "metrics, version) only at the level debug",
        ),
    ] = False
    enable_request_id_headers: Annotated[
        bool, Option(OBSERVED, "Return the request's id in the header X-Request-Id")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        Option(
            OBSERVED,
            "Log level of the server and the engine",
            default_text="the environment's HEADRACE_LOG_LEVEL, else info for the server and warning for its engine",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"] | None,
        Option(
            OBSERVED,
            "Log format of the server and the engine: text, or a JSON object per line",
            default_text="the environment's HEADRACE_LOG_FORMAT, else text",
        ),
    ] = None
    log_config_file: Annotated[
        str | None,
        Option(
            OBSERVED,
            "JSON file with a configuration for Python's logging.config.dictConfig, in the place of log_level and "
            "log_format, for server and engine; as it may name any class, it must be your own",
            "file",
            default_text="the environment's HEADRACE_LOG_CONFIG, else its VLLM_LOGGING_CONFIG_PATH, else none",
        ),
    ] = None
    log_stats_interval: Annotated[
        float | None,
        Option(
            OBSERVED,
            "Interval at which each engine's throughput, requests, cache usage and hit rate are "
            "logged (see disable_log_stats)",
            "seconds",
            minimum=0.1,
            default_text="the environment's HEADRACE_LOG_STATS_INTERVAL, else 10",
        ),
    ] = None

    def num_restarts(self, num_engines: int) -> int:
        """How often each of the server's own engines is restarted. num_engines: how many there are."""
        return default_restarts(num_engines) if self.restart_engine is None else self.restart_engine


LOOPBACK = "127.0.0.1"
LOG_STATS_EVERY_S = 10.0
_VARIABLES = {
    "host": "HEADRACE_HOST",
    "log_level": LEVEL_VARIABLE,
    "log_format": FORMAT_VARIABLE,
    "log_config_file": CONFIG_VARIABLE,
    "log_stats_interval": "HEADRACE_LOG_STATS_INTERVAL",
    "allow_runtime_lora_updating": "HEADRACE_ALLOW_RUNTIME_LORA_UPDATING",
    "lora_resolver_cache_dir": "HEADRACE_LORA_RESOLVER_CACHE_DIR",
    "lora_resolver_hf_repo_list": "HEADRACE_LORA_RESOLVER_HF_REPO_LIST",
}


def with_environment(options: ServeOptions, environment: Mapping[str, str]) -> ServeOptions:
    """The options, with environment variables in the place of those that are not given. Raises OptionError."""
    named = {name: variable for name, variable in _VARIABLES.items() if getattr(options, name) is None}
    given = {name: environment[variable] for name, variable in named.items() if environment.get(variable)}
    given = {name: text.lower() if name in ("log_level", "log_format") else text for name, text in given.items()}
    found, _ = read_options(ServeOptions, given, lambda name: _VARIABLES[name])
    return msgspec.structs.replace(options, **{name: getattr(found, name) for name in given})


_WITHOUT_HTTP = ("log_level", "log_format", "log_config_file")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\s]+")
_HOST = re.compile(r"\*|(\*?\.)?[^\s/:@*\[\]?#]+|\[?[0-9a-fA-F:.]+\]?")
_OF_ROUTER = ("max_migrations", "heartbeat_timeout", "progress_timeout")


def _given_of_http(options: ServeOptions) -> list[str]:
    """Names of the options of HTTP serving that differ from their defaults."""
    return [
        name
        for name, spec in option_specs(ServeOptions).items()
        if (spec.option.group != ENGINES and name not in _WITHOUT_HTTP) or name in _OF_ROUTER
        if getattr(options, name) != spec.default
    ]


def check_serve_options(options: ServeOptions) -> None:
    """Raises OptionError for options that contradict each other."""
    if options.uds is not None and options.api_server_count > 1:
        raise OptionError(
            "a Unix socket belongs to one process: use --host and --port with --api-server-count, or one process"
        )
    if options.headless and (given := _given_of_http(options)):
        raise OptionError(f"headless serves no HTTP: leave {', '.join(given)} out")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise OptionError("ssl_keyfile is the key of a certificate: give ssl_certfile too")
    if (options.ssl_ca_certs is not None or options.ssl_cert_reqs) and options.ssl_certfile is None:
        raise OptionError("ssl_ca_certs and ssl_cert_reqs are for HTTPS: give ssl_certfile too")
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        raise OptionError("ssl_cert_reqs asks clients for certificates: name those that sign them with ssl_ca_certs")
    if options.engine and options.restart_engine:
        raise OptionError(
            "restart_engine: engines given by --engine are not restarted by this server; leave one of the two out"
        )
    for origin in options.allowed_origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise OptionError(
                f"allowed_origins has {origin!r:.200}, which no page's origin equals: give * for all, or "
                "SCHEME://HOST[:PORT] as browsers send it, such as https://app.example"
            )
    for host in options.allowed_hosts:
        if not _HOST.fullmatch(host):
            raise OptionError(
                f"allowed_hosts has {host!r:.200}, which is no name: give * for all, NAME or *.NAME, without a scheme, "
                "a port or a path"
            )
    if options.root_path and not options.root_path.startswith("/"):
        raise OptionError(f"root_path={options.root_path}: it must begin with /")
    if options.open and (not options.ui or options.uds is not None):
        raise OptionError("open shows the page at /: leave out " + ("uds" if options.ui else "no-ui"))
    check_traces(options.otlp_traces_endpoint, options.collect_detailed_traces)
    if not options.metrics_prefix.isidentifier():
        raise OptionError(f"metrics_prefix={options.metrics_prefix}: use letters, digits and _")
    hidden_names(options.show_hidden_metrics_for_version)
