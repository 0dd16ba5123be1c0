"""What a model's folder and the options say about its tasks: whether it generates, and how it pools."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.options.engine_options import Options
from headrace.core.options.pooler_config import PoolerConfig, pooler_config_of
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.sentence_folder import SentenceFolder, sentence_folder
from headrace.executor.models.families import causal_architecture
from headrace.executor.pooling.pooler import TOKEN_POOLINGS
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import Pooling


@dataclass(frozen=True)
class Tasks:
    """What requests may ask a model for."""

    generates: bool = True
    pooling: Pooling | None = None
    max_tokens: int | None = None
    """Most tokens of a prompt by the folder's own files; None: as many as the model takes."""


GENERATES = Tasks()


def tasks_of(checkpoint: Checkpoint, options: Options, width: int) -> Tasks:
    """width: that of the model's last hidden states. Raises ModelError and OptionError for what is not computed here.

    runner=auto pools if the folder has sentence-transformers' files or its config names a model without a head, or with
    convert=embed. runner=generate with convert=embed does both.
    """
    config, folder = pooler_config_of(options.pooler_config), None
    if options.runner != "generate":
        folder = sentence_folder(checkpoint.config_folder or checkpoint.path)
    headless = causal_architecture(checkpoint.config) is not None
    pools = options.runner == "pooling" or (
        options.runner == "auto" and (folder is not None or headless or options.convert == "embed")
    )
    if not pools and options.convert != "embed":
        if options.pooler_config:
            raise OptionError("pooler_config is of models that pool: add runner=pooling, or leave it out")
        return GENERATES
    if options.convert == "none" and folder is None and not headless:
        raise OptionError(
            f"convert=none leaves {checkpoint.name} as it is, a model that generates, and runner={options.runner} asks "
            "for one that pools: use convert=embed, or leave it out"
        )
    if folder is not None and folder.width not in (None, width):
        raise ModelError(
            f"the folder's Pooling module makes vectors of {folder.width} values, and the model of {width}"
        )
    return Tasks(
        generates=not pools,
        pooling=_pooling(checkpoint, config, folder, width, pools=pools),
        max_tokens=None if folder is None else folder.max_tokens,
    )


def _pooling(
    checkpoint: Checkpoint, config: PoolerConfig, folder: SentenceFolder | None, width: int, *, pools: bool
) -> Pooling:
    """pools: nothing is generated beside it."""
    tokens = config.tokens or (folder.tokens if folder is not None else "LAST")
    if tokens not in TOKEN_POOLINGS:
        where = "pooler_config" if config.tokens else "the model's folder"
        raise ModelError(
            f"{where} asks for pooling type {tokens}, which is not computed here yet; known: "
            f"{', '.join(TOKEN_POOLINGS)}"
        )
    reads_all = TOKEN_POOLINGS[tokens].reads_all
    if reads_all and not pools:
        raise OptionError(
            f"pooling type {tokens} reads all tokens of a prompt, beside which nothing is generated: add runner=pooling"
        )
    if config.task not in (None, "embed"):
        raise OptionError(f"pooler_config.task is {config.task}, which is not supported yet; embed is")
    activate = config.use_activation
    if activate is None:
        activate = folder is None or folder.normalizes
    dimensions = _dimensions(checkpoint)
    if config.dimensions is not None:
        _check_dimensions(config.dimensions, width, dimensions)
    return Pooling(
        kinds=("embed",),
        tokens=tokens,
        width=width,
        dimensions=dimensions,
        default_dimensions=config.dimensions,
        activate=activate,
        reads_all=reads_all,
        lower_case=folder is not None and folder.lower_case,
    )


def _dimensions(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The model's own statement, under vLLM's names (they may be given as hf_overrides)."""
    listed = checkpoint.config.get("matryoshka_dimensions")
    if listed:
        return tuple(listed)
    return () if checkpoint.config.get("is_matryoshka") else None


def _check_dimensions(asked: int, width: int, dimensions: tuple[int, ...] | None) -> None:
    if dimensions is None:
        raise OptionError(
            f"pooler_config.dimensions is {asked}, and the model's config says nothing of is_matryoshka or "
            'matryoshka_dimensions; hf_overrides={"is_matryoshka": true} says it'
        )
    if asked > width or (dimensions and asked not in dimensions):
        allowed = ", ".join(map(str, dimensions)) or f"1 to {width}"
        raise OptionError(f"pooler_config.dimensions is {asked}; this model's are {allowed}")
