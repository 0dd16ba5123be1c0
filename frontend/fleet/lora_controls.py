"""vLLM's methods for LoRA adapters, which know one by the number of its LoRARequest."""

from __future__ import annotations

from headrace.frontend.client.control import blocking
from headrace.frontend.fleet.adapters import FleetAdapters, is_unknown
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.parameters.sampling_fields import plain_integer
from headrace.ipc.failure import HeadraceError, InvalidRequestError


class AsyncLoRAControls:
    """A part of EnginePool and AsyncLLM."""

    async def _fleet_adapters(self) -> FleetAdapters:
        raise NotImplementedError

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter on all engines, or reloads it if its load_inplace says so. Returns whether it is new.

        Raises HeadraceError with the cause, and changes nothing, if it cannot be loaded.
        """
        if not isinstance(lora_request, LoRARequest):
            raise InvalidRequestError(f"lora_request must be a LoRARequest, not {type(lora_request).__name__}")
        return await (await self._fleet_adapters()).add(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; requests that run with it finish. Returns whether there was one of this number."""
        adapters = await self._fleet_adapters()
        name = await adapters.find(_number(lora_id))
        if name is None:
            return False
        try:
            await adapters.unload(name)
        except HeadraceError as error:
            if not is_unknown(error):
                raise
            return False
        return True

    async def list_loras(self) -> set[int]:
        """The numbers of all adapters. One that no LoRARequest of this process named gets a free number."""
        return await (await self._fleet_adapters()).numbers()

    async def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in memory until it is removed. Raises InvalidRequestError if there is none of this number,
        and HeadraceError if too many are pinned."""
        adapters = await self._fleet_adapters()
        name = await adapters.find(_number(lora_id))
        if name is None:
            raise InvalidRequestError(f"Pinning failed. LoRA {lora_id} is not registered.")
        await adapters.pin(name)
        return True


def _number(lora_id: object) -> int:
    if (number := plain_integer(lora_id)) is None:
        raise InvalidRequestError(f"lora_id must be the number of a LoRARequest, not {lora_id!r:.100}")
    return number


class LoRAControls:
    """A part of LLM: the methods of AsyncLoRAControls, which return once the engines have replied."""

    add_lora = blocking(AsyncLoRAControls.add_lora)
    remove_lora = blocking(AsyncLoRAControls.remove_lora)
    list_loras = blocking(AsyncLoRAControls.list_loras)
    pin_lora = blocking(AsyncLoRAControls.pin_lora)
