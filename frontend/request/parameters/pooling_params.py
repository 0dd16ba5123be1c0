"""`PoolingParams`: how a prompt's hidden states become vectors, under vLLM's field names and defaults."""

from __future__ import annotations

import copy
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.frontend.request.parameters.sampling_fields import ParamsStruct, plain_integer
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, UnknownFieldError, nearest
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Pool, Pooling, PoolKind

RETIRED = ("normalize", "softmax", "activation")
"""Former names of use_activation."""
KINDS: tuple[str, ...] = typing.get_args(PoolKind)
REFUSED_TASKS = {
    "score": "`score` task was removed; use `classify` instead.",
    "encode": "`encode` task was removed; use `token_embed` or `token_classify` instead.",
    "plugin": "No IOProcessor plugin installed: there are none here; name one of the model's tasks.",
}
MOST_OF_TEXTS = ("max_tokens_per_query", "max_tokens_per_doc")
NOT_SUPPORTED = {
    "late_interaction_params": "LLM.score and POST /score compare tokens' vectors by themselves",
}


class _ReadsRetiredNames(type(msgspec.Struct)):  # type: ignore[misc]
    """Takes former names of fields, and refuses an unknown name with a suggestion."""

    if not TYPE_CHECKING:  # type checkers derive the constructor from the fields

        def __call__(cls, *args: Any, **given: Any) -> Any:
            for name in RETIRED:
                value = given.pop(name, None)
                if value is not None and given.setdefault("use_activation", value) != value:
                    raise InvalidRequestError(f"PoolingParams: {name} is the former name of use_activation; give one")
            unknown = [name for name in given if name not in cls.__struct_fields__]
            if unknown:
                near = nearest(unknown[0], list(cls.__struct_fields__))
                raise UnknownFieldError(f"PoolingParams has no field {unknown[0]!r}{near}")
            return super().__call__(*args, **given)


