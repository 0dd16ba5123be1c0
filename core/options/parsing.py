"""Reads options from Python keywords, the command line and the config file, all by the same declarations.

argparse collects a command line's values as text; `options_from_arguments` then reads them all as `parse_options` does,
so that one error reports every problem. The command line takes precedence over the config file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from headrace.core.options import compilation_config
from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import check_sampling_defaults
from headrace.core.options.values import OptionKind, OptionSpec, nearest, option_specs, range_text, read_options
from headrace.core.options.vllm_environment import options_from_variables
from headrace.core.options.vllm_options import is_vllm_option, renamed_options, successor, unsupported_options
from headrace.ipc.failure import OptionError
from headrace.ipc.process.private_files import warn_of_open_secret
from headrace.ipc.process.regular_files import read_text

T = TypeVar("T", bound=msgspec.Struct)
_STRUCTS, _FOLDED, _VLLM_OPTIONS = "option_structs", "folded_groups", "vllm_options"
"""Names of attributes: add_options sets the first two on a parser; parsing sets the third on the namespace."""
_HELP = "--help="


def parse_options(**values: Any) -> Options:
    """Reads options from Python keywords, as `LLM(...)` takes them.

    Values may also have the forms of a config file or a command line ("8k", "auto", a Path, torch.float16). None means
    the default, except for seed. `config` is a YAML file, over which the other keywords take precedence. `vars()` of
    the namespace of a parser with `add_options` can be passed as it is. A retired name causes a FutureWarning. Raises
    OptionError with all problems.
    """
    config = values.pop("config", None)
    options, notes = _read(Options, values | values.pop(_VLLM_OPTIONS, {}), str, config)
    for note in notes:
        warnings.warn(note, FutureWarning, stacklevel=2)
    check_sampling_defaults(options.override_generation_config)
    return options


def check_model_named(model: str | None) -> None:
    """Raises OptionError for an empty name, as of a shell's variable that is not set. None is the demo model."""
    if model == "":
        raise OptionError("model is empty: name one, or leave it out for the demo model")


