"""Name and shape of every weight that an `ArchSpec` asks for, so that random ones can stand in."""

from __future__ import annotations

from headrace.executor.models.arch import ArchSpec

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(spec: ArchSpec) -> Shapes:
    """What the decoder reads for `spec`, under Hugging Face names."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    prefix = names.prefixes[0]
    shapes: Shapes = {f"{prefix}{names.embedding}.weight": (spec.vocab_size, width)}
    if spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        shapes[f"{prefix}{names.positions}.weight"] = (rows, hidden)
    if width != hidden:
        shapes |= _linear(prefix + names.project_in, hidden, width, False)
        shapes |= _linear(prefix + names.project_out, width, hidden, False)
    for index in range(spec.num_layers):
        shapes |= _layer(f"{prefix}layers.{index}.", spec)
    if spec.final_norm:
        shapes |= _norm(prefix + names.final_norm, hidden, spec)
    if not spec.tied_head:
        shapes |= _linear(names.lm_heads[0], spec.vocab_size, width, False)
    return shapes


def _layer(prefix: str, spec: ArchSpec) -> Shapes:
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = _linear(prefix + names.query, query, hidden, spec.attention_bias)
    shapes |= _linear(prefix + names.key, key, hidden, spec.attention_bias)
    shapes |= _linear(prefix + names.value, key, hidden, spec.attention_bias)
    shapes |= _linear(prefix + names.output, hidden, query, spec.output_bias)
    if spec.gated_mlp:
        shapes |= _linear(prefix + names.gate, inner, hidden, spec.mlp_bias)
    shapes |= _linear(prefix + names.up, inner, hidden, spec.mlp_bias)
    shapes |= _linear(prefix + names.down, hidden, inner, spec.mlp_bias)
    if spec.qk_norm:
        shapes |= _norm(prefix + names.query_norm, spec.head_dim, spec)
        shapes |= _norm(prefix + names.key_norm, spec.head_dim, spec)
    norms = [names.attention_norm, names.mlp_norm]
    if spec.norm_placement == "sandwich":
        norms += [names.attention_post_norm, names.mlp_post_norm]
    for norm in norms:
        shapes |= _norm(prefix + norm, hidden, spec)
    return shapes


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_features, in_features)}
    return shapes | ({f"{name}.bias": (out_features,)} if bias else {})


def _norm(name: str, size: int, spec: ArchSpec) -> Shapes:
    if not spec.norm.affine:
        return {}
    shapes: Shapes = {f"{name}.weight": (size,)}
    return shapes | ({f"{name}.bias": (size,)} if spec.norm.kind == "layer" else {})