class PoolingParams(ParamsStruct, metaclass=_ReadsRetiredNames, omit_defaults=True):
    """None means the model's own setting."""

    use_activation: bool | None = None
    """Whether an embedding is scaled to length 1. Its former names normalize, softmax and activation are taken too."""
    dimensions: int | None = None
    """To how many of its first values an embedding is cut, before it is scaled."""
    step_tag_id: int | None = None
    """Of token_classify: only the values of this token are returned, with which a step of reasoning ends."""
    returned_token_ids: list[int] | None = None
    """Of token_classify: which of each token's values are returned."""
    task: str | None = None
    """Set by the method that is called. Several, joined by `&`, are computed at once."""
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt; its blocks are still cached for other requests."""
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    """Of LLM.score: max_tokens_per_query and max_tokens_per_doc, the most tokens of each first and second text."""
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt to keep; -1 means max_model_len."""
    prompt_name: str | None = None
    """Name of a text of the model's folder that is put before a prompt that is a text; None: the folder's default.
    Models whose tokens are compared (ColBERT) have "query" and "document", which is the default."""

    _task: Pool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if self._task is not None:
            raise AttributeError(f"PoolingParams.{name}: these parameters belong to a request that was checked")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self.verify()

    def clone(self) -> PoolingParams:
        twin = copy.deepcopy(self)
        msgspec.structs.force_setattr(twin, "_task", None)
        return twin

    def freeze(self, pooling: Pooling, model: str) -> PoolingParams:
        """Itself, whose fields can no longer be set, with its `checked_task` for engines of this model. Raises
        InvalidRequestError for what the model cannot do."""
        msgspec.structs.force_setattr(self, "_task", self.to_wire(pooling, model))
        return self

    @property
    def checked_task(self) -> Pool | None:
        """What an engine is asked for; None unless they are frozen."""
        return self._task

    @property
    def n(self) -> int:
        """The number of outputs, which a router counts with."""
        return 1

    def verify(self, model_config: Any = None) -> None:
        """Raises InvalidRequestError, naming the field, for a value of the wrong type or range, and for what is not
        supported."""
        if self.task in REFUSED_TASKS:
            raise InvalidRequestError(REFUSED_TASKS[self.task])
        kinds = () if self.task is None else tuple(str(self.task).split("&"))
        if not set(kinds) <= set(KINDS) or len(set(kinds)) < len(kinds):
            raise InvalidRequestError(
                f"PoolingParams.task is {self.task!r:.100}; known: {', '.join(KINDS)}, or several of them joined by &"
            )
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidRequestError(f"For pooling output_kind has to be FINAL_ONLY, got {self.output_kind!r}")
        for name in ("use_activation", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InvalidRequestError(f"PoolingParams.{name} must be true or false, not {value!r:.100}")
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1), ("step_tag_id", 0)):
            value = getattr(self, name)
            plain = None if value is None else plain_integer(value)
            if value is not None and (plain is None or not least <= plain < 2**31):
                raise InvalidRequestError(
                    f"PoolingParams.{name} must be an integer of at least {least}, not {value!r:.100}"
                )
            if plain is not value:
                setattr(self, name, plain)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise InvalidRequestError(f"PoolingParams.prompt_name must be a text, not {self.prompt_name!r:.100}")
        if (ids := self.returned_token_ids) is not None:
            numbers = [plain_integer(each) for each in ids] if isinstance(ids, list) else [None]
            if not numbers or not all(each is not None and 0 <= each < 2**31 for each in numbers):
                raise InvalidRequestError(
                    f"PoolingParams.returned_token_ids must be a list of integers of at least 0, not {ids!r:.100}"
                )
        self.most_of_texts()
        for name, why in NOT_SUPPORTED.items():
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"PoolingParams.{name} is not supported by this version: {why}; leave it out")

    def most_of_texts(self) -> tuple[int, int]:
        """The most tokens of the first and of the second text of a pair; 0: all. Raises InvalidRequestError."""
        if (given := self.extra_kwargs) is None:
            return 0, 0
        if not isinstance(given, dict) or not given.keys() <= set(MOST_OF_TEXTS):
            raise InvalidRequestError(
                f"PoolingParams.extra_kwargs takes {' and '.join(MOST_OF_TEXTS)}, not {given!r:.100}"
            )
        values = [0 if (value := given.get(name)) is None else plain_integer(value) for name in MOST_OF_TEXTS]
        for name, value in zip(MOST_OF_TEXTS, values, strict=True):
            if value is None or value < 0:
                raise InvalidRequestError(f"{name} must be a non-negative integer, not {given[name]!r:.100}")
        first, second = values
        return first or 0, second or 0

    def to_wire(self, pooling: Pooling, model: str) -> Pool:
        """The task for an engine of this model. Raises InvalidRequestError for what the model cannot do."""
        if any(self.most_of_texts()):
            raise InvalidRequestError(f"PoolingParams.extra_kwargs: {' and '.join(MOST_OF_TEXTS)} are of LLM.score")
        kinds: tuple[Any, ...] = tuple((self.task or pooling.kinds[0]).split("&"))
        for kind in kinds:
            if kind in pooling.kinds:
                continue
            group, name = ("Embedding", "embed") if "embed" in kind else ("Classification", "classify")
            raise InvalidRequestError(  # vLLM's sentences, which programs look for
                f"Unsupported task: {kind!r} Supported tasks: {', '.join(pooling.kinds)}. {group} API is not supported "
                f"by this model. Try converting the model using `--convert {name}`."
            )
        if self.dimensions is not None and not {"embed", "token_embed"} & set(kinds):
            raise InvalidRequestError(
                f"PoolingParams.dimensions cuts embeddings, and the task is {self.task or kinds[0]}; leave it out"
            )
        if self.dimensions is not None:
            self._check_dimensions(self.dimensions, pooling, model)
        steps, columns = self._steps(kinds, pooling)
        return Pool(
            kinds=kinds,
            dimensions=self.dimensions if self.dimensions is not None else pooling.default_dimensions,
            activate=pooling.activate if self.use_activation is None else self.use_activation,
            skip_reading_prefix_cache=bool(self.skip_reading_prefix_cache),
            steps_end_at=steps,
            columns=columns,
        )

    def _steps(self, kinds: tuple[str, ...], pooling: Pooling) -> tuple[int | None, tuple[int, ...]]:
        """Of process rewards: the token at which steps end, and the values that are returned. Raises
        InvalidRequestError."""
        given = [name for name in ("step_tag_id", "returned_token_ids") if getattr(self, name) is not None]
        if kinds != ("token_classify",):
            if given:
                raise InvalidRequestError(
                    f"PoolingParams.{given[0]} is of process rewards (token_classify), and the task is "
                    f"{self.task or kinds[0]}; leave it out"
                )
            return None, ()
        columns = pooling.returned_token_ids if self.returned_token_ids is None else tuple(self.returned_token_ids)
        width = pooling.width_of("token_classify")
        if (outside := next((each for each in columns if each >= width), None)) is not None:
            raise InvalidRequestError(
                f"PoolingParams.returned_token_ids has {outside}; each token has {width} values, 0 to {width - 1}"
            )
        return pooling.step_tag_id if self.step_tag_id is None else self.step_tag_id, columns

    @staticmethod
    def _check_dimensions(asked: int, pooling: Pooling, model: str) -> None:
        if pooling.dimensions is None:
            raise InvalidRequestError(
                f"Model {model!r} does not support Matryoshka embeddings; dimensions must be unset (received "
                f"dimensions={asked}). If it was trained for them, start the engine with "
                'hf_overrides={"is_matryoshka": true}'
            )
        if not asked <= pooling.width:
            raise InvalidRequestError(
                f"Model {model!r} only supports dimensions in range [1, {pooling.width}], got {asked}."
            )
        if pooling.dimensions and asked not in pooling.dimensions:
            raise InvalidRequestError(
                f"Model {model!r} only supports Matryoshka dimensions {list(pooling.dimensions)}, got {asked}."
            )
