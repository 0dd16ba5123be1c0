"""Secret options: what needs them reads them, and nothing that people see shows them."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.options.document import options_page
from headrace.core.options.engine_options import Options
from headrace.core.options.option import HIDDEN, Secret
from headrace.core.options.parsing import OptionParser, add_options, parse_options, read_config, struct_from_arguments
from headrace.core.options.values import option_specs, plain_options, shown_options, with_secrets
from headrace.frontend.bench.options import TargetOptions
from headrace.frontend.bench.results.record import given
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError

WORD = "hf_DoNotTell"
STRUCTS = (Options, ServeOptions, TargetOptions)
SECRETS = [(struct, name) for struct in STRUCTS for name, spec in option_specs(struct).items() if spec.is_secret]


def parser_of(struct: type[msgspec.Struct]) -> OptionParser:
    parser = OptionParser(prog="mill")
    if struct is not TargetOptions:  # which is of a program without an engine
        add_options(parser, positional_model=True)
    if struct is not Options:
        add_options(parser, struct)
    return parser


def model_of(struct: type[msgspec.Struct]) -> list[str]:
    return [] if struct is TargetOptions else ["some/model"]


def test_tokens_keys_and_headers_are_the_secret_options() -> None:
    assert [name for _, name in SECRETS] == ["hf_token", "api_key", "admin_api_key", "header"]


@pytest.mark.parametrize(("struct", "name"), SECRETS)
def test_nothing_that_is_printed_or_kept_shows_a_secret(struct: Any, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    options = struct_from_arguments(parser_of(struct).parse_args([*model_of(struct), flag, WORD]), struct)
    value = getattr(options, name)
    assert WORD in json.dumps(plain_options(options)), "what another process is told has it"
    log = io.StringIO()
    logging.getLogger("mill").addHandler(handler := logging.StreamHandler(log))
    logging.getLogger("mill").warning("%s %r %s", options, value, [value])
    logging.getLogger("mill").removeHandler(handler)
    shown = [log.getvalue(), str(options), repr(options), f"{value} {value!r}", json.dumps(shown_options(options))]
    shown.append(json.dumps(given(options)))
    if isinstance(value, Secret):
        shown += [f"{value:>20}", str(list(value.__rich_repr__()))]
    assert all(HIDDEN in text and WORD not in text for text in shown), shown


@pytest.mark.parametrize(("struct", "name"), SECRETS)
def test_no_error_shows_a_secret(struct: Any, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flag = f"--{name.replace('_', '-')}"
    parser, model = parser_of(struct), model_of(struct)
    said = []
    for arguments in ([flag, WORD, *model], [*model, flag, WORD, "--unknown"], [flag, WORD, "--port", "x", *model]):
        try:
            struct_from_arguments(parser.parse_args(arguments), struct)
        except SystemExit:
            said.append(capsys.readouterr().err)
        except OptionError as error:
            said.append(str(error))
    file = tmp_path / "mill.yaml"
    for text in (f"{name}: {{{WORD}: 1}}\n", f"{name}: [{WORD}\nport: [", f"{name}: {WORD}\n{name}: {WORD}\n"):
        file.write_text(text)
        with pytest.raises(OptionError) as caught:
            read_config(file, struct)
        said.append(str(caught.value))
    with pytest.raises(OptionError) as caught:
        parse_options(hf_token={WORD: 1}, block_size=0)
    said.append(str(caught.value))
    assert len(said) >= 5
    assert not [text for text in said if WORD in text]


def test_a_secret_is_given_in_every_way_and_true_is_the_logins(tmp_path: Path) -> None:
    file = tmp_path / "mill.yaml"
    file.write_text(f"hf-token: {WORD}\n")
    parser = parser_of(Options)
    for arguments in (["--hf-token", WORD], [f"--hf_token={WORD}"], ["--config", str(file)]):
        assert struct_from_arguments(parser.parse_args(arguments), Options).hf_token == Secret(WORD)
    assert parse_options(hf_token=WORD).hf_token == Secret(WORD)
    assert parse_options(hf_token=True).hf_token is None
    assert struct_from_arguments(parser.parse_args(["some/model", "--hf-token"]), Options).hf_token is None
    with pytest.raises(OptionError, match=r"hf_token=\(hidden\): it must be text, not int"):
        parse_options(hf_token=7)


def test_another_process_reads_the_secrets_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_options(hf_token=WORD, max_model_len=64)
    assert parse_options(**plain_options(options)) == options
    bare = with_secrets(options, None)
    assert bare == parse_options(max_model_len=64)
    assert with_secrets(bare, options) == options


def test_help_and_page_name_where_a_token_comes_from_and_show_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WORD)
    text = parser_of(Options).help_on("hf-token")
    assert "--hf-token" in text
    assert "SECRET" in text
    assert "HF_TOKEN" in text
    assert WORD not in text + options_page()
