"""The sandbox of chat templates: jinja2's, with bounds on what one rendering computes, builds and prints.

A template is an untrusted program, and a single call in it can take hours or fill the memory, as
`'a'.center(10 ** 10)` does. The clock alone does not help: nothing can interrupt a call that runs in C. So everything
that builds a text or a list goes through this module, which

- estimates the size of the result where it can be larger than the operands, and refuses before it is built;
- counts the bytes of all results of a rendering, as the template may keep each of them;
- looks at the clock.

That holds for operators, `~`, slices, filters, tests, the methods of texts and lists, and what is printed.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.runtime import Context, Markup, Undefined, escape, markup_join
from jinja2.utils import _PassArg

from headrace.frontend.text.template_sizes import (
    FILTERS,
    MOST_IN_PRODUCT,
    TEXT_METHODS,
    check_characters,
    check_items,
    refuse,
    size_of_formatted,
    size_of_product,
    text_of_first,
    text_size,
)

MOST_BYTES_BUILT = 1 << 30
"""Size of everything that one rendering may build, freed or not: it may keep all of it."""
_DIGITS = re.compile(r"[0-9]+")
_PIECES = 64
"""How many printed texts are collected between two looks at their size."""
_QUICK = 1 << 16
"""Bytes that are handled in so little time that the clock need not be looked at."""
_SMALL = 1 << 10
"""A result up to this size is not counted by itself: a loop counts it in advance for each operation in it."""
_BYTES_OF_OUTPUT = 8
"""What each printed value takes in the list of a block's output."""

_NO_USE = "chat templates cannot use {name}: {why}"
_ENDLESS = "its work cannot be bounded"
_FOR_HTML = "it is for HTML, and its work cannot be bounded"
_FOR_BYTES = "templates handle text, not bytes"
_REMOVED_FILTERS = {
    "pprint": _ENDLESS,
    "striptags": _FOR_HTML,
    "urlize": _FOR_HTML,
    "wordwrap": _ENDLESS,
    "xmlattr": _FOR_HTML,
}
_REMOVED_METHODS = {
    "encode": _FOR_BYTES,
    "from_bytes": _FOR_BYTES,
    "maketrans": _ENDLESS,
    "striptags": _FOR_HTML,
    "to_bytes": _FOR_BYTES,
    "translate": _ENDLESS,
    "unescape": _FOR_HTML,
}


class Meter:
    """What one rendering may still use. Time is this thread's processor time: a busy machine takes none away."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._end_s = time.thread_time() + longest_s
        self._num_bytes_left = MOST_BYTES_BUILT

    def look_at_clock(self) -> None:
        """Raises TemplateError once the time is up."""
        self.pass_by(0)

    def pass_by(self, num_bytes: int) -> None:
        """Charges, and looks at the clock."""
        self._num_bytes_left -= num_bytes
        if self._num_bytes_left < 0:
            raise jinja2.TemplateError(f"it built more than {MOST_BYTES_BUILT} bytes")
        if time.thread_time() > self._end_s:
            raise jinja2.TemplateError(f"it took more than {self._longest_s:g} s of processor time")

    def charge(self, result: Any) -> None:
        """Counts a result as built. Raises TemplateError if it is too much."""
        size = sys.getsizeof(result)
        if size > _QUICK:
            if isinstance(result, str):
                check_characters(len(result), "an operation")
            self.pass_by(size)
            return
        self._num_bytes_left -= size  # the next iteration looks whether that was too much


_meter: ContextVar[Meter] = ContextVar("meter")
"""Of the rendering in this thread. Templates must not reach it, so it is not among their variables."""


def render(template: jinja2.Template, context: Mapping[str, Any], longest_s: float) -> str:
    """The template's output. Raises TemplateError, or what its operations raise."""
    token = _meter.set(Meter(longest_s))
    try:
        return template.render(context)  # as one mapping: a variable may have the name of a parameter of `render`
    finally:
        _meter.reset(token)


def _as_list(values: Iterable[Any], what: str) -> list[Any]:
    items, size = [], 0
    for item in _watched(values, what):
        items.append(item)
        if isinstance(item, str):
            size += len(item)
            check_characters(size, what)
    return items


def _watched(values: Iterable[Any], what: str) -> Iterator[Any]:
    """The same values, while they are few and there is time."""
    look_at_clock = _meter.get().look_at_clock
    for num_before, value in enumerate(values):
        if num_before % 64 == 0:
            look_at_clock()
        check_items(num_before, what)
        yield value


_TAKE_ALL = frozenset({"groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique"})
"""The filters that read an iterator to its end before they return."""
_FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
_FREE_TESTS = frozenset(
    {"boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sameas"}
    | {"sequence", "string", "true", "undefined"}
)
"""They build nothing and take no time."""


