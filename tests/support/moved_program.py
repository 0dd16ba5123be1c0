"""A program written for vLLM, after its import has been changed."""

import argparse
import asyncio

from headrace import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams, envs
from headrace.config import CompilationConfig, ModelConfig
from headrace.engine.arg_utils import EngineArgs as Args
from headrace.inputs import TokensPrompt
from headrace.logprobs import Logprob
from headrace.outputs import CompletionOutput
from headrace.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from headrace.usage.usage_lib import UsageContext
from headrace.utils import FlexibleArgumentParser
from headrace.v1.engine.async_llm import AsyncLLM
from headrace.v1.metrics.reader import Counter, Metric


def offline() -> list[str]:
    llm = LLM(
        model="m",
        tensor_parallel_size=2,
        gpu_memory_utilization=0.9,
        swap_space=4,
        enable_lora=False,
        attention_backend="FLASH_ATTN",
        compilation_config=CompilationConfig(mode=0),
        disable_custom_all_reduce=True,
        enforce_eager=True,
        max_model_len=4096,
        trust_remote_code=True,
        use_v2_block_manager=True,
    )
    params = SamplingParams(
        n=1,
        temperature=0.8,
        top_p=0.95,
        max_tokens=64,
        stop=["\n"],
        logprobs=2,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs: list[RequestOutput] = llm.generate(["a", TokensPrompt(prompt_token_ids=[1])], params)
    best: CompletionOutput = outputs[0].outputs[0]
    position: dict[int, Logprob] = best.logprobs[0] if best.logprobs else {}
    print(max(each.logprob for each in position.values()))
    found = llm.beam_search([{"prompt": "a"}], BeamSearchParams(beam_width=2, max_tokens=3))
    metrics: list[Metric] = llm.get_metrics()
    print(found[0].sequences[0].cum_logprob, [each.value for each in metrics if isinstance(each, Counter)])
    chat = llm.chat([{"role": "user", "content": "hi"}], params)
    return [output.outputs[0].text for output in [*outputs, *chat]]


def by_hand(arguments: argparse.Namespace) -> None:
    args = EngineArgs.from_cli_args(arguments)
    args.max_num_seqs = 4
    engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    engine.add_request("0", "a", SamplingParams())
    config: ModelConfig = engine.model_config
    print(config.max_model_len, Args.max_num_seqs, envs.VLLM_LOGGING_LEVEL)
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.finished)


async def streaming() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="m", enable_lora=False))
    async for output in engine.generate("a", SamplingParams(), "0"):
        print(output.outputs[0].text)
    other: AsyncLLM = AsyncLLM.from_engine_args(AsyncEngineArgs("m"))
    other.shutdown()


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    by_hand(parser.parse_args())
    asyncio.run(streaming())
