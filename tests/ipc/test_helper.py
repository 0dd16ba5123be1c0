"""Workers of a helper program end with it, whenever it ends, and it with a worker that it cannot replace."""

from __future__ import annotations

import os
import signal

import ended_halfway
import psutil
import pytest
from patience import wait_until

from headrace.ipc.process.child import die_with_parent
from headrace.ipc.process.helper import Helper, HelperEndedError


@pytest.mark.parametrize("parent_ended_first", [False, True])
def test_a_child_whose_parent_ended_before_it_could_ask_to_end_with_it_ends(parent_ended_first: bool) -> None:
    """As when a helper is killed right after it has forked a worker: nothing else would tell the worker."""
    parent = os.getppid() if parent_ended_first else os.getpid()  # not the child's own parent, or it
    if (child := os.fork()) == 0:
        die_with_parent(parent)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(parent_ended_first)


@pytest.mark.parametrize(("ended_by", "lane"), [(signal.SIGABRT, 1), (signal.SIGKILL, None)])
def test_a_worker_that_ends_of_itself_amid_its_answer_is_named(ended_by: int, lane: int | None) -> None:
    """What it worked on may be to blame, other than where somebody has killed it."""
    here = os.path.dirname(ended_halfway.__file__)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    helper = Helper("ended_halfway", ended_halfway.Message, 2, environment={"PYTHONPATH": path})
    try:
        sent = helper.send(1, ended_halfway.EndBy(ended_by), 60.0)
        program = psutil.Process(helper.pid)
        wait_until(lambda: program.status() == psutil.STATUS_ZOMBIE, 60, "the helper cannot go on")
        with pytest.raises(HelperEndedError) as raised:
            sent.receive(60.0)
        assert raised.value.lane == lane
    finally:
        helper.stop()
