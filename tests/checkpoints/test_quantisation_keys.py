"""Every key of a quantisation config counts, is known not to count, or is refused by name: configs that tools write are
changed key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from quantisation_configs import CONFIGS, FUSED, Described
from quantised_checkpoints import write
from thinned import every

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.formats import Format, formats
from headrace.executor.checkpoints.formats._keys import ANY, READ, Keys, RefusedKey
from headrace.ipc.failure import HeadraceError, ModelError

Path_ = tuple[str, ...]
SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
OTHER = "something-else"
ALSO: dict[str, list[Any]] = {
    "backend": ["llm-awq"],
    "scale_format": ["e8m0"],
    "algo_config": [[{"name": "rotation", "r4": True}]],
}
"""Further values of keys of which only these have an effect."""


@cache
def described(case: str) -> Described:
    return CONFIGS[case]()


def format_of(case: str) -> type[Format]:
    return formats()[described(case)[0]["quant_method"]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each case's checkpoint, which is written once."""

    @cache
    def folder(case: str) -> Path:
        made = tmp_path_factory.mktemp("checkpoint")
        write(made, tiny_models.build("phi3" if case == FUSED else "llama", **SIZES), *described(case))
        return made

    return folder


@pytest.fixture(params=every(2, CONFIGS))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(case: str, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(case)


def outcome(folder: Path, config: Mapping[str, Any]) -> Any:
    """What the checkpoint's matrices are with this config, or the error."""
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"quantization_config": config}))
    try:
        source: Any = open_checkpoint(Options(model=str(folder))).weights()
        names = sorted(name for name in source.names() if "_proj" in name)
        assert names, "there are matrices"
        found = {name: source.packed(name) for name in names}
    except HeadraceError as error:
        return str(error)
    return [
        (name, each.floats().numpy().tobytes(), each.inputs) if each else (name, source.get(name).numpy().tobytes())
        for name, each in found.items()
    ]


def leaves(config: Mapping[str, Any], keys: Keys, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """The path and meaning of each key."""
    for name, value in config.items():
        meaning = keys.get(name, keys.get(ANY))
        if isinstance(meaning, Mapping) and isinstance(value, Mapping):
            yield from leaves(value, meaning, (*path, name))
        else:
            yield (*path, name), meaning


def value_at(config: Mapping[str, Any], path: Path_) -> Any:
    return config[path[0]] if len(path) == 1 else value_at(config[path[0]], path[1:])


def changed(config: Mapping[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else changed(config[path[0]], path[1:], value)
    return {**config, path[0]: inner}


def others(value: Any) -> list[Any]:
    """Other values than this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value - 1]
    if isinstance(value, str):
        return [OTHER]
    if isinstance(value, Mapping):
        inner = [{**value, key: each} for key, old in value.items() for each in others(old)]
        return [*inner, {OTHER: OTHER}]
    return [[OTHER], OTHER, True, 3]


@cache
def outcomes(case: str, folder: Path) -> list[tuple[Path_, Any, bool]]:
    """For each key its path and meaning, and whether another value changes the outcome. An error that names
    a key of no effect is no change."""
    config, _ = described(case)
    plain, found = outcome(folder, config), []
    assert isinstance(plain, list), plain
    for path, meaning in leaves(config, format_of(case).keys):
        values = others(value_at(config, path)) + ALSO.get(path[-1], [])
        each = (outcome(folder, changed(config, path, value)) for value in values)  # no more than tell
        same = (one == plain or (isinstance(one, str) and meaning != READ and path[-1] in one) for one in each)
        found.append((path, meaning, not all(same)))
    return found


def test_keys_that_are_declared_to_have_no_effect_have_none(case: str, folder: Path) -> None:
    for path, meaning, has_effect in outcomes(case, folder):
        assert meaning is not None, f"{path} is not declared"
        assert meaning == READ or not has_effect, f"{path} matters, although {meaning}"


@pytest.mark.parametrize("name", sorted({each.names[0] for each in formats().values()} - {"mxfp4"}))
def test_each_key_that_a_format_declares_as_read_has_an_effect_in_a_case(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    own = [case for case in CONFIGS if format_of(case).names[0] == name]
    counted = {_short(path) for case in own for path, _, has in outcomes(case, folder_of(case)) if has}
    assert set(declared_as_read(formats()[name].keys)) - counted == set()


def declared_as_read(keys: Keys, path: Path_ = ()) -> Iterator[Path_]:
    for name, meaning in keys.items():
        if isinstance(meaning, Mapping):
            yield from declared_as_read(meaning, (*path, name))
        elif meaning == READ:
            yield _short((*path, name))


def _short(path: Path_) -> Path_:
    """A key's path without the names of groups and modules."""
    return (path[0], path[-1]) if len(path) > 1 else path


def test_an_unknown_key_is_refused_by_name_at_every_depth(case: str, folder: Path) -> None:
    config, _ = described(case)
    depths = {path[:-1] for path, _ in leaves(config, format_of(case).keys)}
    for depth in depths:
        found = outcome(folder, changed(config, (*depth, "a_key_of_tomorrow"), 3))
        assert isinstance(found, str), depth
        assert "a_key_of_tomorrow" in found


def test_an_unknown_key_may_be_unset_or_left_aside(case: str, folder: Path) -> None:
    config, _ = described(case)
    plain = outcome(folder, config)
    assert outcome(folder, {**config, "a_key_of_tomorrow": None}) == plain
    outcome(folder, {**config, "a_key_of_tomorrow": 3})
    overrides = {"quantization_config": {"a_key_of_tomorrow": None}}
    with pytest.raises(ModelError, match="a_key_of_tomorrow") as caught:
        open_checkpoint(Options(model=str(folder)))
    assert json.dumps(overrides) in caught.value.hint
    assert open_checkpoint(Options(model=str(folder), hf_overrides=overrides)).quantisation is not None
    outcome(folder, config)


def test_keys_without_an_effect_have_none_whatever_their_value(case: str, folder: Path) -> None:
    config, _ = described(case)
    plain = outcome(folder, config)
    declared = {name: each for name, each in format_of(case).keys.items() if name not in config and name != ANY}
    harmless = {name: OTHER for name, each in declared.items() if isinstance(each, str) and each != READ}
    assert outcome(folder, config | harmless) == plain
    for name, each in declared.items():
        if isinstance(each, RefusedKey):
            found = outcome(folder, {**config, name: {OTHER: OTHER}})
            assert isinstance(found, str), name
            assert name in found
            assert each.reason in found
