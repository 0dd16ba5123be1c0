"""Texts as vectors, and which of them are closest to a question. Usage: embeddings.py [MODEL]"""

import math
import sys

from headrace import LLM

documents = ["Paris is the capital of France.", "Bread is baked in an oven.", "A river carries water to the sea."]
question = "What is the capital city of France?"

# A model that generates is told to pool; a model that is made for embeddings says so itself.
with LLM(*sys.argv[1:2], runner="pooling") as llm:
    vectors = [output.outputs.embedding for output in llm.embed([question, *documents])]

print(len(vectors[0]), "numbers a text, of length", round(math.hypot(*vectors[0]), 3))
asked, *found = vectors
# The vectors have length 1, so their products are cosines.
scores = [sum(left * right for left, right in zip(asked, each, strict=True)) for each in found]
for score, document in sorted(zip(scores, documents, strict=True), reverse=True):
    print(f"{score:.3f}  {document}")
