"""Maps an adapter's modules to the linear layers that the model's blocks declare.

    adapter    qkv_proj: A [16, 64], B [96, 16]
    declared   q_proj [32, 64], k_proj [32, 64], v_proj [32, 64]: rows 0.., 32.. and 64.. of B, and one A

What is true of a matrix's rows is true of its B's: parts of fused tensors, reordered rotary pairs, padding and this
rank's share are those of declared_weights.py and padding.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.executor.adapters.adapter import SHOWN, Adapter, AdapterModule
from headrace.executor.adapters.heads import HeadDelta
from headrace.executor.checkpoints.declared_weights import StoredRows, places_of
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import AttendLatent, Declared, ExpertStack, LayerDeclaration, Linear, size_of
from headrace.executor.models.blocks.shared_transformer import Tied
from headrace.executor.models.heads import HeadLinear, HeadNorm
from headrace.executor.models.reading import own_part
from headrace.executor.parallel.padding import GrownAxis, Span, grown_axes
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable
from headrace.kernels.low_rank import EmbeddingDelta, LowRank, LowRankExperts, LowRankPart

Delta = LowRank | LowRankExperts | EmbeddingDelta | HeadDelta
ReadBase = Callable[[], WeightSource]
"""The model's weights under the declared names, without padding."""
Factors = tuple[Tensor, Tensor]
"""A [rank, in_features] and B [out_features, rank], float32."""
FIRST_OF_FACTORS_IN_ORDER = (0, 19, 1)
"""The version of peft since which A of experts is of their inputs, whatever transformers calls them."""
GATED_DELTA = ".linear_attn."
STACKED = "mlp.experts"
"""The module of experts in transformers, whatever a checkpoint's names are."""


@dataclass(frozen=True, eq=False)
class AdaptableLayers:
    """The linear layers of one rank that adapters may change."""

    spec: ArchSpec
    """Without padding."""
    padded: ArchSpec
    place: RankCoordinates
    prefix: str
    """Of the model's names in its checkpoint."""
    read_base: ReadBase
    target_modules: tuple[str, ...] = ()
    """Ends of the names of modules that adapters may change; empty: all."""

    @cached_property
    def declared(self) -> list[_LayerParts]:
        """Of each layer: what its blocks declare, and the same without padding."""
        return [_parts_of_layer(self, *each) for each in zip(self.padded.layers, self.spec.layers, strict=True)]

    @cached_property
    def ends(self) -> tuple[list[tuple[Linear, Linear]], list[tuple[Linear, Linear]]]:
        """Linear layers before the first layer of the model and after the last, each with the same without padding.
        Their names are relative to the prefix."""
        first, last = zip(*(_linears_at_ends(each) for each in (self.padded, self.spec)), strict=True)
        return list(zip(*first, strict=True)), list(zip(*last, strict=True))

    @cached_property
    def grown(self) -> dict[str, dict[int, GrownAxis]]:
        return grown_axes(self.spec, self.padded, self.prefix)

    def deltas(self, adapter: Adapter) -> tuple[dict[str, Delta], bool]:
        """By the name of the layer's first matrix, of the head, of the embedding, and of a classifier's layer; and
        whether they depend on the model's weights too.

        Raises ModelError for a module that the model does not have, or that no adapter can change, and for factors that
        do not fit the model's matrices."""
        mapped = _Mapped(self, adapter)
        return mapped.deltas(), mapped.reads_base


