"""Paths that are not served: routes of vLLM, OpenAI and their like are answered by name, with what there is instead.

As 404, which OpenAI's client raises as NotFoundError; it would try a 501 again.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping

from headrace.frontend.api.unsupported import ONLY_GENERATION
from headrace.frontend.http.development import DEVELOPMENT_ROUTES
from headrace.frontend.http.errors import ApiError, shortened

_TEXT = "/v1/chat/completions and /v1/completions generate text"
_GENERATION = f"{ONLY_GENERATION}; {_TEXT}"
_TEXT_ONLY = f"models read and write text alone; {_TEXT}"
_ADAPTERS = "LoRA adapters are not supported yet: merge one into the model's weights, and serve that"
_NOTHING_STORED = "this server stores nothing"
_RENDER = "POST /tokenize gives the tokens of a prompt, or of a conversation as the template renders it"
_FIXED = "an engine's number of ranks is what it was started with"

_LONGEST_PATH = 200

REASONS: Mapping[str, str] = types.MappingProxyType(
    {
        "/v1/responses": "the Responses API is not supported yet; /v1/chat/completions answers conversations",
        "/v1/messages": "Anthropic's API is not spoken here; /v1/chat/completions answers conversations",
        "/v1/realtime": _TEXT_ONLY,
        "/v1/audio": _TEXT_ONLY,
        "/v1/images": _TEXT_ONLY,
        "/v1/videos": _TEXT_ONLY,
        **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/classify"), _GENERATION),
        **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _GENERATION),
        **dict.fromkeys(("/v1/moderations", "/v1/fine_tuning"), _GENERATION),
        **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
        **dict.fromkeys(("/v1/files", "/v1/batches"), f"{_NOTHING_STORED}; `headrace run-batch` runs a batch file"),
        **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/conversations"), _NOTHING_STORED),
        **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), _RENDER),
        **dict.fromkeys(("/inference/v1/generate", "/generate", "/generate_stream"), _TEXT),
        "/collective_rpc": "an engine calls no method by name; /docs lists what it can be told",
        **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _FIXED),
        "/api": "Ollama's API is not spoken here; /v1/chat/completions answers conversations",
    }
)
_DEVELOPMENT = frozenset(route.path for route in DEVELOPMENT_ROUTES)


def not_found(path: str, served: Iterable[str]) -> ApiError:
    """`served` are the paths of this server's routes."""
    path = shortened(path, _LONGEST_PATH)
    return ApiError(404, f"there is no {path} here{_why(path, tuple(served))}", code="not_found")


def _why(path: str, served: tuple[str, ...]) -> str:
    plain = "/" + path.strip("/")
    for known, reason in REASONS.items():
        if plain == known or plain.startswith(known + "/"):
            return f": {reason}"
    if plain in _DEVELOPMENT:
        return ": it is one of the development routes, which --server-dev-mode serves"
    # Clients put their paths after a base address that should end in /v1, and does so never or twice.
    bare = plain
    while bare.startswith("/v1/"):
        bare = bare.removeprefix("/v1")
    meant = next((each for each in (f"/v1{bare}", bare) if each in served), None)
    if meant is not None:
        base = " The base address of OpenAI's clients ends in /v1." if meant.startswith("/v1") else ""
        return f"; did you mean {meant}?{base}"
    close = difflib.get_close_matches(plain, served, n=1)
    return f"; did you mean {close[0]}?" if close else "; GET /docs lists what there is"
