"""A GPU's memory given back, taken again and given to other weights, with the CPU in the GPU's place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import tiny_models
import torch
from gpu_parts import GpuOnCpu, LateDevice
from model_driver import DictSource
from patience import wait_until

from headrace import LLM, SamplingParams
from headrace.executor.gpu.kernels import Rounding, quantising
from headrace.executor.gpu.weights import residency as weight_residency
from headrace.executor.gpu.weights.residency import HostCopy, check_room, free, pinned, storages_of, tensors_of
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.control import ReloadWeights
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.host import HostMemory
from headrace.kernels.registry import choose_reference

CPU = torch.device("cpu")
PROMPTS: list[Any] = [{"prompt_token_ids": [7, 8, 9, 10, 11, 12, 13]}, {"prompt_token_ids": [5]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **{"in_process": True, "device": "cpu", "distributed_executor_backend": "gpu_parts:GpuOnCpuExecutor"},
    **{"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4},
}


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def held_bytes(executor: Any = None) -> int:
    decoder = (executor or GpuOnCpu.latest)._residence.decoder
    return sum(storage.nbytes() for storage in storages_of(decoder, CPU))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one config, and one of another."""
    found = {"own": tiny_models.save("llama", tmp_path_factory.mktemp("own"))}
    found["other"] = tmp_path_factory.mktemp("other")
    model = tiny_models.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01)
    model.save_pretrained(found["other"])
    found["foreign"] = tiny_models.save("qwen3", tmp_path_factory.mktemp("foreign"))
    return found


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(folders["own"]), enable_sleep_mode=True, **SETTINGS) as it:
        yield it


def captured(llm: LLM) -> int:
    """How many graphs there are, after some steps that lacked them."""
    tokens_of(llm)
    return len(GpuOnCpu.latest.steps.graphs)


def graphs_of(executor: GpuOnCpu) -> list[Any]:
    """Those that there are now: an engine without work captures more at any time."""
    return list(executor.steps.graphs._graphs.values())


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_answers_as_before_through_new_graphs(level: int, llm: LLM) -> None:
    before, held = tokens_of(llm), held_bytes()
    assert captured(llm) > 0
    llm.sleep(level=level)
    assert len(GpuOnCpu.latest.steps.graphs) == 0, "their addresses are no longer the weights'"
    assert not GpuOnCpu.latest.idle(), "nothing is captured of what is not there"
    assert held_bytes() == 0
    llm.wake_up(["weights"])
    assert held_bytes() == held
    llm.wake_up()
    assert tokens_of(llm) == before
    replays = GpuOnCpu.latest.recorder.num_replays
    assert captured(llm) > 0
    assert tokens_of(llm) == before
    assert GpuOnCpu.latest.recorder.num_replays > replays


def test_new_weights_take_the_old_ones_place_or_these_come_back(
    llm: LLM, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, before, held = GpuOnCpu.latest, tokens_of(llm), held_bytes()
    captured(llm)
    of_old_weights = graphs_of(executor)
    assert of_old_weights
    llm.reload_weights(str(folders["other"]))
    assert held_bytes() == held
    assert not any(graph is old for graph in graphs_of(executor) for old in of_old_weights)
    with LLM(str(folders["other"]), **SETTINGS) as fresh:
        expected = tokens_of(fresh)
    assert tokens_of(llm) == expected != before
    num_graphs = len(executor.steps.graphs)
    assert num_graphs > 0
    for path, words in (("foreign", "cannot replace those of"), ("missing", "missing")):
        with pytest.raises(HeadraceError, match=words):
            llm.reload_weights(str(folders.get(path, folders["own"] / path)))
        assert tokens_of(llm) == expected, "what was read before still serves"
    assert len(executor.steps.graphs) >= num_graphs, "nothing was moved for a checkpoint that is not fit"

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory\nand so on")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.executor.models.decoder.Decoder._read_end", fail)
        with pytest.raises(HeadraceError, match=r"could not be read: no more memory\n  in"):
            llm.reload_weights()
    assert held_bytes(executor) == held
    assert tokens_of(llm) == expected, "the old ones have come back"
    llm.reload_weights()
    assert tokens_of(llm) == before