def _bounded(name: str, function: Any) -> Callable[..., Any]:
    """The filter or test with its bounds. It takes the context, which keeps jinja2 from calling it when it compiles."""
    estimate, takes_all = FILTERS.get(name), name in _TAKE_ALL
    keeps_size = estimate is text_of_first
    passed = _PassArg.from_obj(function)
    is_plain = keeps_size and passed is None

    @jinja2.pass_context
    def bounded(context: Context, *args: Any, **kwargs: Any) -> Any:
        if is_plain and len(args) == 1 and not kwargs and args[0].__class__ is str and len(args[0]) < _SMALL:
            return function(args[0])
        meter = _meter.get()
        is_quick = keeps_size and len(args) == 1 and type(args[0]) is str and len(args[0]) < _QUICK
        if not is_quick:
            meter.look_at_clock()
            if takes_all and args and isinstance(args[0], Iterator):
                args = (_as_list(args[0], name), *args[1:])
            if estimate is not None:
                check_characters(estimate(*args, **kwargs), name)
        if passed is None:
            result = function(*args, **kwargs)
        elif passed is _PassArg.context:
            result = function(context, *args, **kwargs)
        else:
            environment = passed is _PassArg.environment
            result = function(context.environment if environment else context.eval_ctx, *args, **kwargs)
        if type(result) is GeneratorType:
            return _watched(result, name)
        if not (args and result is args[0]):
            meter.charge(result)
        return result

    return bounded


