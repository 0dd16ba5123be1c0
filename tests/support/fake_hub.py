"""A local model hub for tests that answers the requests of a snapshot download, as Hugging Face and as ModelScope."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qs, urlsplit

Repositories = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""Owner and name -> revision -> file -> content."""


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@contextlib.contextmanager
def serve_hub(repositories: Repositories, tokens: Mapping[str, str] | None = None) -> Iterator[str]:
    """Serves the repositories and yields the address. tokens: the access token of each private repository."""

    class Handler(_Hub):
        files, private = repositories, tokens or {}

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(60)


class _Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Repositories
    private: Mapping[str, str]

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "v1"]:
            self._as_modelscope(parts[2:])
            return
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        is_open = self.private.get(repo) in (None, self.headers.get("Authorization", "").removeprefix("Bearer "))
        if repo not in self.files or not is_open:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif is_api:
            self._describe(repo, parts[4:])
        else:
            self._file(repo, parts[2:4], "/".join(parts[4:]))

    do_HEAD = do_GET

    def _revision(self, repo: str, named: str) -> str | None:
        return next((each for each in self.files[repo] if named in (each, commit_of(each))), None)

    def _describe(self, repo: str, rest: list[str]) -> None:
        revision = self._revision(repo, rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
        if revision is None:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        held = self.files[repo][revision]
        if rest[:1] == ["tree"]:
            files = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in held.items()]
            self._answer(200, json.dumps(files).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in held]
            self._answer(200, json.dumps({"id": repo, "sha": commit_of(revision), "siblings": siblings}).encode(), {})

    def _as_modelscope(self, parts: list[str]) -> None:
        """Answers models/OWNER/NAME/repo/files with the list of files, and models/OWNER/NAME/repo with a file."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        repo, route = "/".join(parts[1:3]), parts[3:]
        held = self.files.get(repo, {}).get(asked.get("Revision", "master"))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if parts[:1] != ["models"] or held is None or self.private.get(repo) not in (None, token):
            self._answer(404, json.dumps({"Code": 10010205001, "Message": "not found"}).encode(), {})
        elif route == ["repo", "files"]:
            listed: list[dict[str, object]] = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in held.items()
            ]
            listed += [{"Path": each, "Type": "tree"} for each in {name.rpartition("/")[0] for name in held} - {""}]
            self._answer(200, json.dumps({"Code": 200, "Data": {"Files": listed}}).encode(), {})
        elif route == ["repo"] and asked.get("FilePath") in held:
            self._answer(200, held[asked["FilePath"]], {})
        else:
            self._answer(404, b"{}", {})

    def _file(self, repo: str, route: list[str], name: str) -> None:
        revision = self._revision(repo, route[1]) if route[:1] == ["resolve"] else None
        data = None if revision is None else self.files[repo][revision].get(name)
        if revision is None or data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit_of(revision)}
            self._answer(200, data, headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""
