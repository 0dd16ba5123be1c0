"""Programs as in a container, by `unshare`: namespaces of their own, without a container's image."""

from __future__ import annotations

import shutil
import subprocess

import pytest

IN_CONTAINER = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a program as process 1 of a PID namespace."""


def _works() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_CONTAINER, "true"], capture_output=True, check=False).returncode == 0


needs_containers = pytest.mark.skipif(not _works(), reason="unshare may make no user and PID namespaces here")
