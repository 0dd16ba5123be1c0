"""A file of requests in OpenAI's batch format. Usage: batch.py [MODEL]"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CITIES = ("Oslo", "Lima", "Pune")

with tempfile.TemporaryDirectory() as folder:
    requests, results = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
    with requests.open("w") as file:
        for city in CITIES:
            body = {"messages": [{"role": "user", "content": f"Where is {city}?"}], "max_tokens": 24}
            line = {"custom_id": city, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    model = ["--model", sys.argv[1]] if len(sys.argv) > 1 else []
    command = [sys.executable, "-m", "headrace", "run-batch", "-i", requests, "-o", results, *model]
    subprocess.run(command, check=True)
    for text in results.read_text().splitlines():
        result = json.loads(text)
        print(result["custom_id"], "->", result["response"]["body"]["choices"][0]["message"]["content"])
