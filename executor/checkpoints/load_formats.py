"""Checks that the options for loading agree (load_format, config_format and their settings), and resolves them."""

from __future__ import annotations

import msgspec

from headrace.core.options.engine_options import Options
from headrace.ipc.failure import OptionError

BY_LIBRARY = ("runai_streamer", "fastsafetensors")
"""Load formats that name a library that reads safetensors files."""
BITSANDBYTES = "bitsandbytes"
"""A load format that names a quantisation, not a kind of file: its files are ordinary ones."""


def agreeing_formats(options: Options) -> Options:
    """The options with load_format resolved to a kind of file, or auto. Raises OptionError for options that exclude
    each other."""
    if options.code_revision is not None and not options.trust_remote_code:
        raise OptionError(
            f"code_revision={options.code_revision} is of code that the model brings, which runs with "
            "trust_remote_code alone"
        )
    config, weights, settings = options.config_format, options.load_format, options.model_loader_extra_config
    if settings and weights != "tensorizer":
        raise OptionError(
            f"model_loader_extra_config has {', '.join(sorted(settings))[:200]}: load_format={weights} takes no "
            "settings here, tensorizer alone does; leave it out"
            + ("; safetensors_load_strategy says how files are read" if weights in ("auto", "safetensors") else "")
        )
    if weights == BITSANDBYTES:
        if options.quantization not in (None, BITSANDBYTES):
            raise OptionError(f"load_format={weights} and quantization={options.quantization} exclude each other")
        weights = "auto"
    if config == "mistral" and weights == "auto":
        weights = "mistral"
    if (config == "mistral" and weights not in ("mistral", "dummy")) or (config == "hf" and weights == "mistral"):
        raise OptionError(
            f"config_format={config} does not describe the weights of load_format={weights}: Mistral's own files go "
            "together, and so do Hugging Face's"
        )
    return msgspec.structs.replace(options, load_format=weights)


def library_of(options: Options) -> tuple[str, Options]:
    """(load format of the library that reads safetensors files, options with load_format safetensors), or ("", the
    options) if they name no library.

    Raises OptionError if the library is not installed, or with another safetensors_load_strategy than lazy.
    """
    asked = options.load_format
    if asked not in BY_LIBRARY:
        return "", options
    from headrace.executor.checkpoints.sources.library_readers import check_installed  # imports torch

    check_installed(asked)
    if options.safetensors_load_strategy != "lazy":
        raise OptionError(f"safetensors_load_strategy={options.safetensors_load_strategy}: {asked} reads its own way")
    return asked, msgspec.structs.replace(options, load_format="safetensors")


def options_of_another(options: Options, model: str) -> Options:
    """Options to read the weights of another model the way that the options read theirs."""
    given = options.model_loader_extra_config
    given = {**given, **given.get("tensorizer_config", {})}
    return msgspec.structs.replace(
        options,
        model=model,
        # dummy was for a model without a checkpoint; now one is named, so its weights are read.
        load_format="auto" if options.load_format == "dummy" else options.load_format,
        model_loader_extra_config={name: value for name, value in given.items() if not name.startswith("tensorizer_")},
    )
