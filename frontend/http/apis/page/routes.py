"""The page's files, as they are in `static/`, and what its live view asks for.

The files are public, since they tell nothing of this server: the page asks for a key and sends it with every request.
"""

from __future__ import annotations

import hashlib
import html
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path

from headrace.frontend.http.apis.ollama.routes import root as ollama_root
from headrace.frontend.http.apis.page.live import LiveState, live_state
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.route_spec import get
from headrace.frontend.http.server.state import ServerState

_STATIC = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
# Nothing but this server's own files runs, is shown or is called, whatever a model writes; no page may frame this one;
# and the browser itself refuses to parse a text as HTML.
_POLICY = "; ".join(
    [
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'self'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    ]
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # asked for again each time, and sent again only if it has changed
    (b"vary", b"accept"),
)


@cache
def _file(name: str, root_path: str) -> tuple[bytes, bytes]:
    """A file's content and its tag, which changes with it. root_path: what a proxy puts before every path."""
    body = (_STATIC / name).read_bytes()
    if name == _INDEX and root_path:
        base = f'<base href="{html.escape(root_path)}/">'
        body = body.replace(b"<head>", b"<head>\n" + base.encode(), 1)
    return body, b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()


async def _send_file(state: ServerState, exchange: Exchange, *, name: str) -> None:
    body, tag = _file(name, state.options.root_path)
    content_type = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
    headers = [*_HEADERS, (b"etag", tag), (b"content-type", content_type.encode())]
    is_known = tag in (exchange.headers.get(b"if-none-match", b""))
    status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
    body = b"" if is_known else body
    if not is_known:
        headers.append((b"content-length", b"%d" % len(body)))
    await exchange.send({"type": "http.response.start", "status": status, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": body, "more_body": False})


async def _page(state: ServerState, exchange: Exchange) -> None:
    """The page for a browser; programs get Ollama's answer, as at a server without the page."""
    if "text/html" in (exchange.header(b"accept") or ""):
        await _send_file(state, exchange, name=_INDEX)
    else:
        await ollama_root(state, exchange)


async def _live(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(await live_state(state.pool, state.pages))


_FILES = sorted(each.name for each in _STATIC.iterdir() if each.suffix in _TYPES and each.name != _INDEX)
API = Api(
    routes=(
        get("/", _page, "The page with a chat and a live view", access=Access.PUBLIC, header=b"accept"),
        *(
            get(
                f"/ui/{name}",
                partial(_send_file, name=name),
                "A file of the page",
                access=Access.PUBLIC,
                is_documented=False,
            )
            for name in _FILES
        ),
        get("/ui/live", _live, "The state of each engine, for the page's live view", LiveState, access=Access.CLIENT),
    ),
    is_served=lambda options: options.ui,
    served_by="--ui, which is on unless the server was started with --no-ui",
)