@pytest.mark.system
def test_weights_whose_reading_hangs_are_given_up_and_the_old_ones_come_back_or_still_sleep(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount_is_back = threading.Event()
    read_end, said = Decoder._read_end, r"reading the weights did not end within 0\.5 s \(control_timeout\)"

    def hang(decoder: Decoder, *arguments: Any) -> None:
        mount_is_back.wait(30)
        read_end(decoder, *arguments)

    def go_on(rank: GpuOnCpu) -> None:
        assert rank._bounded._hanging is not None
        mount_is_back.set()
        rank._bounded._hanging[1].join(60)
        mount_is_back.clear()

    with LLM(str(folders["own"]), enable_sleep_mode=True, control_timeout=0.5, **SETTINGS) as own:
        rank, before = GpuOnCpu.latest, tokens_of(own)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_read_end", hang)
            with pytest.raises(HeadraceError, match=said):
                own.reload_weights(str(folders["other"]))
            assert tokens_of(own) == before
            go_on(rank)
            with monkeypatch.context() as longer:
                longer.setattr(rank._bounded, "_timeout_s", 60.0)  # a busy machine takes a while to fall asleep
                own.sleep(level=2)
            with pytest.raises(HeadraceError, match=said):
                own.wake_up()
            assert own.is_sleeping()
            go_on(rank)
        monkeypatch.setattr(rank._bounded, "_timeout_s", 60.0)
        own.wake_up()
        assert tokens_of(own) == before


class Stingy(LateDevice):
    def host_buffer(self, num_elements: int) -> torch.Tensor:
        raise RuntimeError("too much\nmore than anybody wants to know")


def test_what_has_no_room_is_refused_with_numbers_and_can_be_tried_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens_of(llm)
    with monkeypatch.context() as patch:
        patch.setattr(weight_residency, "host_memory", lambda: HostMemory(1 << 30, 1 << 10))
        with pytest.raises(
            HeadraceError, match=r"sleep level 1 needs 0\.00 GiB of the host's memory, and 0\.00 GiB are"
        ):
            llm.sleep()
        with pytest.raises(HeadraceError, match=r"to keep the old weights while new ones are read needs 0\.00 GiB of"):
            llm.reload_weights()
    assert not llm.is_sleeping()
    assert tokens_of(llm) == before
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr("gpu_parts.HostBackend.memory", lambda backend: (1 << 10, 1 << 30))
        with pytest.raises(
            HeadraceError, match=r"waking the weights needs .* of the GPU's 1\.00 GiB are free: another"
        ):
            llm.wake_up()
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens_of(llm) == before
    with pytest.raises(HeadraceError, match=r"a nap needs pinned memory of the host, .* allocated: too much"):
        pinned(Stingy(), 100, "a nap")
    with pytest.raises(HeadraceError, match="waking the cache needs"):
        check_room(1 << 31, (1 << 30, 1 << 32), "waking the cache")


# --- what is found and moved ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa_tied", "qwen3", "gemma2", "opt"])
@pytest.mark.parametrize("kind", ["", "int4", "fp8"])
def test_all_of_a_models_memory_is_found(name: str, kind: str) -> None:
    model = tiny_models.build(name)
    spec = spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    choose = quantising(choose_reference, Rounding(kind, 32)) if kind else choose_reference
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    decoder = Decoder(spec, DictSource(weights), torch.bfloat16, choose=choose)
    storages = storages_of(decoder, CPU)
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    small = sum(tensor.nbytes for rotary in decoder._rotaries for tensor in tensors_of(rotary))
    assert decoder.weight_bytes <= sum(storage.nbytes() for storage in storages) <= decoder.weight_bytes + small + 1024


def test_bytes_come_back_from_small_pieces_whatever_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_residency, "PIECE_BYTES", 64)
    tensors = [torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.int8).clone() for size in (1, 63, 64, 200, 7)]
    view = tensors[3][:100].view(torch.float32)
    wanted = [tensor.clone() for tensor in tensors]
    storages = storages_of({"first": tensors, "second": (view, tensors[0])}, CPU)
    device = LateDevice()
    copy = HostCopy(storages, device, "a test")
    assert device.num_waits == 1, "what is still on its way when its source goes is lost"
    assert copy.nbytes == 335
    free(storages)
    assert not any(storage.nbytes() for storage in storages)
    copy.restore()
    assert all(found.equal(expected) for found, expected in zip(tensors, wanted, strict=True))
    assert view.view(torch.int8).equal(wanted[3][:100])


@pytest.mark.parametrize("part", ["forget", "use"])
def test_requests_stand_still_while_new_weights_have_the_old_ones_memory(
    part: Literal["use", "forget"], folders: dict[str, Path]
) -> None:
    """Of several engines, each waits until all have read them."""
    with LLM(str(folders["own"]), **SETTINGS) as own:

        def reload(part: Literal["prepare", "use", "forget"]) -> None:
            own._background.run(own._client.control(ReloadWeights(path=str(folders["other"]), part=part), None))

        def num_waiting() -> int:
            return own._background.run(own._client.get_stats()).num_waiting

        rank, before, held, found = GpuOnCpu.latest, tokens_of(own), held_bytes(), list[list[list[int]]]()
        reload("prepare")
        assert held_bytes() == 0
        assert not rank.idle(), "nothing is captured of what is not there"
        asks = threading.Thread(target=lambda: found.append(tokens_of(own)))
        asks.start()
        wait_until(lambda: num_waiting() == len(PROMPTS), 60, "requests that wait")
        reload(part)
        asks.join(60)
        assert held_bytes() == held
        assert (found == [before]) == (part == "forget")
        assert found == [tokens_of(own)]
