"""The server's API keys and admin keys: from options, files and environment variables."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headrace.core.options.option import Secret, secret_text
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError
from headrace.ipc.process.regular_files import read_text

VARIABLES = ("HEADRACE_API_KEY", "VLLM_API_KEY")
"""Environment variables of the API key, if no option gives one; the first that is set counts."""
ADMIN_VARIABLES = ("HEADRACE_ADMIN_API_KEY",)


def read_keys(options: ServeOptions) -> list[str]:
    """All API keys. Raises OptionError for an empty one, and for a file that cannot be read or holds none."""
    return _read("api_key", options.api_key, options.api_key_file, VARIABLES)


def read_admin_keys(options: ServeOptions) -> list[str]:
    """All admin keys. Raises OptionError as `read_keys` does."""
    return _read("admin_api_key", options.admin_api_key, options.admin_api_key_file, ADMIN_VARIABLES)


def _read(name: str, given: Sequence[Secret], file: str | None, variables: Sequence[str]) -> list[str]:
    """As they are meant: `secret_text`."""
    keys = [secret_text(key.value) for key in given]
    if file is not None:
        try:
            lines = read_text(file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{name}_file={file} cannot be read: {error}") from None
        in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not in_file:
            raise OptionError(f"{name}_file={file} holds no key: put one on each line")
        keys += in_file
    named = [variable for variable in variables if variable in os.environ]
    if not keys and named:
        keys = [secret_text(os.environ[named[0]])]
        if not keys[0]:
            raise OptionError(f"{named[0]} is set and empty: unset it for a server without a key, or put one in it")
    if not all(keys):
        raise OptionError(f"{name} is empty: leave it out for a server without a key, or give one")
    return keys
