"""How a generator cuts each parameter of an architecture: patterns of Hugging Face names, kept in one registry.

A rule says which *cut* a parameter gets under tensor parallelism of degree t, on tensor-parallel rank j:

| cut           | block of rank j                                                                                |
|---------------|------------------------------------------------------------------------------------------------|
| replicated    | everything                                                                                     |
| column        | rows ``j n/t .. (j+1) n/t`` (dim 0)                                                            |
| row           | columns ``j n/t .. (j+1) n/t`` (dim 1) of a weight; a bias is replicated                       |
| query         | rows of the query heads ``j h/t .. (j+1) h/t``                                                 |
| key_value     | rows of its key-value heads; for t > heads, neighbouring ranks hold the same head              |
| vocabulary    | rows ``j v/t .. (j+1) v/t`` with v the vocabulary padded to 64; rows beyond it are nobody's    |
| stacked_in    | of ``[experts, 2 n, d]``: the gate's and the up-projection's rows j (two blocks)               |
| stacked_out   | of ``[experts, d, n]``: columns ``j n/t .. (j+1) n/t`` (dim 2)                                 |

With expert parallelism a rank holds whole experts in place of cuts of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hybridflow.hybrid_engine.boxes import Box, full_box
from hybridflow.utils.errors import ConfigError

VOCABULARY_PADDING = 64
"""vLLM pads vocabularies to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention heads of a model."""

    query: int
    key_value: int
    size: int
    """Entries of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """One pattern of names and the cut it gets."""

    pattern: str
    """Regular expression that a whole Hugging Face name matches."""
    cut: str
    """A key of ``CUTS``."""
    stored_in: str = ""
    """Module of the engine that fuses it with others: qkv_proj, gate_up_proj."""
    expert: str = ""
    """``stacked``: dim 0 counts experts. ``indexed``: the pattern's group ``expert`` is one expert's number."""

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise ConfigError(
                f"sharding rule {self.pattern!r}: cut={self.cut!r} is unknown; use one of {', '.join(CUTS)}"
            )

    @property
    def trainer_dim(self) -> int | None:
        """Dim that the trainer's tensor parallelism cuts; None: replicated."""
        return {"column": 0, "query": 0, "key_value": 0, "vocabulary": 0, "row": 1}.get(self.cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One coordinate of a generation replica."""

    tp: int
    tp_rank: int
    heads: Heads


class DoesNotDivideError(ValueError):
    """A cut that would leave uneven blocks; the text says what of which."""


def _replicated(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    return (full_box(shape),)


def _column(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    return (_even(full_box(shape), 0, place),)


def _row(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    return (full_box(shape) if len(shape) == 1 else _even(full_box(shape), 1, place),)


def _query(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    if place.heads.query % place.tp:
        raise DoesNotDivideError(f"{place.heads.query} query heads over tp={place.tp}")
    return (_even(full_box(shape), 0, place),)


def _key_value(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    heads, tp = place.heads.key_value, place.tp
    if heads % tp and tp % heads:
        raise DoesNotDivideError(f"{heads} key-value heads over tp={tp}")
    rows = max(1, heads // tp) * (shape[0] // heads)
    first = place.tp_rank // max(1, tp // heads) * rows
    return (((first, first + rows), *full_box(shape)[1:]),)


def _vocabulary(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    padded = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % place.tp:
        raise DoesNotDivideError(f"a vocabulary padded to {padded} over tp={place.tp}")
    rows = padded // place.tp
    start, stop = place.tp_rank * rows, (place.tp_rank + 1) * rows
    return (((min(start, shape[0]), min(stop, shape[0])), *full_box(shape)[1:]),)


def _stacked_in(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    half = shape[1] // 2
    experts, _, width = full_box(shape)
    gate = _even((experts, (0, half), width), 1, place)
    return gate, (gate[0], (gate[1][0] + half, gate[1][1] + half), gate[2])


def _stacked_out(shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    return (_even(full_box(shape), 2, place),)


Cut = Callable[[Sequence[int], Place], tuple[Box, ...]]
CUTS: dict[str, Cut] = {
    "replicated": _replicated,
    "column": _column,
    "row": _row,
    "query": _query,
    "key_value": _key_value,
    "vocabulary": _vocabulary,
    "stacked_in": _stacked_in,
    "stacked_out": _stacked_out,
}

_LAYER = r"(?:.+\.)?layers\.\d+\."
_EXPERT = _LAYER + r"mlp\.experts\.(?P<expert>\d+)\."
EMBEDDINGS = (
    ShardingRule(pattern=r"(?:.+\.)?embed_tokens\.weight", cut="vocabulary"),
    ShardingRule(pattern=r"(?:.+\.)?lm_head\.weight", cut="vocabulary"),
)
ATTENTION = (
    ShardingRule(pattern=_LAYER + r"self_attn\.q_proj\.(?:weight|bias)", cut="query", stored_in="qkv_proj"),
    ShardingRule(pattern=_LAYER + r"self_attn\.[kv]_proj\.(?:weight|bias)", cut="key_value", stored_in="qkv_proj"),
    ShardingRule(pattern=_LAYER + r"self_attn\.o_proj\.(?:weight|bias)", cut="row"),
)
QUERY_KEY_NORMS = (ShardingRule(pattern=_LAYER + r"self_attn\.[qk]_norm\.weight", cut="replicated"),)
MLP = (
    ShardingRule(pattern=_LAYER + r"mlp\.(?:gate|up)_proj\.(?:weight|bias)", cut="column", stored_in="gate_up_proj"),
    ShardingRule(pattern=_LAYER + r"mlp\.down_proj\.(?:weight|bias)", cut="row"),
)
NORMS = (
    ShardingRule(pattern=_LAYER + r"(?:input|post_attention)_layernorm\.weight", cut="replicated"),
    ShardingRule(pattern=r"(?:.+\.)?norm\.weight", cut="replicated"),
)
FEEDFORWARD_NORMS = (ShardingRule(pattern=_LAYER + r"(?:pre|post)_feedforward_layernorm\.weight", cut="replicated"),)
EXPERTS = (
    ShardingRule(pattern=_LAYER + r"mlp\.gate\.weight", cut="replicated"),
    ShardingRule(pattern=_LAYER + r"mlp\.experts\.gate_up_proj", cut="stacked_in", expert="stacked"),
    ShardingRule(pattern=_LAYER + r"mlp\.experts\.down_proj", cut="stacked_out", expert="stacked"),
    ShardingRule(pattern=_EXPERT + r"(?:gate|up)_proj\.weight", cut="column", expert="indexed"),
    ShardingRule(pattern=_EXPERT + r"down_proj\.weight", cut="row", expert="indexed"),
)
_DENSE = (*EMBEDDINGS, *ATTENTION, *MLP, *NORMS)

RULES: dict[str, tuple[ShardingRule, ...]] = {
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen3ForCausalLM": (*_DENSE, *QUERY_KEY_NORMS),
    "Qwen3MoeForCausalLM": (*_DENSE, *QUERY_KEY_NORMS, *EXPERTS),
    "GemmaForCausalLM": _DENSE,
    "Gemma2ForCausalLM": (*_DENSE, *FEEDFORWARD_NORMS),
    "Gemma3ForCausalLM": (*_DENSE, *QUERY_KEY_NORMS, *FEEDFORWARD_NORMS),
}
"""Rules by architecture (``architectures[0]`` of a Hugging Face config); the first that matches a name counts."""


def register_rules(architecture: str, rules: Sequence[ShardingRule]) -> None:
    """Adds or replaces the rules of an architecture: the hook for users' own models."""
    RULES[architecture] = tuple(rules)


def rules_of(architecture: str) -> tuple[ShardingRule, ...]:
    """The rules of an architecture.

    Raises:
        ConfigError: when it has none; names the nearest that has.
    """
    if architecture in RULES:
        return RULES[architecture]
    nearest = get_close_matches(architecture, RULES, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(
        f"no sharding rules for the architecture {architecture!r}{hint} Known: {', '.join(RULES)}. "
        f"Others are added with hybridflow.hybrid_engine.rules.register_rules({architecture!r}, [...])"
    )


def rule_for(architecture: str, name: str) -> ShardingRule:
    """The rule of one parameter.

    Raises:
        ConfigError: when no rule covers it; names the parameter, its module and what to add.
    """
    for rule in rules_of(architecture):
        if re.fullmatch(rule.pattern, name):
            return rule
    module, _, leaf = name.rpartition(".")
    pattern = re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name))
    raise ConfigError(
        f"no sharding rule of {architecture} covers {name!r} ({leaf!r} of the module {module!r}): add "
        f'ShardingRule(pattern=r"{pattern}", cut=...) to its rules with register_rules; '
        f"cut is one of {', '.join(CUTS)}"
    )


