"""vLLM's compilation_config and optimization_level: what sets CUDA graphs is taken, the rest is told or refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import OptionParser, add_options, options_from_arguments, parse_options
from headrace.core.options.values import shown_options
from headrace.frontend.vllm.config_objects import CUDAGraphMode
from headrace.ipc.failure import OptionError


def from_command_line(*arguments: str) -> Options:
    parser = OptionParser(prog="engine-core")
    add_options(parser, positional_model=True)
    return options_from_arguments(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"enforce_eager": True}),
        ({"compilation_config": {"cudagraph_mode": CUDAGraphMode.NONE}}, {"enforce_eager": True}),
        ({"compilation_config": {"cudagraph_mode": 0}, "enforce_eager": True}, {"enforce_eager": True}),
        ({"compilation_config": '{"use_cudagraph": false}'}, {"enforce_eager": True}),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, {}),
        ({"compilation_config": 0}, {"enforce_eager": True}),
        ({"optimization_level": 0}, {"enforce_eager": True}),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 4]}}, {"cudagraph_capture_sizes": (1, 4)}),
        ({"compilation_config": {"max_cudagraph_capture_size": 8}}, {"max_cudagraph_capture_size": 8}),
        ({"compilation_config": None, "optimization_level": 2}, {}),
    ],
    ids=str,
)
def test_what_sets_graphs_in_a_compilation_config_reaches_our_options(asked, expected) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shown_options(parse_options(**asked)) == shown_options(parse_options(**expected))


def test_the_rest_of_a_compilation_config_is_told_or_refused(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="compilation_config: mode, backend have no effect: there is no compiler"):
        assert parse_options(compilation_config={"mode": 3, "backend": "eager"}) == Options()
    with pytest.warns(FutureWarning, match="compilation_config: cudagraph_mode has no effect"):
        assert parse_options(compilation_config={"cudagraph_mode": "PIECEWISE"}) == Options()
    for wrong, said in (
        ({"cudagraph_modes": "NONE"}, "unknown key cudagraph_modes; known: cudagraph_capture_sizes, "),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode=SOME; it must be one of NONE, PIECEWISE"),
        ("fast", "it must be a JSON object, or a number of 0 to 3"),
        (7, "it must be 0 to 3"),
        ({"cudagraph_capture_sizes": ["x"]}, "cudagraph_capture_sizes="),
    ):
        with pytest.raises(OptionError, match=re.escape(said)):
            parse_options(compilation_config=wrong)
    with pytest.raises(OptionError, match="enforce_eager is given twice, as enforce_eager and as compilation_config"):
        parse_options(compilation_config={"cudagraph_mode": "NONE"}, enforce_eager=False)
    assert from_command_line("-O0").enforce_eager
    assert from_command_line("-cc", '{"cudagraph_mode": "none"}').enforce_eager
    assert from_command_line("-cc.cudagraph_capture_sizes", "[2]").cudagraph_capture_sizes == (2,)
    config = tmp_path / "options.yaml"
    config.write_text("max-model-len: 64\nenforce-eager: false\n")
    options = from_command_line("--config", str(config), "-O0")
    assert (options.max_model_len, options.enforce_eager) == (64, True)