class OptionParser(argparse.ArgumentParser):
    """argparse with two additions of vLLM's command line: underscores instead of dashes, and dotted JSON keys.

    `--hf-overrides.rope_theta 10000` is `--hf-overrides '{"rope_theta": 10000}'`. The error for an unknown option
    suggests the nearest known one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs["allow_abbrev"] = False  # a new option could make an abbreviation ambiguous
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = list(sys.argv[1:] if args is None else args)
        if getattr(self, _STRUCTS, None):
            for argument in arguments:
                if argument.startswith(_HELP):
                    self._print_message(self.help_on(argument.removeprefix(_HELP)), sys.stdout)
                    self.exit()
        if getattr(self, _STRUCTS, None) and Options in getattr(self, _STRUCTS):
            known = self._option_string_actions
            names = [_base(argument) for argument in arguments if argument.startswith("-")]
            if any(name not in known for name in names):
                _add_vllm_options(self)
        normal = self._normalise(arguments)
        found, unknown = super().parse_known_args(normal, namespace)
        self._check_model_is_no_list_item(found, normal)
        return found, unknown

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [argument for argument in unknown if argument.startswith("-")]  # the others may be their values
            commands = [value for name, value in vars(parsed).items() if name.endswith("command") and value]
            self._fail("; ".join(self._explain(argument) for argument in flags or unknown), " ".join(commands))
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own says nothing when the help could not be written, as on a full disk."""
        if not message or file is None:
            return
        try:
            file.write(message)
            file.flush()
        except BrokenPipeError:  # its reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        except OSError as error:
            self.exit(1, f"{self.prog}: cannot write the output: {(error.strerror or str(error)).lower()}\n")

    def load_config_file(self, file_path: str) -> list[str]:
        """The arguments that stand for a YAML file: `max-model-len: 64` is `--max-model-len 64`.

        Raises OptionError for a file that is none.
        """
        return _arguments_of_file(self, Path(file_path))

    def format_help(self) -> str:
        """The help without folded groups (see add_options), which one line names instead."""
        folded: list[str] = getattr(self, _FOLDED, [])
        note = f"--help=all also shows the engine's options: {', '.join(folded)}\n" if folded else ""
        structs = "--help=GROUP or --help=NAME shows a part\n" if getattr(self, _STRUCTS, None) else ""
        return self._help_of([each for each in self._action_groups if each.title not in folded]) + note + structs

    def help_on(self, key: str) -> str:
        """The help on a key: `all`, `listgroup` (the names of the groups), a group's name, or a part of options' names.

        Calls `error` for a key that matches nothing.
        """
        titles = [group.title for group in self._action_groups if group.title and group._group_actions]
        if key == "all":
            return self._help_of(self._action_groups)
        if key == "listgroup":
            return "\n".join(titles) + "\n"
        groups = [group for group in self._action_groups if (group.title or "").lower() == key.lower()]
        if not groups:
            groups = [group for group in self._action_groups if key.lower() in (group.title or "").lower()]
        formatter = self._get_formatter()
        text = key.replace("_", "-").lstrip("-").lower()
        for group in groups or self._action_groups:
            named = [each for each in group._group_actions if any(text in name for name in each.option_strings)]
            actions = group._group_actions if groups else named
            if actions:
                formatter.start_section(group.title)
                formatter.add_arguments(actions)
                formatter.end_section()
        shown = formatter.format_help()
        if not shown:
            self.error(f"--help={key}: no group or option is called so; there are all, listgroup, {', '.join(titles)}")
        return shown

    def _help_of(self, groups: list[Any]) -> str:
        whole, self._action_groups = self._action_groups, groups
        try:
            return super().format_help()
        finally:
            self._action_groups = whole

    def error(self, message: str) -> NoReturn:
        self._fail(" ".join(message.split()).replace(" :", ":"))  # argparse may pad names

    def _fail(self, message: str, command: str = "") -> NoReturn:
        """Exits with an error. command: the sub-command whose help applies, since argparse passes a sub-command's
        unknown arguments back to the parent parser."""
        prog = f"{self.prog} {command}" if command else self.prog
        self.exit(2, f"{self.prog}: {message}\nTry: {prog} --help\n")

    def _normalise(self, arguments: list[str]) -> list[str]:
        result: list[str] = []
        nested: dict[str, tuple[int, dict[str, Any]]] = {}
        """By option: what its dotted forms say together, and where in the result that goes."""
        rest = list(reversed(arguments))
        after: list[str] = []
        while rest:
            argument = rest.pop()
            if argument == "--":
                after = [argument, *reversed(rest)]
                break
            name, equals, value = argument.partition("=")
            _, dot, path = name.partition(".")
            base = _base(argument)
            action = self._option_string_actions.get(base)
            if not argument.startswith("--") and not (dot and action):  # -sc.method is --speculative-config.method
                result.append(argument)
                continue
            is_flag = isinstance(action, argparse.BooleanOptionalAction) or (
                isinstance(action, _StoreVllmOption) and action.nargs == 0
            )
            if is_flag and not equals and rest and rest[-1].lower() in ("true", "false"):  # vLLM's older form
                equals, value = "=", rest.pop()
            if dot and action is not None and not is_flag and action.nargs != 0:
                if not equals and not rest:
                    self.error(f"{argument}: a value must follow")
                text = value if equals else rest.pop()
                index, before = nested.get(base, (len(result), {}))
                if base not in nested:
                    result.append("")
                nested[base] = index, _merge(before, _nest(path.split("."), text))
            elif equals and is_flag:
                result.append(self._flag(base, value))
            else:
                result.append(base + dot + path + equals + value)
        for base, (index, value_of_parts) in nested.items():
            result[index] = f"{base}={json.dumps(value_of_parts)}"
        return result + after

    def _flag(self, name: str, value: str) -> str:
        """`--flag=false`, which argparse does not support, as `--no-flag`."""
        if value.lower() not in ("true", "false"):
            self.error(f"{name}={value}: it must be true or false")
        opposite = "--" + name.removeprefix("--no-") if name.startswith("--no-") else "--no-" + name.removeprefix("--")
        return name if value.lower() == "true" else opposite

    def _check_model_is_no_list_item(self, found: argparse.Namespace, arguments: Sequence[str]) -> None:
        """Calls `error` if a list option may have taken the model: `serve --api-key KEY MODEL` would take MODEL as a
        second key and serve the default model. A list option with one value per use cannot have done so."""
        given = vars(found)
        if given.get("model_argument", "") is not None or any(name in given for name in ("model", "engine", "config")):
            return
        for action in self._actions:
            values = _most_values(action, arguments) if action.nargs == "+" else ()
            if len(values) > 1:
                name = action.option_strings[-1]
                shown = "[...]" if self._is_secret(action.dest) else json.dumps(values[:-1])
                self.error(
                    f"{name} took {len(values)} values, and no model is named: give the model first, or with --model "
                    f"(a list may also be written as JSON: {name} '{shown}')"
                )

    def _is_secret(self, name: str) -> bool:
        specs = [option_specs(struct).get(name) for struct in getattr(self, _STRUCTS, [])]
        return any(spec is not None and spec.is_secret for spec in specs)

    def _explain(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument}"
        name = argument.partition("=")[0]
        visible = {known.lstrip("-").replace("-", "_"): known for known in self._visible_options()}
        close = nearest(name.lstrip("-"), list(visible))
        meant = visible[close] if close else ""
        if meant == name:  # another command has an option of this name
            return f"{name} is no option of this command, but of another"
        return f"unknown option {name}" + (f"; did you mean {meant}?" if meant else "")

    def _visible_options(self) -> list[str]:
        nested = [
            name
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
            if isinstance(parser, OptionParser)
            for name in parser._visible_options()
        ]
        shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        return shown + nested


