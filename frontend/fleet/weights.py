"""Weights that are read again: of several engines all get them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from headrace.frontend.client.client import CoreClient
from headrace.ipc.control import ReloadWeights
from headrace.ipc.failure import HeadraceError, let_interrupts_pass


async def reload_weights(clients: Mapping[str, CoreClient], path: str) -> None:
    """Has every engine use the weights of `path`, once all have read them. Raises HeadraceError: if one cannot read
    them, all keep the old ones; if one is lost later, with which ones serve which.

    clients: by the engine's name."""
    if len(clients) == 1:
        (only,) = clients.values()
        await only.control(ReloadWeights(path=path), None)
        return

    async def everywhere(part: Literal["prepare", "use", "forget"]) -> dict[str, BaseException]:
        command = ReloadWeights(path=path, part=part)
        answers = await asyncio.gather(
            *(client.control(command, None) for client in clients.values()), return_exceptions=True
        )
        found = {name: each for name, each in zip(clients, answers, strict=True) if isinstance(each, BaseException)}
        for each in found.values():
            let_interrupts_pass(each)
        return found

    try:
        problems = await everywhere("prepare")
    except asyncio.CancelledError:
        await everywhere("forget")
        raise
    if problems:
        await everywhere("forget")
        why = "; ".join(f"{name}: {_line(each)}" for name, each in problems.items())
        raise HeadraceError(
            f"reload_weights: {len(problems)} of {len(clients)} engines cannot use them, so all keep the old ones: "
            f"{why}"
        )
    if problems := await everywhere("use"):
        why = "; ".join(f"{name}: {_line(each)}" for name, each in problems.items())
        others = ", ".join(name for name in clients if name not in problems)
        raise HeadraceError(
            f"reload_weights: the engines serve different weights now, until it is called again: {others or 'none'} "
            f"the new ones, and not these: {why}"
        )


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
