"""Chooses what computes a model (`--model-impl`): one of Headrace's families, or transformers' code."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.hub.remote_code import with_code
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import NotNativeError, UnknownArchitectureError, spec_from_config
from headrace.executor.models.registry import class_of_plugin, registered_model
from headrace.executor.pooling.description import GENERATES, Tasks, tasks_of
from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable

logger = logging.getLogger(__name__)
HOW_TO_ADD = "docs/models.md shows how a package adds an architecture"


@dataclass(frozen=True)
class FoundModel:
    """A checkpoint and its model's architecture."""

    checkpoint: Checkpoint
    spec: ArchSpec
    config: Any = None
    """transformers' configuration object if its code computes the model, else None."""
    tasks: Tasks = GENERATES


def find_model(checkpoint: Checkpoint, options: Options) -> FoundModel:
    """The spec of the checkpoint's model: by a family, else by transformers' code, as far as `model_impl` allows each.

    Raises ModelError, naming the architecture and what was tried, if none can compute the model.
    """
    named = checkpoint.config.get("architectures") or ()
    shown = named[0] if named else checkpoint.config.get("model_type")
    why = "model_impl=transformers asks for it"
    if options.model_impl != "transformers":
        try:
            spec = spec_from_config(checkpoint.config, warns=True).for_context(options.max_model_len)
            spec = replace(spec, history_type=options.history_type, state_type=options.state_type)
            tasks = tasks_of(checkpoint, options, spec)
            if not tasks.generates:
                spec = replace(spec, has_head=False, tied_head=False, unit_head=False, head_bias=False)
            return FoundModel(checkpoint, spec, tasks=tasks)
        except (NotNativeError, UnknownArchitectureError) as error:
            if options.model_impl == "headrace":
                raise ModelError(str(error), hint=f"model_impl=auto asks transformers too; {HOW_TO_ADD}") from error
            why = error.what if isinstance(error, UnknownArchitectureError) else str(error)
    from headrace.executor.models.transformers_spec import ForeignError, foreign_spec

    try:
        config = _config_of(checkpoint, options)
        spec = foreign_spec(config, options.trust_remote_code)
        if named and not {spec.architecture, _without_head(spec.architecture)} & set(named):
            raise ForeignError(f"what transformers has for model type {config.model_type} is {spec.architecture}")
        tasks = tasks_of(checkpoint, options, spec)
        if not tasks.generates:
            spec = foreign_spec(config, options.trust_remote_code, has_head=False)
    except ForeignError as error:
        said = f"transformers cannot compute {printable(f'{shown!s:.100}')} here: {error}"
        if options.model_impl != "transformers":
            said = f"{why}, and {said}"
        raise ModelError(said, hint=HOW_TO_ADD) from error
    if options.pipeline_parallel_size > 1:
        raise ModelError(f"pipeline_parallel_size does not apply to {shown}: transformers computes it on one rank")
    logger.warning(
        "%s is computed by transformers' code with the paged cache and attention of this engine (%s): several times "
        "slower than a family of its own, without quantization, GGUF files, and ranks",
        spec.architecture,
        why,
    )
    return FoundModel(checkpoint, spec, config, tasks)


def _without_head(architecture: str) -> str:
    """The name of the model inside one that generates."""
    return architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"


def _config_of(checkpoint: Checkpoint, options: Options) -> Any:
    """transformers' configuration of the checkpoint."""
    from headrace.executor.models.transformers_spec import ForeignError

    if checkpoint.format == "gguf":
        raise ForeignError("a GGUF file is read by the families alone")
    own_code = checkpoint.config.get("auto_map")
    model_type = checkpoint.config.get("model_type")
    from transformers import CONFIG_MAPPING, AutoConfig

    if own_code and model_type not in CONFIG_MAPPING and not options.trust_remote_code:
        raise ForeignError(
            "the checkpoint brings code of its own, which may do anything that you may; trust_remote_code=True lets it "
            "run"
        )
    folder = with_code(checkpoint.config_folder or checkpoint.path, options)
    for architecture in checkpoint.config.get("architectures") or ():
        _tell_transformers(architecture, registered_model(architecture) or class_of_plugin(architecture))
    try:
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever transformers finds wrong
        raise ForeignError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}") from error
    if options.hf_overrides:
        config.update(options.hf_overrides)
    text: Any = config.get_text_config(decoder=True)
    return text


def _tell_transformers(architecture: str, model_class: Any) -> None:
    """Registers a model class with transformers' auto classes, under its config's model_type. Raises ModelError for a
    class that does not derive from transformers' PreTrainedModel and PreTrainedConfig."""
    if not _is_class_of(model_class, object):
        return
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

    registered = f"{architecture} is registered as {model_class!r}"
    if not _is_class_of(model_class, PreTrainedModel):
        raise ModelError(f"{registered}; a class derived from transformers' PreTrainedModel, or a Family, is expected")
    config_class: Any = model_class.config_class
    if not (_is_class_of(config_class, PreTrainedConfig) and config_class.model_type):
        raise ModelError(
            f"{registered}, whose config_class is {config_class!r}; a class derived from transformers' "
            "PreTrainedConfig with a model_type is expected"
        )
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def _is_class_of(found: Any, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base)


def load_foreign(found: FoundModel, checkpoint: Checkpoint, dtype: torch.dtype, options: Options) -> Any:
    """Loads, with this checkpoint's weights, a FoundModel that transformers' code computes."""
    from headrace.executor.models.transformers_model import TransformersModel

    return TransformersModel(found.spec, checkpoint, found.config, dtype, trust_remote_code=options.trust_remote_code)
