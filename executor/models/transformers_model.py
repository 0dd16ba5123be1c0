"""A model computed by transformers' code, whose attention functions are replaced by Headrace's over the paged cache.

All tokens of a step form one row of transformers' batch. Each has its own position; only attention knows to which
sequence a token belongs.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import has_no_head
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.models.transformers_spec import ATTENTION, BINDING, ForeignAttention, auto_class, register
from headrace.executor.models.vocabulary import put_given
from headrace.executor.sampling.draws import Draws
from headrace.executor.step.batch import StepArrays
from headrace.executor.step.inputs import StepInputs, StepLogits, no_logits
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import AttentionParams, PagedBatch
from headrace.kernels.reference.rotary_cache import LayerCache


class TransformersModel:
    """Used in place of a `Decoder`. Raises ModelError, naming the tensor, if weights and config disagree."""

    choose = None
    """No kernels to choose tokens: the sampler uses its torch ops."""

    def __init__(
        self,
        spec: ArchSpec,
        checkpoint: Checkpoint,
        config: Any,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        """spec: `foreign_spec(config)`."""
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        loaded = _load(checkpoint, config, dtype, trust_remote_code, has_head=spec.has_head)
        self._model = loaded.eval().to(self.device)
        modules = dict(self._model.named_modules())
        self._step = _AttentionInputs()
        for index, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, ForeignAttention)
            setattr(modules[layer.mixer.module], BINDING, PagedAttention(self, self._step, index, layer.mixer))
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        tensors = {id(each): each for each in (*self._model.parameters(), *self._model.buffers())}
        self.weight_bytes = sum(each.nbytes for each in tensors.values())
        """Memory that the weights take."""

    @torch.inference_mode()
    def step(self, arrays: StepArrays, kv_cache: KVCache, draws: Draws | None) -> StepLogits:
        """Computes one step for the model runner: writes the cache, returns logits. Ignores `draws`."""
        inputs = StepInputs.on(self.device, arrays)
        pooled, indices = None, inputs.pooled_indices
        if indices is not None and len(indices):
            pooled = self._states(inputs, kv_cache)[indices].float().cpu().numpy()
        if not self.spec.has_head:
            if pooled is None:
                self._states(inputs, kv_cache)
            return replace(no_logits(), pooled=pooled)
        wanted = inputs.logits_indices
        logits = self._run(inputs, kv_cache, wanted if len(wanted) else wanted.new_zeros(1))

        def at(first: int, last: int) -> Tensor:
            # The head cannot be run separately, so the step runs again; it writes the same keys and values.
            return self._run(inputs, kv_cache, torch.arange(first, last, device=self.device))

        return StepLogits(logits[: len(wanted)], at, pooled=pooled)

    def _tokens(self, inputs: StepInputs) -> dict[str, Tensor]:
        if not inputs.given:
            return {"input_ids": inputs.token_ids[None]}
        embedded = self._model.get_input_embeddings()(inputs.token_ids).clone()
        put_given(embedded, inputs.given, self.dtype, 1.0)
        return {"inputs_embeds": embedded[None]}

    def _states(self, inputs: StepInputs, kv_cache: KVCache) -> Tensor:
        """[num_tokens, hidden]: the states that the head reads; writes all tokens' keys and values."""
        states: Tensor = self._computed(self._model.base_model, inputs, kv_cache).last_hidden_state[0]
        return states

    def _run(self, inputs: StepInputs, kv_cache: KVCache, rows: Tensor) -> Tensor:
        """Logits of tokens `rows` of the step, [len(rows), vocab_size] float32; writes all tokens' keys and values."""
        kept = {"logits_to_keep": rows} if self._keeps_rows else {}
        logits: Tensor = self._computed(self._model, inputs, kv_cache, **kept).logits[0].float()
        return logits if self._keeps_rows else logits[rows]

    @torch.inference_mode()
    def _computed(self, model: Any, inputs: StepInputs, kv_cache: KVCache, **others: Any) -> Any:
        """What transformers' model, or the part of it without a head, makes of a step's tokens."""
        self._step.batches, self._step.cache = inputs.paged_batches, kv_cache
        try:
            return model(**self._tokens(inputs), position_ids=inputs.positions[None], use_cache=False, **others)
        finally:
            self._step.batches, self._step.cache = (), None


