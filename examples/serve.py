"""A server, and OpenAI's client (`pip install openai`). Usage: serve.py [MODEL]"""

import subprocess
import sys

from openai import OpenAI

PORT = 8461

server = subprocess.Popen([sys.executable, "-m", "headrace", "serve", *sys.argv[1:2], "--port", str(PORT)])
try:
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=30)  # until it listens
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n({chunk.usage.completion_tokens} tokens)")
finally:
    server.terminate()  # it finishes what it is answering, then ends
    server.wait()