@dataclass(eq=False)
class _Mapped:
    """The mapping of one adapter."""

    layers: AdaptableLayers
    adapter: Adapter
    modules: dict[str, AdapterModule] = field(init=False)
    """By the model's names."""
    places: dict[str, StoredRows] = field(init=False)
    used: set[str] = field(default_factory=set)
    _base: WeightSource | None = None

    def __post_init__(self) -> None:
        layers, spec = self.layers, self.layers.spec
        chosen = [each for each in self.adapter.modules.values() if _is_chosen(each.name, layers.target_modules)]
        self.modules = {self._own_name(each.name): each for each in chosen}
        if len(self.modules) < len(chosen):
            twice = next(each.name for each in chosen if self.modules[self._own_name(each.name)] is not each)
            raise self._error(f"{printable(twice)} is there twice, under another name too")
        held = {f"{name}.{kind}" for name in self.modules for kind in ("weight", "bias")}
        self.places = places_of(spec, frozenset((*held, f"{layers.prefix}{spec.names.embedding}.weight")))

    @property
    def base(self) -> WeightSource:
        if self._base is None:
            self._base = self.layers.read_base()
        return self._base

    @property
    def reads_base(self) -> bool:
        return self._base is not None

    def deltas(self) -> dict[str, Delta]:
        spec, place = self.layers.spec, self.layers.place
        self._check_factors()
        own = {spec.layer_prefix(self.layers.prefix, index) for index in place.layers(spec.num_layers)}
        found: dict[str, Delta] = {}
        for index, layer in enumerate(self.layers.declared):
            start = spec.names.layer(self.layers.prefix, index)
            for linear, unpadded, tied in layer.linears:
                matrices = self._matrices(start, linear, unpadded, start if tied is None else tied.source_of(start))
                if matrices and linear.matrices[0][0] == spec.names.latent_up and self.adapter.config.invocation_tokens:
                    raise self._error(
                        f"{matrices[0].name}: an activated adapter changes tokens from one on, and this matrix the "
                        "keys and values of all"
                    )
                if start in own and matrices:
                    found[start + linear.matrices[0][0]] = self._low_rank(linear, matrices)
            for stack, whole in layer.stacks:
                experts = self._experts(start, stack, whole)
                if start in own and experts is not None:
                    found[start + stack.gates[0]] = experts
        found |= self._linears_at_ends()
        if (table := self.modules.get(name := f"{self.layers.prefix}{spec.names.embedding}")) is not None:
            embedding = self._embedding(table)
            if place.is_first_stage:
                found[name] = embedding
        for name in spec.names.lm_heads:
            if spec.has_head and (module := self.modules.get(name)) is not None:
                head = self._head(module)
                if place.is_last_stage:
                    found[name] = head
        classifier = () if spec.classifier is None else spec.classifier.layers
        for behind in (each for each in classifier if isinstance(each, HeadLinear | HeadNorm)):
            delta = self._classifier(behind)
            if place.is_last_stage and delta is not None:
                found[behind.name] = delta
        self._check_used()
        self._check_order()
        return found

    def _linears_at_ends(self) -> dict[str, LowRank]:
        place, prefix, found = self.layers.place, self.layers.prefix, dict[str, LowRank]()
        for linears, is_own in zip(self.layers.ends, (place.is_first_stage, place.is_last_stage), strict=True):
            for linear, unpadded in linears:
                matrices = self._matrices(prefix, linear, unpadded, prefix)
                if is_own and matrices:
                    found[prefix + linear.matrices[0][0]] = self._low_rank(linear, matrices)
        return found

    def _experts(self, start: str, stack: ExpertStack, unpadded: ExpertStack) -> LowRankExperts | None:
        """What the adapter has for a layer's experts on this rank: of each by itself, or of all in one tensor."""
        place, count = self.layers.place, len(stack.gates)
        factors = self._factors_of_experts(start, stack, unpadded)
        if not factors:
            return None
        is_whole = place.has_whole_experts(count)
        own = None if is_whole else own_part(stack.inner, place)
        gate_ups, downs = list[LowRank | None](), list[LowRank | None]()
        for expert in range(count) if is_whole and place.balances_experts else place.experts(count):
            pair = [factors.get(start + names[expert]) for names in (stack.gates, stack.ups)]
            gate_ups.append(_side_by_side(pair, self._inner(stack, unpadded), own))
            downs.append(_from_inner(factors.get(start + stack.downs[expert]), self._inner(stack, unpadded), own))
        return LowRankExperts(tuple(gate_ups), tuple(downs))

    def _inner(self, stack: ExpertStack, unpadded: ExpertStack) -> GrownAxis:
        """The inner dimension of experts, which padding may have enlarged."""
        size = unpadded.inner.size
        return GrownAxis(size, stack.inner.size, (Span(0, 0, size),))

    def _factors_of_experts(self, start: str, stack: ExpertStack, unpadded: ExpertStack) -> dict[str, Factors]:
        """(A, scaled B) by the name of the expert's matrix."""
        found = dict[str, Factors]()
        inner, hidden = unpadded.inner.size, stack.hidden
        of_each = ((stack.gates, (inner, hidden)), (stack.ups, (inner, hidden)), (stack.downs, (hidden, inner)))
        for names, shape in of_each:
            for name in names:
                if (module := self._module(start + name)) is not None:
                    self._plain(module)
                    a, b = (each.float() for each in self._factors(module, shape))
                    scaling = self.adapter.config.scaling(module.name, len(a)) * self._factor(start + name)
                    found[start + name] = a, b * scaling
        stacked_modules = self._stacked_modules(start, stack)
        is_gated = stack.gates != stack.ups
        first, last = (2 * inner if is_gated else inner, hidden), (hidden, inner)
        is_swapped = self._are_swapped(stacked_modules, first, last)
        if first == last and len(stacked_modules) == 1:
            raise self._error(
                f"{stacked_modules[0].name}: which of the experts' two matrices it is for cannot be told by its shape"
            )
        for module in stacked_modules:
            a, b = (each.float() for each in module.factors or ())
            shape = (a.shape[1], len(b)) if is_swapped else (len(b), a.shape[1])
            # peft wraps the first matrix first.
            is_down = not module.name.endswith(".base_layer") if first == last else shape == last
            count = self._num_stacked(stack, is_down=is_down)
            if len(a) % count or shape not in (first, last):
                raise self._error(
                    f"{module.name} has factors of {list(a.shape)} and {list(b.shape)}, and the model has {count} "
                    f"experts of {list(first)} and {list(last)}"
                )
            if is_swapped:
                a, b = _swapped(a, b, count)
            self._check_rank(module, len(a) // count)
            # As peft names the tensor, whatever module wraps it.
            tensor = "down" if is_down else "gate_up" if is_gated else "up"
            parameter = f"{module.name.removesuffix('.base_layer')}.{tensor}_proj"
            b = b * self.adapter.config.scaling(parameter, len(a) // count)
            if is_down:
                parts = [(stack.downs, slice(None))]
            elif not is_gated:
                parts = [(stack.ups, slice(None))]
            elif (stacked := self.layers.spec.stacked) is not None and stacked.alternating:
                parts = [(stack.gates, slice(0, None, 2)), (stack.ups, slice(1, None, 2))]
            else:
                parts = [(stack.gates, slice(0, inner)), (stack.ups, slice(inner, None))]
            each_a, each_b = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count))
            for names, own in parts:
                for i, name in enumerate(names[:count]):
                    found[start + name] = each_a[i], each_b[own, :, i] * self._factor(start + name)
        return found

    def _num_stacked(self, stack: ExpertStack, *, is_down: bool) -> int:
        """The experts of a layer whose matrices are one tensor in transformers: those of another have a number of their
        own there, and some that compute nothing may have a part of the first matrices."""
        own = (each.first for each in self.layers.spec.also_stacked if each.first)
        return min(own, default=len(stack.gates)) + (0 if is_down else stack.num_unread)

    def _stacked_modules(self, start: str, stack: ExpertStack) -> list[AdapterModule]:
        """Modules whose factors are of all experts: peft wraps the module of experts once for each of its tensors."""
        spec = self.layers.spec
        names = [spec.names.experts, STACKED]
        if not stack.gates[0].startswith(f"{spec.names.experts}."):
            return []  # a shared expert
        if spec.stacked is not None:
            names.append(spec.stacked.gate_up.rpartition(".")[0])
        below = [start]
        if spec.names.sublayers > 1:  # whose number names of what one alone has are without
            below.append(re.sub(r"\.\d+\.$", ".", start))
        wrapped = [
            f"{place}{name}{'.base_layer' * depth}"
            for place in below
            for name in dict.fromkeys(names)
            for depth in range(2)
        ]
        return [self.modules[name] for name in wrapped if name in self.modules]

    def _are_swapped(self, modules: Sequence[AdapterModule], first: tuple[int, int], last: tuple[int, int]) -> bool:
        """Whether A and B of stacked experts have each other's place, as peft wrote them before 0.19.1: it took the
        experts' tensors for [experts, in_features, out_features]. first, last: the shapes of an expert's two matrices,
        which show it, unless all are square, or the second is the first transposed."""
        stored, found = (first, last), set[bool]()
        for module in modules:
            self._plain(module)
            assert module.factors is not None, "_plain has looked"
            shape = len(module.factors[1]), module.factors[0].shape[1]
            if (shape in stored) != (shape[::-1] in stored):
                found.add(shape not in stored)
        names = " and ".join(each.name for each in modules)
        if len(found) > 1:
            raise self._error(f"{names}: the factors of one have each other's shapes, those of another do not")
        if modules and not found and self.adapter.config.peft_version < FIRST_OF_FACTORS_IN_ORDER:
            version = ".".join(map(str, self.adapter.config.peft_version)) or "an unknown version"
            raise self._error(
                f"{names}: which factor is A and which is B cannot be told by their shapes, and it was saved by peft "
                f"{version}; files of peft 0.19.1 and later have them in order"
            )
        return found == {True}

    def _plain(self, module: AdapterModule) -> None:
        """Raises ModelError unless it has factors and nothing else."""
        self.used.add(module.name)
        others = (module.b_bias, module.embedding_a, module.magnitude, module.weight, module.bias)
        if module.factors is None or any(each is not None for each in others):
            raise self._error(f"{module.name}: of experts, the two factors of plain LoRA alone are supported")

    def _embedding(self, module: AdapterModule) -> EmbeddingDelta:
        spec = self.layers.spec
        shape = (spec.vocab_size, spec.embedding_width)
        self.used.add(module.name)
        if module.factors is not None or module.bias is not None:
            raise self._error(f"{module.name} has what only linear layers have")
        self._pass_over_norm()
        a, b = torch.zeros(shape[0], 0), torch.zeros(0, shape[1])
        if module.embedding_a is not None and module.embedding_b is not None:
            a, b = module.embedding_a.float().T, module.embedding_b.float().T
            self._check_shape(module.name, (len(a), b.shape[1]), shape)
            self._check_rank(module, len(b))
            b = b * self.adapter.config.scaling(module.name, len(b))
        rows = None
        if module.weight is not None:
            self._check_vocabulary(module.name, module.weight, shape)
            if not self._is_copy(module.weight, f"{module.name}.weight"):
                rows = module.weight.float()
        if module.magnitude is not None:  # of each dimension, whose norm is over the vocabulary
            turned = self.base.get(self._head_name(f"{module.name}.weight")).float() + a @ b
            rows = turned * (module.magnitude.float().reshape(-1) / torch.linalg.norm(turned, dim=0))
            a, b = a[:, :0], b[:0]
        if rows is not None and not spec.norms_given:
            raise self._error(
                f"{module.name} takes the embedding's place (modules_to_save, or DoRA), which this model norms; the "
                "factors of plain LoRA are added to it"
            )
        return EmbeddingDelta(a, b, rows)

    def _pass_over_norm(self) -> None:
        """Of embeddings, which transformers has in their module, so that peft saves the model's own beside factors."""
        name = f"{self.layers.prefix}{self.layers.spec.names.embedding_norm}"
        module = None if self.layers.spec.norms_given else self.modules.get(name)
        if module is not None and module.weight is not None and self._is_copy(module.weight, f"{name}.weight"):
            self.used.add(module.name)

    def _head(self, module: AdapterModule) -> LowRank:
        spec, place = self.layers.spec, self.layers.place
        shape = (spec.vocab_size, spec.embedding_width)
        self.used.add(module.name)
        if spec.unit_head:
            raise self._error(
                f"{module.name}: the rows of this model's head are normalised, which an adapter cannot change"
            )
        if module.embedding_a is not None or (module.bias is not None and not spec.head_bias):
            raise self._error(f"{module.name} has what the model's head has not")
        if module.b_bias is not None and spec.logit_scale != 1:
            raise self._error(
                f"{module.name} has a bias (lora_bias), and the model multiplies its logits: models differ in whether "
                "that is multiplied too"
            )
        own = place.vocabulary(spec.vocab_size) if place.tp_size > 1 else slice(0, spec.vocab_size)
        own = slice(own.start, min(own.stop, spec.vocab_size))
        if module.weight is not None:
            self._check_vocabulary(module.name, module.weight, shape)
        if module.weight is not None and not self._is_copy(module.weight, f"{module.name}.weight"):
            if module.factors is not None:
                raise self._error(f"{module.name} has factors beside a matrix in the place of the model's own")
            whole = module.weight.float()[own]
            return LowRank(len(whole), torch.zeros(0, shape[1]), bias=self._head_bias(module, own), whole=whole)
        a, parts, bias = torch.zeros(0, shape[1]), tuple[LowRankPart, ...](), self._head_bias(module, own)
        magnitude = None
        if module.factors is not None:
            a, b = self._factors(module, shape)
            scaling = self.adapter.config.scaling(module.name, len(a))
            parts = (LowRankPart(0, 0, b[own], scaling),)
            if module.b_bias is not None:
                added = module.b_bias.float()[own] * scaling
                bias = added if bias is None else bias + added
            if module.magnitude is not None:
                weight = self.base.get(self._head_name(f"{module.name}.weight"), rows=own).float()
                magnitude = module.magnitude.float().reshape(-1)[own] / _norms(weight, a, b[own], scaling)
            a = _of_even_rank(a)
        return LowRank(own.stop - own.start, a, parts, bias, magnitude)

    def _head_name(self, name: str) -> str:
        """The model's own matrix of the head, which may be that of the embedding."""
        tied = f"{self.layers.prefix}{self.layers.spec.names.embedding}.weight"
        return name if name in self.base.names() else tied

    def _classifier(self, layer: HeadLinear | HeadNorm) -> HeadDelta | None:
        """What the adapter has for a layer behind the pooling, of which each rank has all."""
        names = (prefix + layer.name for prefix in self._prefixes)
        module = next((self.modules[each] for each in names if each in self.modules), None)
        if module is None:
            return None
        self.used.add(module.name)
        shape, name = (layer.size,) if isinstance(layer, HeadNorm) else (layer.rows, layer.columns), module.name
        if self.adapter.config.invocation_tokens:
            raise self._error(f"{name}: an activated adapter changes tokens, and no layer of a classifier")
        if module.embedding_a is not None or (module.weight is not None and module.factors is not None):
            raise self._error(f"{name} has factors of an embedding, or beside a matrix in the place of the model's own")
        if not layer.bias and module.bias is not None:
            raise self._error(f"{name} has a bias, and the model's has none")
        self._check_bias(module, shape[0])
        if module.weight is not None:
            self._check_shape(name, tuple(module.weight.shape), shape)
            if layer.bias and module.bias is None:
                raise self._error(f"{name} has a matrix in the place of the model's own, and no bias")
            return HeadDelta(module.weight.float(), None if module.bias is None else module.bias.float(), replaces=True)
        if isinstance(layer, HeadNorm):
            raise self._error(f"{name} is a norm, which an adapter replaces whole")
        weight, bias = torch.zeros(shape), torch.zeros(layer.rows)
        if module.factors is not None:
            a, b = self._factors(module, shape)
            scaling = self.adapter.config.scaling(name, len(a))
            weight = scaling * (b.float() @ a.float())
            if module.b_bias is not None:
                bias = bias + scaling * module.b_bias.float()
        if module.magnitude is not None:
            own = self._of_classifier(layer, "weight")
            turned = own + weight
            weight = (module.magnitude.float().reshape(-1) / torch.linalg.norm(turned, dim=1))[:, None] * turned - own
        if module.bias is not None:
            bias = bias + module.bias.float() - self._of_classifier(layer, "bias")
        return HeadDelta(weight, bias, replaces=False)

    def _of_classifier(self, layer: HeadLinear, kind: str) -> Tensor:
        """The model's own tensor of a layer behind the pooling."""
        names = (f"{prefix}{layer.name}.{kind}" for prefix in self._prefixes)
        return self.base.get(next(each for each in names if each in self.base.names())).float()

    @property
    def _prefixes(self) -> tuple[str, ...]:
        """Under which a checkpoint may have a layer behind the pooling."""
        return ("", self.layers.prefix, *self.layers.spec.names.prefixes)

    def _head_bias(self, module: AdapterModule, own: slice) -> Tensor | None:
        if module.bias is None:
            return None
        self._check_bias(module, self.layers.spec.vocab_size)
        return module.bias.float()[own] - self.base.get(f"{module.name}.bias").float()[own]

    def _is_copy(self, weight: Tensor, name: str) -> bool:
        """Whether it is the model's own matrix, which peft saves beside factors for it."""
        base = self.base.get(self._head_name(name))
        return torch.equal(weight.to(base.dtype), base)

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise self._error(
                f"{name} is of a matrix of {list(found)}, and the model's has {list(shape)}: it is of another model"
            )

    def _check_bias(self, module: AdapterModule, rows: int) -> None:
        """Of one in the place of the model's."""
        if module.bias is not None and tuple(module.bias.shape) != (rows,):
            raise self._error(
                f"{module.name} has a bias of {list(module.bias.shape)}, and the model's has {[rows]}: it is of "
                "another model"
            )

    def _check_vocabulary(self, name: str, weight: Tensor, shape: tuple[int, int]) -> None:
        """Of a whole matrix in the place of the embedding's or the head's."""
        found = tuple(weight.shape)
        if len(found) == 2 and found[1] == shape[1] and found[0] != shape[0]:
            raise self._error(
                f"{name} is of a vocabulary of {found[0]}, and the model's has {shape[0]}: it was trained with tokens "
                "added or left out; save the model with the same vocabulary (resize_token_embeddings), and use that"
            )
        self._check_shape(name, found, shape)

    def _own_name(self, name: str) -> str:
        """An adapter's name of a module as the model has it; the prefix may be another."""
        inside = name.replace(".base_layer.", ".")  # of a module in the one that peft wraps
        return self.layers.spec.names.own(f"{self._with_prefix(inside)}.weight").removesuffix(".weight")

    def _with_prefix(self, name: str) -> str:
        names, prefix = self.layers.spec.names, self.layers.prefix
        if name.startswith(prefix) or name in names.lm_heads:
            return name
        known = sorted((*names.prefixes, *(each.partition(".")[2] for each in names.prefixes)), key=len, reverse=True)
        return next((prefix + name.removeprefix(each) for each in known if name.startswith(each)), name)

    def _matrices(self, start: str, linear: Linear, unpadded: Linear, source: str) -> list[_Matrix]:
        """What the adapter has for a layer's matrices. source: as `start`, of the layer whose names the model's own
        matrices have."""
        found, first = [], 0
        for (name, rows), (_, whole) in zip(linear.matrices, unpadded.matrices, strict=True):
            full, own = start + name, own_part(rows, self.layers.place)
            place, module = self.places.get(f"{full}.weight"), self._module(full)
            taken = size_of(rows) if own is None else own.stop - own.start
            if module is not None:
                self.used.add(module.name)
                shape = (size_of(whole) if place is None else place.num_stored, size_of(unpadded.columns))
                found.append(_Matrix(source + name, module, place, first, shape, own))
            first += taken
        return found

    def _module(self, full: str) -> AdapterModule | None:
        """What the adapter has for a declared matrix, or for the tensor that its rows are stored in."""
        place = self.places.get(f"{full}.weight")
        return self.modules.get(full if place is None else place.name.removesuffix(".weight"))

    def _low_rank(self, linear: Linear, matrices: list[_Matrix]) -> LowRank:
        place, config = self.layers.place, self.adapter.config
        columns, total = own_part(linear.columns, place), 0
        for _, rows in linear.matrices:
            own = own_part(rows, place)
            total += size_of(rows) if own is None else own.stop - own.start
        factors, parts, first_columns = [], [], dict[str, int]()
        width = 0
        bias = magnitude = None
        for each in matrices:
            module = each.module
            if module.weight is not None or module.embedding_a is not None:
                raise self._error(f"{module.name} has a whole matrix in its place, which only {self._whole()} may have")
            if module.factors is None:
                continue
            first, second = self._factors(module, each.shape)
            if module.name not in first_columns:
                first_columns[module.name] = width
                a = _own(first.T, self.layers.grown.get(f"{each.name}.weight", {}).get(1), columns).T
                factors.append(_of_even_rank(a))
                width += factors[-1].shape[0]
            scaling = config.scaling(module.name, first.shape[0]) * self._factor(each.name)
            parts.append(LowRankPart(each.first, first_columns[module.name], self._rows(each, second), scaling))
        bias, magnitude = self._bias(linear, matrices, total), self._magnitude(matrices, total)
        if len(factors) == 1:
            (a,) = factors
        else:
            a = torch.cat(factors) if factors else torch.zeros(0, self._own_columns(linear))
        return LowRank(total, a, tuple(parts), bias, magnitude)

    def _own_columns(self, linear: Linear) -> int:
        own = own_part(linear.columns, self.layers.place)
        return size_of(linear.columns) if own is None else own.stop - own.start

    def _factors(self, module: AdapterModule, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """A and B. shape: of the model's matrix, to be checked."""
        assert module.factors is not None, "its caller has looked"
        a, b = module.factors
        if (said := self.adapter.config.rank_of(module.name)) not in (None, a.shape[0]):
            raise self._error(f"{module.name} has factors of rank {len(a)}, and the config says {said}")
        if shape is not None:
            self._check_shape(module.name, (b.shape[0], a.shape[1]), shape)
        return a, b

    def _check_rank(self, module: AdapterModule, rank: int) -> None:
        """Of factors whose rank no pattern of the config names. Kernels have room for the largest that it says."""
        if rank > self.adapter.rank:
            raise self._error(
                f"{module.name} has factors of rank {rank}, and the config says {self.adapter.rank} at most"
            )

    def _rows(self, matrix: _Matrix, stored: Tensor) -> Tensor:
        """This rank's rows of a tensor that has the rows of the adapter's module."""
        declared = stored if matrix.place is None else stored[torch.from_numpy(matrix.place.rows)]
        return _own(declared, self.layers.grown.get(f"{matrix.name}.weight", {}).get(0), matrix.own)

    def _factor(self, name: str, kind: str = "weight") -> float:
        """By which a matrix is multiplied on reading (`ArchSpec.scaled`), or what is added to its results."""
        return next((factor for each, factor in self.layers.spec.scaled if f"{name}.{kind}".endswith(f".{each}")), 1.0)

    def _bias(self, linear: Linear, matrices: list[_Matrix], total: int) -> Tensor | None:
        """What is added to the layer's own bias; the first rank adds it where ranks add up."""
        matrices = [each for each in matrices if each.module.b_bias is not None or each.module.bias is not None]
        if not matrices:
            return None
        found = torch.zeros(total)
        adds = own_part(linear.columns, self.layers.place) is None or self.layers.place.tp_rank == 0
        for each in matrices:
            module, added, factor = each.module, None, self._factor(each.name, "bias")
            if module.b_bias is not None:
                a, _ = self._factors(module)
                scaling = self.adapter.config.scaling(module.name, len(a)) * factor
                added = self._rows(each, module.b_bias.float() * scaling)
            if module.bias is not None:
                if not linear.bias:
                    raise self._error(f"{module.name} has a bias, and the model's has none")
                self._check_bias(module, each.shape[0])
                new = self._rows(each, module.bias.float() * factor)
                base = self.base.get(f"{each.name}.bias").float()
                change = new - _own(base, self.layers.grown.get(f"{each.name}.bias", {}).get(0), each.own)
                added = change if added is None else added + change
            if added is not None and adds:
                found[each.first : each.first + len(added)] += added
        return found if adds else None

    def _magnitude(self, matrices: list[_Matrix], total: int) -> Tensor | None:
        """DoRA's factor of each output: its magnitude over the norm of the row of W + B A."""
        if not self.adapter.config.dora:
            return None
        found = torch.ones(total)
        for each in matrices:
            module = each.module
            if module.magnitude is None:
                continue
            a, b = self._factors(module)
            order = slice(None) if each.place is None else torch.from_numpy(each.place.rows)
            factor = self._factor(each.name)
            scaling = self.adapter.config.scaling(module.name, len(a))
            weight = self.base.get(f"{each.name}.weight").float() / factor
            ratio = module.magnitude.float().reshape(-1)[order] / _norms(weight, a, b[order], scaling)
            own = _own(ratio, self.layers.grown.get(f"{each.name}.weight", {}).get(0), each.own)
            found[each.first : each.first + len(own)] = own
        return found

    def _check_used(self) -> None:
        """Raises ModelError for modules that the model does not have, unless files of it may have them, and nothing is
        computed with them; and where there are no others."""
        needless = {each.name for name, each in self.modules.items() if self.used and self._is_needless(name)}
        if rest := sorted({each.name for each in self.modules.values()} - self.used - needless):
            shown = printable(", ".join(rest[:SHOWN])) + (f" and {len(rest) - SHOWN} more" if len(rest) > SHOWN else "")
            model = self.layers.spec.architecture
            raise self._error(f"{model} has no matrices that adapters change under the names {shown}")

    def _is_needless(self, name: str) -> bool:
        return any(re.search(each, f"{name}.weight") for each in self.layers.spec.names.ignorable)

    def _check_factors(self) -> None:
        """Raises ModelError where nothing says what the products are to be multiplied by."""
        if self.layers.spec.contains_factors:
            raise self._error(
                f"the file of this {self.layers.spec.architecture} has the model's multipliers in its matrices, and "
                "does not say what they are, so that adapters cannot be multiplied too; they go with safetensors"
            )

    def _check_order(self) -> None:
        """Raises ModelError where the adapter's heads or the model's are in the order of GGUF files: columns of A are
        reordered too then, which only some converters did."""
        if not self.adapter.turned and not any(getattr(each.mixer, "tiled", False) for each in self.layers.spec.layers):
            return
        if (name := next((name for name in self.modules if GATED_DELTA in name), None)) is not None:
            raise self._error(f"{name}: matrices of gated delta networks are not adapted where GGUF files are read")

    def _whole(self) -> str:
        return "the head, the embedding and classifiers"

    def _error(self, what: str) -> ModelError:
        return ModelError(f"the adapter {self.adapter.path}: {what}")


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One of a layer's matrices that an adapter changes."""

    name: str
    """As declared, without `.weight`; of what layers share, in the layer whose names it has."""
    module: AdapterModule
    place: StoredRows | None
    """Which of the module's rows are the matrix's; None: all."""
    first: int
    """Its first output of the layer on this rank."""
    shape: tuple[int, int]
    """Of the matrix in the checkpoint that the module is."""
    own: slice | None
    """This rank's rows of the padded matrix; None: all."""


def _norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Of the rows of W + scaling B A."""
    return torch.linalg.norm(weight + scaling * (b.float() @ a.float()), dim=1)


def _is_chosen(name: str, ends: Iterable[str]) -> bool:
    ends = tuple(ends)
    return not ends or any(name == end or name.endswith(f".{end}") for end in ends)


class _LayerParts(NamedTuple):
    linears: list[tuple[Linear, Linear, Tied | None]]
    """Each with the same without padding, and how it is shared with another layer."""
    stacks: list[tuple[ExpertStack, ExpertStack]]


def _parts_of_layer(layers: AdaptableLayers, padded: LayerSpec, whole: LayerSpec) -> _LayerParts:
    both = LayerDeclaration.of(layers.padded, padded), LayerDeclaration.of(layers.spec, whole)
    linears = [(one, other, tied) for (one, tied), (other, _) in zip(*map(_linears, both), strict=True)]
    return _LayerParts(linears, list(zip(*map(_stacks, both), strict=True)))


def _stacks(declaration: LayerDeclaration) -> Iterator[ExpertStack]:
    return (each for each in declaration.ffn.values() if isinstance(each, ExpertStack))


def _side_by_side(pair: Sequence[Factors | None], inner: GrownAxis, own: slice | None) -> LowRank | None:
    """The gate and up projection of an expert, whose rows a rank may share."""
    if pair == [None, None]:
        return None
    factors, parts, width = [], [], 0
    taken = inner.padded if own is None else own.stop - own.start
    for nth, each in enumerate(pair):
        if each is None:
            continue
        a, b = each
        parts.append(LowRankPart(nth * taken, width, _own(b, inner, own)))
        factors.append(_of_even_rank(a))
        width += len(factors[-1])
    return LowRank(2 * taken, torch.cat(factors), tuple(parts))


def _from_inner(factors: Factors | None, inner: GrownAxis, own: slice | None) -> LowRank | None:
    """The down projection of an expert, whose columns a rank may share."""
    if factors is None:
        return None
    a, b = factors
    return LowRank(len(b), _of_even_rank(_own(a.T, inner, own).T), (LowRankPart(0, 0, b),))


def _swapped(a: Tensor, b: Tensor, count: int) -> Factors:
    """a [experts * rank, rows], b [columns, rank * experts] -> A [experts * rank, columns], B [rows, rank * experts]"""
    first = b.unflatten(1, (-1, count)).permute(2, 1, 0).flatten(0, 1)
    return first, a.unflatten(0, (count, -1)).permute(2, 1, 0).flatten(1)


def _of_even_rank(a: Tensor) -> Tensor:
    """With a row of zeros if their number is odd: kernels in bfloat16 multiply pairs."""
    return torch.nn.functional.pad(a, (0, 0, 0, 1)) if a.shape[0] % 2 else a


def _linears_at_ends(spec: ArchSpec) -> tuple[list[Linear], list[Linear]]:
    """Of a model's beginning and of its end."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    first, last = list[Linear](), list[Linear]()
    if (stream := spec.stream) is not None:
        for found, declared in ((first, stream.declare_beginning(spec)), (last, stream.declare_end(spec))):
            found += [each for each in declared.values() if isinstance(each, Linear)]
    if width != hidden:
        first.append(Linear(((names.project_in, hidden),), width))
        last.append(Linear(((names.project_out, width),), hidden))
    return first, last


def _linears(declaration: LayerDeclaration) -> Iterator[tuple[Linear, Tied | None]]:
    """With the matrix that attention over compressed vectors multiplies with itself; and what is shared with another
    layer."""
    parts: list[Declared] = [*declaration.mixer.values(), *declaration.ffn.values(), *declaration.stream.values()]
    for each in parts:
        tied, own = (each, each.declared) if isinstance(each, Tied) else (None, each)
        if isinstance(own, Linear):
            yield own, tied
        elif isinstance(own, AttendLatent):
            yield Linear(((own.up, own.up_rows),), own.latent_dim), tied


def _own(tensor: Tensor, grown: GrownAxis | None, own: slice | None) -> Tensor:
    """The rows `own` of a tensor after padding; None: all."""
    if grown is None:
        return tensor if own is None else tensor[own]
    first, last = (0, grown.padded) if own is None else (own.start, own.stop)
    found = tensor.new_zeros(last - first, *tensor.shape[1:])
    for span in grown.within(first, last):
        found[span.start : span.start + span.length] = tensor[span.source : span.source + span.length]
    return found
