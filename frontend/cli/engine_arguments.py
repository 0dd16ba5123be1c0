"""Arguments shared by commands that generate text: sampling flags, and the engine to start or attach to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from headrace.core.options.option import Option
from headrace.core.options.parsing import (
    add_options,
    flag,
    given_options,
    options_from_arguments,
    struct_from_arguments,
)
from headrace.ipc.failure import InvalidRequestError, OptionError

if TYPE_CHECKING:
    from headrace.frontend.api.llm import LLM
    from headrace.frontend.cli.remote import RemoteLLM
    from headrace.frontend.request.parameters.sampling_params import SamplingParams

SAMPLING = "Sampling"


class OutputFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags for an output's end and its seed; `sampling_flags` adds those that derive from SamplingParams."""

    max_tokens: Annotated[
        int | None,
        Option(SAMPLING, "Maximum number of tokens to generate", "tokens", default_text="as many as fit max_model_len"),
    ] = None
    min_tokens: Annotated[
        int | None, Option(SAMPLING, "Minimum number of tokens to generate", "tokens", default_text="0")
    ] = None
    sampling_seed: Annotated[
        int | None,
        Option(
            SAMPLING, "Random seed, which makes the output reproducible", default_text="drawn from the engine's seed"
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...], Option(SAMPLING, "String that stops the generation; repeatable", repeated=True)
    ] = ()
    ignore_eos: Annotated[bool, Option(SAMPLING, "Continue generating after an end-of-sequence token")] = False


def sampling_flags() -> type[OutputFlags]:
    """The struct of sampling flags. One that is not given means the model's default; SamplingParams checks ranges."""
    from headrace.frontend.request.parameters.sampling_fields import flag_fields
    from headrace.frontend.request.parameters.sampling_params import FIELDS

    fields = flag_fields(FIELDS, OutputFlags.__struct_fields__)
    flags = msgspec.defstruct("SamplingFlags", fields, bases=(OutputFlags,), frozen=True, kw_only=True)
    return cast(type[OutputFlags], flags)


def add_engine_arguments(parser: argparse.ArgumentParser, *, positional_model: bool = True) -> None:
    """Adds the sampling flags, `--engine` and every engine option. positional_model: MODEL may be given without
    `--model`."""
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="Attach to the engine-core at this address instead of starting one"
    )
    add_options(parser, sampling_flags())
    add_options(parser, positional_model=positional_model, folded=True)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--url` and `--api-key`, for commands that call `open_engine_or_server`."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help="Use the server at this URL instead of starting an engine, such as http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key for --url (default: the environment's HEADRACE_API_KEY)"
    )


def open_engine_or_server(arguments: argparse.Namespace) -> LLM | RemoteLLM:
    """The server or engine that the arguments name. Raises OptionError for options that contradict each other."""
    if arguments.url is None:
        if arguments.api_key is not None:
            raise OptionError("--api-key is for a server: give its --url")
        return open_engine(arguments)
    options_from_arguments(arguments)  # which refuses what no engine here has
    given = [*given_options(arguments).values(), *(["--engine"] if arguments.engine is not None else [])]
    if given:
        raise OptionError(f"--url attaches to a server that has its options; leave out {', '.join(given)}")
    from headrace.frontend.cli.remote import RemoteLLM

    return RemoteLLM(arguments.url, arguments.api_key)


def open_engine(arguments: argparse.Namespace) -> LLM:
    """The engine that the arguments name. Raises OptionError for options that contradict each other."""
    from headrace.frontend.api.llm import LLM, connect

    options = options_from_arguments(arguments)
    if arguments.engine is None:
        chosen = {name: getattr(options, name) for name in options.__struct_fields__}
        return LLM(chosen.pop("model") or None, **chosen)  # without --model the name is empty
    if given := given_options(arguments):
        raise OptionError(f"--engine attaches to an engine that has its options; leave out {', '.join(given.values())}")
    return connect(arguments.engine)


def check_sampling(arguments: argparse.Namespace) -> None:
    """Checks the sampling flags before an engine is started. Raises OptionError, which names the flag."""
    from headrace.frontend.request.parameters.sampling_params import SamplingParams

    try:
        sampling_params(arguments, SamplingParams())
    except InvalidRequestError as error:
        raise as_flag_error(error) from None


def check_text(name: str, text: str | None) -> None:
    """Raises OptionError for text from a command line or stdin that was not valid UTF-8."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name} is not valid UTF-8") from None


def as_flag_error(error: InvalidRequestError) -> OptionError:
    """An error of SamplingParams in terms of the flag that the value came from."""
    name, _, rest = str(error).replace("SamplingParams.", "").partition(" = ")
    return OptionError(f"{flag('sampling_seed' if name == 'seed' else name)}={rest}")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The model's defaults, changed by the given flags. Raises InvalidRequestError for a value out of range."""
    flags = struct_from_arguments(arguments, sampling_flags())
    params = defaults.clone()
    params.max_tokens = flags.max_tokens
    for name in flags.__struct_fields__:
        if name in ("max_tokens", "sampling_seed", "stop"):
            continue
        value = getattr(flags, name)
        if value is not None:
            setattr(params, name, value)
    params.seed = flags.sampling_seed
    params.stop = list(flags.stop) or None
    params.verify()
    return params