def add_options(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct] = Options,
    *,
    positional_model: bool = False,
    folded: bool = False,
    only_group: str | None = None,
) -> None:
    """Adds every declared option to the parser, in groups, and `--config FILE`. `options_from_arguments` reads them.

    With `positional_model` the model may also be given without `--model`, as in `vllm serve MODEL`. `folded` groups are
    left out of `--help` (but not of `--help=all`). A parser may have several Structs; the config file may then contain
    options of all of them. only_group: adds the options of one group alone.
    """
    structs: list[type[msgspec.Struct]] = getattr(parser, _STRUCTS, [])
    structs.append(struct)
    setattr(parser, _STRUCTS, structs)
    if positional_model:
        parser.add_argument(
            "model_argument", nargs="?", metavar="MODEL", help=option_specs(struct)["model"].option.help
        )
    groups: dict[str, Any] = {}
    for spec in option_specs(struct).values():
        if only_group not in (None, spec.option.group):
            continue
        group = groups.get(spec.option.group)
        if group is None:
            group = groups[spec.option.group] = parser.add_argument_group(spec.option.group)
        names = [*filter(None, [spec.option.short]), flag(spec.name)]
        group.add_argument(*names, dest=spec.name, **_argument(spec))
    if folded:
        setattr(parser, _FOLDED, [*getattr(parser, _FOLDED, []), *groups])
    if struct is Options:
        parser.add_argument(
            "--config",
            metavar="FILE",
            type=lambda path: ConfigFile(path, structs),
            default=argparse.SUPPRESS,
            help="A YAML file of options; the command line wins over it",
        )
        if not isinstance(parser, OptionParser):  # an OptionParser adds them only when it meets an unknown option
            _add_vllm_options(parser)


def fill_namespaces(parser: argparse.ArgumentParser) -> None:
    """Makes the namespaces of a parser with `add_options` hold every option, as vLLM's parsers do: as it is typed, with
    the given value, else that of `--config FILE`, else the default.

    The file may also hold what others added to the parser. An option that is wrong ends the program as argparse does.
    """
    inner = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        try:
            arguments = _with_config_files(parser, list(sys.argv[1:] if args is None else args))
            found, unknown = inner(arguments, namespace)
            options = options_from_arguments(found)
        except OptionError as error:
            parser.error(str(error))
        vars(found).pop(_VLLM_OPTIONS, None)  # `options` has what they stand for
        for name in option_specs():
            setattr(found, name, getattr(options, name))
        found.model = found.model or None  # the demo model
        found.config = None
        return found, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]