def _removed(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise jinja2.TemplateError(_NO_USE.format(name=name, why=why))

    return refuse


@jinja2.pass_context
def _sum(context: Context, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """The filter sum, through the bounded operator: lists can be summed too."""
    environment = context.environment
    assert isinstance(environment, ChatEnvironment)
    if attribute is not None:
        iterable = map(jinja2.filters.make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        start = environment.added(context, (start, item))
    return start


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """For one call of str.format: bounds the widths and the whole."""

    def __init__(self, environment: jinja2.Environment, **kwargs: Any) -> None:
        super().__init__(environment, **kwargs)
        self._size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            check_characters(text_size(value), "format")
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        meter = _meter.get()
        meter.look_at_clock()
        check_characters(text_size(value), "format")
        widths = sum(int(digits) for digits in _DIGITS.findall(format_spec))
        if widths > MOST_IN_PRODUCT:
            refuse("format", MOST_IN_PRODUCT, "characters")
        text: str = super().format_field(value, format_spec)
        self._size += len(text)
        check_characters(self._size, "format")
        return text


class _EscapeFormatter(_Formatter, jinja2.sandbox.SandboxedEscapeFormatter):
    pass


class _Code(CodeGenerator):
    """Routes `+`, `~`, slices and what is printed through the environment."""

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """A chain of + becomes one call, which is faster than a call for each."""
        terms: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        self._call("added", [left, *reversed(terms)], frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("concatenated", node.nodes, frame)

    def _call(self, method: str, operands: list[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{method}(context, (")
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.sliced(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        # Nearly all that is printed is text; a call to find that out would cost more than the rest.
        if frame.eval_ctx.autoescape or frame.eval_ctx.volatile:
            self.write("environment.printed(context, ")
        else:
            self.write("(printed if (printed := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.autoescape or frame.eval_ctx.volatile:
            self.write(")")
        else:
            self.write(").__class__ is str else environment.printed(context, printed))")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training. Renders its content alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        """Reads the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's environment with the bounds of this module. Its templates are rendered by `render`."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"*", "**", "%", "//"})  # + has its own way

    def __init__(self, filters: Mapping[str, Callable[..., Any]], names: Mapping[str, Any]) -> None:
        """filters: in addition to jinja2's. names: further global variables."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters.update({"sum": _sum, **filters})
        for name in self.filters.keys() - _FREE_FILTERS:
            self.filters[name] = _bounded(name, self.filters[name])
        for name, why in _REMOVED_FILTERS.items():
            self.filters[name] = _removed(f"the filter {name}", why)
        for name in self.tests.keys() - _FREE_TESTS:
            self.tests[name] = _bounded("", self.tests[name])
        self.filters[_PASS] = _pass
        self.globals["lipsum"] = _removed("lipsum", _ENDLESS)
        self.globals.update(names)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Makes each iteration of a loop and each call of a macro look at the clock."""
        blocks: list[Any] = [*source.find_all((nodes.For, nodes.Macro))]
        for block in blocks:
            num_bytes = sum(map(_bytes_of, block.body))
            look = nodes.ExprStmt(nodes.Filter(nodes.Const(num_bytes), _PASS, [], [], None, None))
            block.body.insert(0, look.set_lineno(block.lineno).set_environment(self))
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator's result. Raises TemplateError if it would be too large."""
        meter = _meter.get()
        meter.look_at_clock()
        if operator == "%" and isinstance(left, str):
            check_characters(size_of_formatted(left, *(right if isinstance(right, tuple) else (right,))), "%")
        elif operator in ("*", "**") and size_of_product(operator, left, right) > MOST_IN_PRODUCT:
            raise jinja2.TemplateError(f"a result of {operator} is larger than {MOST_IN_PRODUCT}")
        result = super().call_binop(context, operator, left, right)
        meter.charge(result)
        return result

    def added(self, context: Context, terms: tuple[Any, ...]) -> Any:
        """The result of one + or of several."""
        size = 0
        for term in terms:
            if type(term) is not str:
                break
            size += len(term)
        else:
            if size < _SMALL:
                return "".join(terms)
            check_characters(size, "+")
            text = "".join(terms)
            _meter.get().charge(text)
            return text
        result = terms[0]
        for term in terms[1:]:
            if isinstance(result, str) and isinstance(term, str):
                check_characters(len(result) + len(term), "+")
            elif isinstance(result, list | tuple) and isinstance(term, list | tuple):
                check_items(len(result) + len(term), "+")
            result = result + term
            if not isinstance(result, int):
                _meter.get().charge(result)
        return result

    def concatenated(self, context: Context, values: tuple[Any, ...]) -> str:
        """The result of `~`."""
        size, all_str = 0, True
        for value in values:
            if type(value) is str:
                size += len(value)
            else:
                size += text_size(value)
                all_str = False
        if all_str and size < _SMALL and not context.eval_ctx.autoescape:
            return "".join(values)
        check_characters(size, "~")
        text = markup_join(values) if context.eval_ctx.autoescape else "".join(map(str, values))
        _meter.get().charge(text)
        return text

    def sliced(self, value: Any) -> Any:
        """Counts a slice that was made: it is a copy."""
        _meter.get().charge(value)
        return value

    def printed(self, context: Context, value: Any) -> str:
        """A value as it is printed."""
        if not isinstance(value, str | int | Undefined):
            check_characters(text_size(value), "printing a value")
        return escape(value) if context.eval_ctx.autoescape else str(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """What a block or the whole template prints."""
        if not isinstance(pieces, list):
            pieces = self._collected(iter(pieces))
        check_characters(sum(map(len, pieces)), "a block")
        text = "".join(pieces)
        _meter.get().charge(text)
        return text

    def _collected(self, pieces: Iterator[str]) -> list[str]:
        collected: list[str] = []
        size = 0
        while some := list(itertools.islice(pieces, _PIECES)):
            size += sum(map(len, some))
            check_characters(size, "the template")
            collected += some
        return collected

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A bounded str.format or str.format_map, if the value is one."""
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        takes_mapping = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
            if takes_mapping and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument")
            result = type(text)(formatter.vformat(text, *(((), args[0]) if takes_mapping else (args, kwargs))))
            _meter.get().charge(result)
            return result

        return functools.update_wrapper(formatted, value)

    def call(__self, __context: Context, __callee: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call in a template."""
        # jinja2 passes keywords of the template on, which may have any name; so the first three have odd ones.
        owner = getattr(__callee, "__self__", None) if type(__callee) in _METHODS else __callee
        if owner is __callee:
            return super().call(__context, __callee, *args, **kwargs)
        name = __callee.__name__
        is_text = isinstance(owner, str)
        if name in _REMOVED_METHODS and (is_text or owner is None or isinstance(owner, int | type)):
            raise jinja2.TemplateError(_NO_USE.format(name=f"the method {name}", why=_REMOVED_METHODS[name]))
        estimate = TEXT_METHODS.get(name) if is_text else None
        if estimate is not None:
            _meter.get().look_at_clock()
            if name == "join" and args and isinstance(args[0], Iterator):
                args = (_as_list(args[0], name),)
            given = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
            check_characters(estimate(owner, *args, **given), name)
        if type(owner) in _PLAIN:  # such methods need nothing of the context, and all that change the value are unsafe
            for key in _OF_JINJA:
                kwargs.pop(key, None)
            result = __callee(*args, **kwargs)
        else:
            result = super().call(__context, __callee, *args, **kwargs)
        if (
            result is not owner
            and result.__class__ is not bool
            and not (result.__class__ is str and len(result) < _SMALL)
        ):
            _meter.get().charge(result)
        return result


def _bytes_of(statement: nodes.Node) -> int:
    """What the statement may build uncounted. Loops inside count again by themselves."""
    num_outputs = isinstance(statement, nodes.Output) + sum(1 for _ in statement.find_all(nodes.Output))
    num_operations = sum(1 for _ in statement.find_all((nodes.Add, nodes.Concat, nodes.Call, nodes.Filter)))
    return _BYTES_OF_OUTPUT * num_outputs + _SMALL * num_operations


_METHODS = frozenset({BuiltinMethodType, MethodType})
_PLAIN = frozenset({str, dict, list, tuple})
_OF_JINJA = ("_loop_vars", "_block_vars")
"""Keywords that jinja2 adds to each call."""
_PASS = "headrace_pass"


def _pass(num_bytes: int) -> str:
    """Runs in each iteration of a loop and each call of a macro."""
    _meter.get().pass_by(num_bytes)  # fails while jinja2 compiles, which keeps it from storing the result
    return ""
