"""Flask, Django and Celery: an engine made before and after a fork, and one shared by threads; gunicorn's workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL, _ = sys.argv[1:]
FLASK = """
import flask
from headrace import LLM, SamplingParams
app = flask.Flask(__name__)
llm = None
@app.get("/")
def answer():
    global llm
    if llm is None:
        llm = LLM({model!r}, max_model_len=256, dtype="float32")
    (output,) = llm.generate("hello", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    return output.outputs[0].text or "empty"
"""
DJANGO = """
import sys
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path
from headrace import LLM, SamplingParams
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="s", DEBUG=True)
llm = None
def answer(request):
    global llm
    if llm is None:
        llm = LLM({model!r}, max_model_len=256, dtype="float32")
    (output,) = llm.generate("hello", SamplingParams(max_tokens=4), use_tqdm=False)
    return HttpResponse(output.outputs[0].text or "empty")
urlpatterns = [path("", answer)]
app = get_wsgi_application()
"""
FORKED = """
import flask
from headrace import LLM, SamplingParams
app = flask.Flask(__name__)
llm = LLM({model!r}, max_model_len=256, dtype="float32")  # in gunicorn's master, before its workers are forked
@app.get("/")
def answer():
    try:
        llm.generate("hello", use_tqdm=False)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "it ran"
"""
CELERY = """
import celery
from headrace import LLM, SamplingParams
app = celery.Celery("tasks", broker="filesystem://", backend="file://{folder}/results", broker_transport_options={{
    "data_folder_in": "{folder}/in", "data_folder_out": "{folder}/in", "control_folder": "{folder}/control"}})
llm = None
@app.task
def answer(prompt):
    global llm
    if llm is None:
        llm = LLM({model!r}, max_model_len=256, dtype="float32")
    return llm.generate(prompt, SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text or "empty"
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def fetch(port: int) -> str:
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def gunicorn(folder: Path, name: str, code: str, *arguments: str) -> list[str]:
    (folder / f"{name}.py").write_text(code)
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", f"{name}:app", "-b", f"127.0.0.1:{port}", "-t", "120", *arguments]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})
    try:
        fetch(port)
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(fetch(port))) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return found
    finally:
        process.terminate()
        process.wait(60)


def celery(folder: Path) -> str:
    for name in ("in", "control", "results"):
        (folder / name).mkdir()
    (folder / "tasks.py").write_text(CELERY.format(model=MODEL, folder=folder))
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-c", "1", "-l", "warning"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    worker = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        ask = "import tasks; print('answer:', tasks.answer.delay('hello').get(timeout=150))"
        return subprocess.check_output([sys.executable, "-c", ask], cwd=folder, env=environment, text=True, timeout=200)
    finally:
        worker.terminate()
        worker.wait(60)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threads = gunicorn(folder, "flask_threads", FLASK.format(model=MODEL), "--threads", "8")
        assert len(set(threads)) == 1, threads
        assert len(gunicorn(folder, "flask_workers", FLASK.format(model=MODEL), "-w", "2")) == 8
        assert len(gunicorn(folder, "django_app", DJANGO.format(model=MODEL), "--threads", "4")) == 8
        told = gunicorn(folder, "forked", FORKED.format(model=MODEL), "--preload")
        assert all("fork" in each for each in told), told
        assert "answer:" in celery(folder)


if __name__ == "__main__":
    main()
