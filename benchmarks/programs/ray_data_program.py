"""Ray Data: map_batches over texts, whose batches are arrays of numpy's, columns of pandas and tables of pyarrow."""

from __future__ import annotations

import sys
from typing import Any

MODEL, _ = sys.argv[1:]


class Generate:
    def __init__(self) -> None:
        from vllm import LLM, SamplingParams

        import headrace.as_vllm  # noqa: F401

        self.llm = LLM(MODEL, max_model_len=256, dtype="float32")
        self.params = SamplingParams(temperature=0, max_tokens=4)

    def __call__(self, batch: Any) -> Any:
        outputs = self.llm.generate(batch["prompt"], self.params, use_tqdm=False)
        assert [output.prompt for output in outputs] == [str(each) for each in batch["prompt"]], type(batch["prompt"])
        texts = [output.outputs[0].text for output in outputs]
        return {"prompt": [output.prompt for output in outputs], "answer": texts}


def main() -> None:
    import datasets
    import pandas
    import pyarrow
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = [{"prompt": f"hello {n}"} for n in range(8)]
    for kind in ("numpy", "pandas", "pyarrow"):
        given = ray.data.from_items(rows)
        answered = given.map_batches(Generate, batch_format=kind, batch_size=4, concurrency=1).take_all()
        assert sorted(each["prompt"] for each in answered) == sorted(each["prompt"] for each in rows), kind
    ray.shutdown()
    step = Generate()
    column: Any
    for column in (
        pandas.Series(["a", "b"]),
        pandas.Series(["a", "b"], dtype="string"),
        pandas.Index(["a", "b"]),
        pyarrow.array(["a", "b"]),
        pyarrow.chunked_array([["a"], ["b"]]),
        list(pyarrow.array(["a", "b"])),
        datasets.Dataset.from_dict({"prompt": ["a", "b"]})["prompt"],
        datasets.Dataset.from_dict({"prompt": ["a", "b"]}),
    ):
        outputs = step.llm.generate(column, step.params, use_tqdm=False)
        assert [output.prompt for output in outputs] == ["a", "b"], type(column)
    for column in (pyarrow.array([[5, 6], [6, 7]]), pandas.Series([[5, 6], [6, 7]])):
        outputs = step.llm.generate(column, step.params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[5, 6], [6, 7]], type(column)


if __name__ == "__main__":
    main()
