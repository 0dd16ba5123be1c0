"""Workers of a helper program end with it, whenever it ends."""

from __future__ import annotations

import os

import pytest

from headrace.ipc.process.child import die_with_parent


@pytest.mark.parametrize("parent_ended_first", [False, True])
def test_a_child_whose_parent_ended_before_it_could_ask_to_end_with_it_ends(parent_ended_first: bool) -> None:
    """As when a helper is killed right after it has forked a worker: nothing else would tell the worker."""
    parent = os.getppid() if parent_ended_first else os.getpid()  # not the child's own parent, or it
    if (child := os.fork()) == 0:
        die_with_parent(parent)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(parent_ended_first)