def _with_config_files(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments with those of `--config FILE` before them in its stead, so that the command line wins."""
    from_files: list[str] = []
    rest: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        if argument == "--":
            rest += [argument, *pending]
        elif argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(pending, "")
            if not path:
                parser.error("--config: a file must follow")
            from_files += _arguments_of_file(parser, Path(path))
        else:
            rest.append(argument)
    return from_files + rest


def _arguments_of_file(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    result: list[str] = []
    for key, value in _read_mapping(path).items():
        name = flag(key.replace("-", "_"))
        action = parser._option_string_actions.get(name) or parser._option_string_actions.get(f"--{key}")
        name = name if name in parser._option_string_actions else f"--{key}"
        if isinstance(value, bool):
            opposite = "--no-" + name.removeprefix("--")
            if value:
                result.append(name)
            elif isinstance(action, argparse.BooleanOptionalAction) or opposite in parser._option_string_actions:
                result.append(opposite)
        elif isinstance(value, list):
            is_repeated = isinstance(action, argparse._AppendAction)
            texts = [each if isinstance(each, str) else json.dumps(each) for each in value]
            result += [part for text in texts for part in (name, text)] if is_repeated else [name, *texts]
        elif value is not None:
            result.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return result


def options_from_arguments(args: argparse.Namespace) -> Options:
    """Reads the options from the namespace of a parser with `add_options`. Prints notes about retired names to stderr.

    Raises OptionError with all problems of the command line or of the config file.
    """
    options = struct_from_arguments(args, Options)
    check_sampling_defaults(options.override_generation_config)
    return options


class ConfigFile(str):
    """The path of a YAML file of options, and the Structs whose options it may contain."""

    structs: Sequence[type[msgspec.Struct]]

    def __new__(cls, path: str, structs: Sequence[type[msgspec.Struct]]) -> ConfigFile:
        file = super().__new__(cls, path)
        file.structs = structs
        return file


def struct_from_arguments(args: argparse.Namespace, struct: type[T]) -> T:
    """Like `options_from_arguments`, for any Struct of options that was added to the parser."""
    names = option_specs(struct).keys()
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if struct is Options:
        given |= getattr(args, _VLLM_OPTIONS, {})
    model = getattr(args, "model_argument", None)
    if model is not None and struct is Options and given.setdefault("model", model) != model:
        raise OptionError(f"the model is given twice: {model} and --model {given['model']}")
    if struct is Options:
        check_model_named(given.get("model"))
    options, notes = _read(struct, given, flag, getattr(args, "config", None))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return options


def given_options(args: argparse.Namespace) -> dict[str, str]:
    """Which of the engine's options a command line and its config file give, and how each is written there.

    For what `options_from_arguments` has read without an error. Those of vLLM's that have no effect are not among them.
    """
    own, given = option_specs(Options), dict[str, str]()
    if (config := getattr(args, "config", None)) is not None:
        for key in _read_yaml(Path(config)) or ():
            given[key.replace("-", "_")] = f"{key} in {config}"
    for name, value in (vars(args) | getattr(args, _VLLM_OPTIONS, {})).items():
        given[name] = flag(f"no_{name}" if value is False else name)
    for name in _set_by_parts(getattr(args, _VLLM_OPTIONS, {})):
        given.setdefault(name, flag("compilation_config"))
    given = {successor(name) if _is_retired(name) else name: written for name, written in given.items()}
    if getattr(args, "model_argument", None) is not None:
        given["model"] = args.model_argument
    return {name: written for name, written in given.items() if name in own}


def _read(
    struct: type[T], given: dict[str, Any], spell: Callable[[str], str], config: str | os.PathLike[str] | None
) -> tuple[T, tuple[str, ...]]:
    """`read_options`; options that are not given come from the config file, then from vLLM's environment variables."""
    options, notes = read_options(struct, given, spell)
    taken = _names_with_values(given)
    if config is not None:
        in_file, file_notes = read_config(Path(config), struct, getattr(config, "structs", ()))
        names = option_specs(struct).keys()
        reached = {name.replace("-", "_") for name in given}
        set_here = {
            name if name in names else successor(name) for name in reached if name in names or _is_retired(name)
        }
        set_here |= _set_by_parts(given) if struct is Options else set()
        options = msgspec.structs.replace(in_file, **{name: getattr(options, name) for name in set_here})
        notes += file_notes
        taken |= _names_with_values(_read_mapping(Path(config)))
    named = options_from_variables() if struct is Options else {}
    unset = {name: value for name, value in named.items() if name not in taken and not getattr(options, name)}
    return msgspec.structs.replace(options, **unset), notes


def _names_with_values(given: Mapping[str, Any]) -> set[str]:
    return {name.replace("-", "_") for name, value in given.items() if value is not None}


def read_config(path: Path, struct: type[T], structs: Sequence[type[msgspec.Struct]] = ()) -> tuple[T, tuple[str, ...]]:
    """Reads the Struct's options from a YAML file, which may also contain options of `structs`. Also returns notes
    about retired names.

    Raises OptionError that names the file.
    """
    content = _read_mapping(path)
    names = option_specs(struct).keys()
    others = {name for other in structs if other is not struct for name in option_specs(other)} - names
    own = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        is_of_engine = struct is not Options and Options in structs and name not in names and is_vllm_option(name)
        if name not in others and not is_of_engine:
            own[key] = value
    specs = option_specs(struct)
    if any(value and (spec := specs.get(key.replace("-", "_"))) and spec.is_secret for key, value in own.items()):
        warn_of_open_secret("config", str(path))
    try:
        return read_options(struct, own, also_known=others)
    except OptionError as error:
        raise OptionError(f"in the config file {path}: {error}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML file of options holds. Raises OptionError that names the file."""
    try:
        content = _read_yaml(path)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the config file {path} cannot be read: {error}") from None
    except ValueError as error:
        raise OptionError(f"in the config file {path}: {error}") from None
    if not isinstance(content, dict | None) or not all(isinstance(key, str) for key in content or ()):
        raise OptionError(f"the config file {path} must map option names to values, such as 'max-model-len: 4096'")
    return content or {}


def _read_yaml(path: Path) -> Any:
    """Reads a YAML document. Raises OSError, UnicodeDecodeError, and ValueError if it is not YAML.

    A key that occurs twice in a mapping is refused, since PyYAML would silently use the last one.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(f"{key.value} is given twice, on lines {lines[key.value]} and {line}")
                lines[key.value] = line
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(read_text(path), Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:  # the message must not quote the line, which may contain a secret
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"it is not YAML: {error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None


def _is_retired(name: str) -> bool:
    return name in renamed_options()


def _set_by_parts(given: Mapping[str, Any]) -> set[str]:
    """The options that vLLM's options in `compilation_config.DEFAULTS` set."""
    plain = {name.replace("-", "_"): value for name, value in given.items()}
    return {
        option
        for name in compilation_config.DEFAULTS
        if name in plain
        for option in compilation_config.parts_of(name, plain[name], name).options
    }


def flag(name: str) -> str:
    """An option's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def default_text(spec: OptionSpec) -> str:
    """An option's default in words."""
    if spec.option.default_text:
        return spec.option.default_text
    if spec.default is None or spec.default in ((), ""):
        return "none"
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    if isinstance(spec.default, tuple):
        return " ".join(map(str, spec.default))
    return json.dumps(spec.default) if isinstance(spec.default, dict) else f"{spec.default}"


_TYPE_TEXTS: Mapping[OptionKind, str] = types.MappingProxyType(
    {
        "int": "N",
        "float": "NUMBER",
        "str": "TEXT",
        "list": "NAME",
        "numbers": "N",
        "dict": "JSON",
        "bool": "",
        "secret": "SECRET",
        "secrets": "SECRET",
    }
)


def type_text(spec: OptionSpec) -> str:
    """The kind of value that an option takes, in one word or as its choices."""
    if spec.kind == "choice":
        return "{" + ",".join(spec.choices) + "}"
    if spec.option.unit:
        return spec.option.unit.upper()
    return _TYPE_TEXTS[spec.kind]


class _MergeJson(argparse.Action):
    """Merges a JSON object that is given in several parts. Text that is no JSON object is kept for the later error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        have = getattr(namespace, self.dest, {})
        new = _json_or_text(values)
        merged = _merge(have, new) if isinstance(new, dict) and isinstance(have, dict) else values
        setattr(namespace, self.dest, merged)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        if usage is None and len(actions) > 12:  # a long list of options in brackets helps nobody
            needed = "".join(f" {a.option_strings[0]} {a.metavar}" for a in actions if a.option_strings and a.required)
            positional = [a for a in actions if not a.option_strings and a.help != argparse.SUPPRESS]
            rest = "".join(f" [{a.metavar or a.dest}]" for a in positional)
            return f"usage: {self._prog}{needed} [options]{rest}\n\n"
        return super()._format_usage(usage, actions, groups, prefix)


def _argument(spec: OptionSpec) -> dict[str, Any]:
    limits = range_text(spec.option) if spec.kind in ("int", "float", "numbers") else ""
    notes = "; ".join(filter(None, [limits, f"default: {default_text(spec)}"]))
    argument: dict[str, Any] = {
        "help": f"{spec.option.help} ({notes})".replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    if spec.kind == "bool":  # the opposite of --no-x would be --no-no-x
        return {**argument, "action": "store_true" if spec.name.startswith("no_") else argparse.BooleanOptionalAction}
    argument["metavar"] = type_text(spec)
    if spec.option.alone:
        argument.update(nargs="?", const=spec.option.alone)
    if spec.kind in ("list", "numbers", "secrets"):
        argument.update({"action": "append"} if spec.option.repeated else {"nargs": "+", "action": "extend"})
    if spec.kind == "dict":
        argument["action"] = _MergeJson
    return argument


def _add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's options that Headrace lacks as hidden options, so that their errors name them."""
    short = {name: option.short for name, option in unsupported_options().items() if option.short}
    short |= compilation_config.SHORT
    for name in (*unsupported_options(), *renamed_options(), *compilation_config.DEFAULTS):
        if flag(name) in parser._option_string_actions:
            continue
        option = unsupported_options().get(name)
        is_flag = "=" in renamed_options().get(name, "") if option is None else option.is_flag
        names = [*filter(None, [short.get(name)]), flag(name)]
        parser.add_argument(
            *names,
            *(["--no-" + flag(name).removeprefix("--")] if is_flag else []),
            dest=name,
            action=_StoreVllmOption,
            nargs=0 if is_flag else "?",
            help=argparse.SUPPRESS,
        )


class _StoreVllmOption(argparse.Action):
    """Stores vLLM's options apart from Headrace's, in one attribute of the namespace. An option without a value is
    stored as true."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **keywords)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            negated = flag(self.dest) != option_string and (option_string or "").startswith("--no-")
            values = not negated
        given = dict(getattr(namespace, _VLLM_OPTIONS, {}))
        have, new = (_json_or_text(each) if isinstance(each, str) else each for each in (given.get(self.dest), values))
        if isinstance(have, dict) and isinstance(new, dict):  # --limit-mm-per-prompt.image 0, and .video 0 after it
            values = _merge(have, new)
        given[self.dest] = True if values is None else values
        setattr(namespace, _VLLM_OPTIONS, given)


def _base(argument: str) -> str:
    """The declared flag in an argument such as `--some_flag.key=value`."""
    return argument.partition("=")[0].partition(".")[0].replace("_", "-")


def _most_values(action: argparse.Action, arguments: Sequence[str]) -> Sequence[str]:
    """The longest list of values that one use of an option takes."""
    places = [at for at, argument in enumerate(arguments) if argument in action.option_strings]
    values = [list(itertools.takewhile(_is_value, arguments[at + 1 :])) for at in places]
    return max(values, key=len, default=[])


def _is_value(argument: str) -> bool:
    return not argument.startswith("-")


def _json_or_text(text: str) -> Any:
    """What is no JSON is text, for the error that names it if it is to be JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class _Appended(list[Any]):
    """Entries that join those of a list before them."""


def _nest(path: list[str], text: str) -> dict[str, Any]:
    """{"a": {"b": value}} for a.b, and {"a": [value, ...]} for `a+`, whose text may be several values with commas."""
    value = _json_or_text(text)
    if path[-1].endswith("+"):
        path = [*path[:-1], path[-1].removesuffix("+")]
        value = _Appended(map(_json_or_text, text.split(",")))
    for key in reversed(path):
        value = {key: value}
    return cast(dict[str, Any], value)


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            value = _merge(merged[key], value)
        elif isinstance(value, _Appended) and isinstance(merged.get(key), list):
            value = _Appended(merged[key] + value)
        merged[key] = value
    return merged
