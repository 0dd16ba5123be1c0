"""`LoRAResolver`: finds an adapter that no one has loaded, by the name that a request asks for.

A server asks its resolvers, one after another, for a `model` that it does not know; vLLM's classes have the same names
and methods. A package brings its own as an entry point of the group `headrace.lora_resolvers` (a class without
arguments to its constructor, or an object), or registers it in a plug-in.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from headrace.frontend.request.lora_request import LoRARequest
from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.plugins import load_plugin, lora_resolver_entries

logger = logging.getLogger(__name__)


class LoRAResolver(ABC):
    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of this name for this model; None if the resolver has none. Its lora_int_id is not read."""


class _LoRAResolverRegistry:
    def __init__(self) -> None:
        self.resolvers: dict[str, LoRAResolver] = {}

    def get_supported_resolvers(self) -> set[str]:
        return set(self.resolvers)

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Adds a resolver, in the place of one of the same name if there is one."""
        if resolver_name in self.resolvers:
            logger.warning("the LoRA resolver %s is registered again, and replaces the former one", resolver_name)
        self.resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """Raises KeyError."""
        if resolver_name not in self.resolvers:
            known = ", ".join(self.resolvers) or "none"
            raise KeyError(f"LoRA resolver '{resolver_name}' not found. Available resolvers: {known}")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _LoRAResolverRegistry()
"""The resolvers of this process. A server asks them after those of its options."""


def installed_resolvers() -> Mapping[str, LoRAResolver]:
    """Those of installed packages, by name. Raises OptionError for one that cannot be loaded."""
    found: dict[str, LoRAResolver] = {}
    for entry in lora_resolver_entries():
        loaded = load_plugin(entry)
        try:
            made = loaded() if isinstance(loaded, type) else loaded
        except BaseException as error:
            let_interrupts_pass(error)
            raise OptionError(f"the plugin {entry.name} ({entry.value}) cannot be made: {error!r}") from error
        if not callable(getattr(made, "resolve_lora", None)):
            raise OptionError(
                f"the plugin {entry.name} ({entry.value}) is a {type(made).__name__} without resolve_lora; a "
                "LoRAResolver is expected"
            )
        found[entry.name] = made
    return found