def row_parallel(name: str) -> bool:
    """Whether a parameter is a weight that tensor parallelism cuts along its input, dim 1: o_proj, down_proj.

    With permuted shard order the trainer should shard these along dim 1 (``Shard(1)``) where it divides.
    """
    return re.fullmatch(_LAYER + r"(?:self_attn\.o_proj|mlp\.(?:experts\.\d+\.)?down_proj)\.weight", name) is not None


def generation_boxes(
    rule: ShardingRule, name: str, shape: Sequence[int], place: Place, *, expert_parallel: bool = False
) -> tuple[Box, ...]:
    """Blocks of a parameter that one rank of a generation replica holds.

    Raises:
        ConfigError: when tensor parallelism does not divide it; says what by what.
    """
    if rule.expert and expert_parallel:
        return _whole_experts(rule, name, shape, place)
    try:
        return CUTS[rule.cut](shape, place)
    except DoesNotDivideError as error:
        raise ConfigError(f"{name} {list(shape)} cannot be cut ({rule.cut}): {error} does not divide") from error


def _whole_experts(rule: ShardingRule, name: str, shape: Sequence[int], place: Place) -> tuple[Box, ...]:
    """Expert parallelism: contiguous experts, the first ranks one more where they do not divide."""
    if rule.expert == "stacked":
        each, more = divmod(shape[0], place.tp)
        start = place.tp_rank * each + min(place.tp_rank, more)
        return (((start, start + each + (place.tp_rank < more)), *full_box(shape)[1:]),)
    raise ConfigError(
        f"{name}: expert parallelism needs the experts of a layer stacked in one parameter (as transformers 5 has them)"
    )


def _even(box: Box, dim: int, place: Place) -> Box:
    """The rank's equal part of one dim."""
    low, high = box[dim]
    if (high - low) % place.tp:
        raise DoesNotDivideError(f"{high - low} entries of dim {dim} over tp={place.tp}")
    size = (high - low) // place.tp
    start = low + place.tp_rank * size
    return (*box[:dim], (start, start + size), *box[dim + 1 :])