class _AttentionInputs:
    """The inputs that the attention of all layers reads while a step runs."""

    batches: tuple[PagedBatch, ...] = ()
    cache: KVCache | None = None


class PagedAttention:
    """The function that one attention module calls: it writes keys and values to the cache, then attends over it."""

    def __init__(self, model: TransformersModel, step: _AttentionInputs, index: int, layer: ForeignAttention) -> None:
        self._step, self._index, self._layer = step, index, layer
        facts: dict[str, Any] = {"device": model.device, "dtype": model.dtype, "head_dim": layer.head_dim}
        self._write = kernels.choose("write_cache", **facts)
        heads = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}
        self._attend = kernels.choose("paged_attention", **facts, **heads)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        cache = self._step.cache
        assert cache is not None, "attention is called within a step"
        layer, own = self._layer, cache.layers[self._index]
        assert isinstance(own, LayerCache), "no layer of transformers' code keeps a state here"
        batch = self._step.batches[cache.groups[self._index]]
        rows = [self._rows(each) for each in (query, key, value)]
        scale = kwargs.get("scaling")
        params = AttentionParams(
            layer.key_size**-0.5 if scale is None else scale, layer.sliding_window, kwargs.get("softcap")
        )
        attended = self._over(rows, own, batch, params)
        return attended[None, :, :, : layer.value_size]

    def _over(self, rows: list[Tensor], own: LayerCache, batch: PagedBatch, params: AttentionParams) -> Tensor:
        query, key, value = rows
        self._write(key, value, own.keys, own.values, batch, own.scales)
        attended: Tensor = self._attend(query, own.keys, own.values, batch, params, own.scales)
        return attended

    def _rows(self, heads: Tensor) -> Tensor:
        """[1, heads, tokens, size] -> [tokens, heads, head_dim], padded with zeros to the cache's head_dim."""
        rows = heads[0].transpose(0, 1)
        missing = self._layer.head_dim - rows.shape[-1]
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()


def _load(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, trust_remote_code: bool, *, has_head: bool) -> Any:
    from transformers.utils import logging

    register()
    kind = auto_class(has_head=has_head)
    options: dict[str, Any] = {"attn_implementation": ATTENTION, "trust_remote_code": trust_remote_code}
    if checkpoint.format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return kind.from_config(config, dtype=dtype, **options)
    if checkpoint.format not in ("safetensors", "pt"):
        raise ModelError(
            f"transformers computes models of safetensors or PyTorch files, and {checkpoint.path} is "
            f"{checkpoint.format}"
        )
    logging.disable_progress_bar()
    try:
        loaded: Any = kind.from_pretrained(
            str(checkpoint.path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the error below can name them
            use_safetensors=checkpoint.format == "safetensors",
            **options,
        )
    except Exception as error:  # whatever transformers finds wrong
        raise ModelError(
            f"transformers cannot read {checkpoint.path}: {type(error).__name__}: {str(error)[:500]}"
        ) from error
    finally:
        logging.enable_progress_bar()
    model, found = loaded
    for key, said in (
        ("missing_keys", "the checkpoint has no weight {}"),
        ("mismatched_keys", "weights have other shapes than the config needs: {}"),
        ("unexpected_keys", "the checkpoint holds weights that this architecture has no place for: {}"),
    ):
        names = sorted(_shown(each) for each in found.get(key) or ())
        if key == "unexpected_keys" and not has_head and not has_no_head(checkpoint.config):
            names = [
                each for each in names if each.startswith(f"{model.base_model_prefix}.")
            ]  # the others are its head
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(said.format(shown))
    return model


def _shown(weight: Any) -> str:
    """Text for an entry of transformers' loading report: a name, or (name, stored shape, shape by the config)."""
    if isinstance(weight, str):
        return weight
    name, stored, needed = weight
    return f"{name} is {list(stored)} and {list(needed)} is needed"
