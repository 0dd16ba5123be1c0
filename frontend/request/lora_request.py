"""`LoRARequest`, by which a script names an adapter, under vLLM's name and with its fields."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.frontend.request.lists import one_for_each
from headrace.frontend.request.parameters.sampling_fields import plain_integer
from headrace.ipc.adapters import MOST_NAME, AdapterUse
from headrace.ipc.failure import InvalidRequestError


class LoRARequest(msgspec.Struct, eq=False):
    """A LoRA adapter: its name, a number of the script's own, and the folder or file that has it.

    As in vLLM, two are equal if their names are. An engine tells adapters apart by what is in them, not by these
    fields: the same name with another path is another adapter.
    """

    lora_name: str
    lora_int_id: int
    """At least 1: `remove_lora`, `pin_lora` and `list_loras` know the adapter by it."""
    lora_path: str = ""
    """On the engine's host. Empty: the engine has an adapter of this name already."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Read the path again although the name is loaded, once for each object: running requests keep what they have."""
    is_3d_lora_weight: bool = False
    """The matrices of experts are stacked, as peft writes those of fused experts."""
    tensorizer_config_dict: None = None
    lora_local_path: str | None = None
    """vLLM's former name of lora_path."""
    long_lora_max_len: None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise _bad("lora_name", self.lora_name, "must be a text that is not empty")
        number = plain_integer(self.lora_int_id)
        if number is None:
            raise _bad("lora_int_id", self.lora_int_id, "must be an integer, of at least 1")
        if number < 1:
            raise _bad("lora_int_id", number, "id must be > 0")  # vLLM's words
        self.lora_int_id = number
        if self.lora_local_path:
            self.lora_path, self.lora_local_path = self.lora_local_path, None
        if not isinstance(self.lora_path, str | os.PathLike):
            raise _bad("lora_path", self.lora_path, "must be the path of a folder or file")
        self.lora_path = os.fsdecode(self.lora_path)
        for name in ("lora_name", "lora_path"):
            if (length := len(getattr(self, name))) > MOST_NAME:
                raise _bad(name, getattr(self, name), f"has {length} characters, and at most {MOST_NAME} are taken")
        for name in ("load_inplace", "is_3d_lora_weight"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be True or False")
        if not isinstance(self.base_model_name, str | None):
            raise _bad("base_model_name", self.base_model_name, "must be a text, or None")
        for name in ("tensorizer_config_dict", "long_lora_max_len"):
            if getattr(self, name) is not None:
                raise _bad(name, getattr(self, name), "is not supported; leave it out")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def use(self) -> AdapterUse:
        """What an engine is asked for."""
        return AdapterUse(name=self.lora_name, path=absolute(self.lora_path), is_3d=self.is_3d_lora_weight)


def absolute(path: str) -> str:
    """A path as an engine in another folder reads it; the name of a repository, which is none here, as it is."""
    found = os.path.expanduser(path)
    return os.path.abspath(found) if path and os.path.exists(found) else path


def lora_requests_for(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """One LoRARequest, or None, for each of `count` prompts. Raises InvalidRequestError."""
    return one_for_each(given, LoRARequest, "lora_request", count, may_be_none=True)


def _bad(name: str, value: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"LoRARequest.{name} = {value!r:.100}: {why}")
