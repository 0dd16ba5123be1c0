"""The OpenAPI document and the HTML page of /docs, both generated from the table of routes and its structs."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

import headrace
from headrace.frontend.http.server.access import Access, Keys
from headrace.frontend.http.server.decoding.foreign_fields import ANY
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.errors import ErrorResponse

if TYPE_CHECKING:
    from headrace.frontend.http.server.route_spec import RouteSpec

_REF = "#/components/schemas/{name}"
_JSON = "application/json"


def document(
    routes: Sequence[RouteSpec], root_path: str, *, bodies: Sequence[Body] = (), keys: Keys | None = None
) -> bytes:
    """The OpenAPI 3.1 document as JSON. bodies: the kinds of requests, of which the fields that they lack are
    described too. keys: those that the server requires."""
    keys = keys or Keys()
    # Of one path and method, a document has one route.
    routes = [route for route in routes if route.header is None and route.is_documented]
    kinds = {each for route in routes for each in (route.request, route.response, route.events) if each is not None}
    _, components = msgspec.json.schema_components([*sorted(kinds, key=str), ErrorResponse], ref_template=_REF)
    for body in bodies:
        if body.kind.__name__ not in components:
            continue
        properties = components[body.kind.__name__]["properties"]
        for name, field in body.lacks.items():
            if name in properties:
                continue
            properties[name] = {"description": f"Taken where it asks for nothing: {field.reason}"}
            if ANY not in field.values and not field.is_harmless:
                properties[name]["enum"] = [None, *field.values]
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.shown_path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, keys)
    components = {name: _without_titles(schema) for name, schema in components.items()}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": headrace.__version__, "description": "OpenAI-compatible server"},
            "servers": [{"url": root_path or "/"}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin_key")},
            },
        }
    )


def _operation(route: RouteSpec, keys: Keys) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower())}",
        "responses": {"200": {"description": "Done", "content": _content(route)}},
    }
    if route.query is not None:
        described = msgspec.json.schema(route.query)["$defs"][route.query.__name__]["properties"]
        operation["parameters"] = [{"name": name, "in": "query", "schema": each} for name, each in described.items()]
    if names := route.path_parameters:
        operation["parameters"] = operation.get("parameters", []) + [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(route.request)}}}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": route.form}}}
    is_admin = route.access is Access.ADMIN
    needs_key = (keys.guards_clients and route.access is not Access.PUBLIC) or (keys.guards_admins and is_admin)
    refusals = {*route.refusals, *((401,) if needs_key else ()), *((403,) if is_admin else ())}
    for status in sorted(refusals):
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {_JSON: {"schema": _ref(ErrorResponse)}},
        }
    if needs_key:
        operation["security"] = [{"admin_key" if is_admin else "key": []}]
    return operation


def _content(route: RouteSpec) -> dict[str, Any]:
    if route.response is None:
        return {}
    content: dict[str, Any] = {_JSON: {"schema": _ref(route.response)}}
    if "stream" in getattr(route.request, "__struct_fields__", ()):
        content["text/event-stream"] = {"schema": {"type": "string", "description": "data: JSON, then data: [DONE]"}}
    return content


def _ref(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _without_titles(schema: Any) -> Any:
    """Removes titles, since they repeat the names."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema


# --- the page ------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
code, pre { font: 14px/1.45 ui-monospace, monospace; background: #f4f4f2; border-radius: 4px }
code { padding: .1em .3em } pre { padding: .8rem; overflow: auto }
details { border-top: 1px solid #ddd; padding: .5rem 0 } summary { cursor: pointer }
.method { display: inline-block; width: 3.2rem; font-weight: 600; color: #0a5c8a }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { text-align: left; padding: .2rem .6rem .2rem 0 }
td { border-top: 1px solid #eee; vertical-align: top }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } code, pre { background: #262626 }
td, details { border-color: #333 } .method { color: #6cb8e6 } }
"""


def docs_page(document_json: bytes, models: Sequence[str]) -> str:
    """One page of HTML that needs nothing else: no script, no other server."""
    api = msgspec.json.decode(document_json)
    schemas = api["components"]["schemas"]
    sections = [
        _section(method, path, operation, schemas)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    model = models[0] if models else "MODEL"
    example = (
        "curl http://HOST:PORT/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Headrace {headrace.__version__}</title><style>{_STYLE}</style>"
        f"<h1>Headrace {headrace.__version__}</h1><p>Compatible with OpenAI's API; the machine-readable form is "
        "<a href=openapi.json>openapi.json</a>. Models: "
        + (", ".join(f"<code>{html.escape(name)}</code>" for name in models) or "none yet")
        + f".</p><pre>{html.escape(example)}</pre>"
        + "".join(sections)
        + "</html>"
    )


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [
        f"<details><summary><span class=method>{method.upper()}</span> <code>{html.escape(path)}</code> "
        f"{html.escape(operation['summary'])}</summary>"
    ]
    if "requestBody" in operation:
        (form,) = operation["requestBody"]["content"].values()
        parts.append("<h4>Request</h4>" + _table(form["schema"], schemas))
    content = operation["responses"]["200"]["content"]
    if _JSON in content:
        parts.append("<h4>Response</h4>" + _table(content[_JSON]["schema"], schemas))
    return "".join(parts) + "</details>"


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """An HTML table of the fields of a schema, or of a reference to one."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema:  # a list
        return f"<p>{html.escape(_type(schema))}</p>"
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in schema.get('required', ()) else ''}"
        f"<td>{html.escape(_type(field))}<td>{html.escape(field.get('description', ''))}"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>field (* required)<th>type<th>what it is{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " | ".join(msgspec.json.encode(value).decode() for value in field["enum"])
    if "anyOf" in field:
        return " | ".join(_type(each) for each in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items') or {})}"
    return str(field.get("type", "any"))
