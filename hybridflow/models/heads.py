"""``PackedModel``: a Hugging Face body and one head over packed rows; only response positions reach the head.

Two heads. *lm*: the model's own output embedding, read as log-probs (and entropy) of the response tokens. *value*: a
linear layer ``score`` (the name that Hugging Face's token classifiers use), zero at first, so that a new critic
predicts a return of 0 everywhere and the first advantages are the plain Monte-Carlo ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.attention import Segments
from hybridflow.models.full_kl import Reading, full_kl
from hybridflow.models.logprobs import VocabularyShard, sum_of_squares, tempered_logits, token_log_probs
from hybridflow.models.packing import Packed
from hybridflow.models.packing_check import check_layer_kinds, judge, rows_alone
from hybridflow.models.sequence import join_tokens
from hybridflow.utils.errors import ConfigError, EngineError

Head = Literal["lm", "value"]

HIDDEN = frozenset({"hidden"})
"""What a forward is asked for that only wants the states before the head."""

OF_WORDS = frozenset({"log_probs", "entropy", "full_kl", "sum_pi_squared"})
"""What a language model's head can be asked for."""

PLAIN_HEAD_FAMILIES = frozenset({"qwen2", "qwen3", "llama", "mistral"})
"""Model types whose logits are exactly ``hidden @ W^T + b``: others may scale or cap them."""

SELF_CHECK = frozenset({"self_check"})
"""What a forward is asked for that is to see whether this architecture can be packed (packing_check.py)."""

_CAPPED = ("final_logit_softcapping", "logits_soft_cap", "output_multiplier_scale")
"""Fields of a config that change logits in ways that log-probs here do not follow."""


class ValueModel(nn.Module):
    """A body and a linear head of one output; parameter names as in Hugging Face's token classification models.

    A new head starts at 0 (``engines/train/assembly.py`` fills what no file holds with it): all first values are 0.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config = _classifier_config(model)
        self.prefix = model.base_model_prefix
        self.no_split = tuple(model._no_split_modules or ())
        body = model.base_model
        device = next(body.parameters()).device
        dtype = next(body.parameters()).dtype
        setattr(self, self.prefix, body)
        self.score = nn.Linear(_hidden_size(model.config), 1, device=device, dtype=dtype)

    @property
    def base_model(self) -> nn.Module:
        """The body."""
        return self.get_submodule(self.prefix)


class PackedModel(nn.Module):
    """What a training engine runs. ``net`` is the Hugging Face model or a ``ValueModel``; it keeps the HF names."""

    PREFIX = "net."

    def __init__(self, net: PreTrainedModel | ValueModel, head: Head) -> None:
        super().__init__()
        self.net = net
        self.head = head
        self.vocabulary_shard: VocabularyShard | None = None
        """Set by tensor parallelism."""
        self.vocab_limit: int | None = None
        """Ids from here on have probability 0 (rows of the embedding beyond the tokenizer); None: there are none."""
        self.sequence_group: dist.ProcessGroup | None = None
        """Ranks that hold the other slices of the packed row (Ulysses)."""
        self.token_multiple = 1
        """N is rounded up to this: slices are equal."""
        self.first = True
        """Whether this is the first pipeline stage."""
        self.last = True
        """Whether this is the last pipeline stage."""
        self.around_body: Callable[[], AbstractContextManager[Any, None]] = nullcontext
        """What the body's forward runs in (activation offload)."""
        self.renamed: Mapping[str, str] = {}
        """Parameters whose tied twin lives on another pipeline stage: own name to Hugging Face name."""
        self.logit_factor = 1.0
        """What the model multiplies its logits by."""
        check_layer_kinds(net.config)
        if head == "lm":
            assert isinstance(net, PreTrainedModel)
            self.logit_factor = _check_head(net)

    def forward(
        self,
        packed: Packed,
        needs: frozenset[str],
        temperature: float,
        received: Tensor | None = None,
        *,
        reference: Reading | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """float32 ``[n]`` for each of ``needs``: of the tempered distribution log_probs, entropy, full_kl and
        sum_pi_squared (sums of squared probabilities, without gradient); or values.

        A pipeline stage that is not the last gives its hidden states ``[1, m, D]``; one that is not the first takes
        those of the stage before as ``received``. ``reference`` is what full_kl compares with: the ``reading`` of a
        model cut in the same way. ``HIDDEN`` gives the states themselves (of this rank's own tokens, ``[n, D]``).

        Raises:
            EngineError: when ``needs`` asks for what this head does not compute.
        """
        packed = packed.padded(self.token_multiple)
        part = self._own_tokens(packed)
        hidden = self._body(packed, part, received)
        if needs == SELF_CHECK:
            return self._check_itself(packed, hidden[0])
        if not self.last:
            return hidden
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(placements=[Replicate()]).to_local()
        hidden = hidden[0]
        if self.sequence_group is None:
            return self._read(hidden[packed.select], packed.targets, needs, temperature, reference)
        place = ((packed.select >= part.start) & (packed.select < part.stop)).nonzero().squeeze(1)
        states, targets = hidden[packed.select[place] - part.start], packed.targets[place]
        own = self._read(states, targets, needs, temperature, reference)
        if needs == HIDDEN:
            return own
        count = packed.select.numel()
        return {name: join_tokens(value, place, count, self.sequence_group) for name, value in own.items()}

    def reading(self, packed: Packed) -> Reading:
        """What ``full_kl`` needs of this model where it is the reference. Collective, as a forward is."""
        with self.evaluating():
            found = self(packed, HIDDEN, 1.0)
        return self.reading_of(found["hidden"])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradient, as in evaluation; a model that trains goes on to train, whatever happens inside."""
        trains = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(trains)

    def reading_of(self, hidden: Tensor) -> Reading:
        """``reading`` where the states ``[n, D]`` are known already: of the last pipeline stage."""
        output = self.output_layer()
        assert output is not None
        return Reading(hidden, _plain(output.weight), None if output.bias is None else _plain(output.bias))

    def _check_itself(self, packed: Packed, states: Tensor) -> dict[str, Tensor]:
        """Compares ``states`` of packed rows with those of each row alone, and the head with transformers' own.

        Raises:
            ConfigError: when they differ.
        """
        kind, rows = self.net.config.model_type, rows_alone(packed)
        alone = torch.cat([self.net.base_model(**row).last_hidden_state[0] for row in rows])
        if isinstance(self.net, ValueModel):
            judge(kind, states, alone, None, None)
            return {"states": states}
        output = self.output_layer()
        assert output is not None
        bias = None if output.bias is None else _plain(output.bias)
        logits = tempered_logits(states, _plain(output.weight), bias, 1.0 / self.logit_factor)
        own = torch.cat([self.net(**row).logits[0] for row in rows]).float()
        judge(kind, states, alone, torch.log_softmax(logits, -1), torch.log_softmax(own, -1))
        return {"states": states}

    def _own_tokens(self, packed: Packed) -> slice:
        if self.sequence_group is None:
            return slice(0, packed.tokens)
        size = packed.tokens // dist.get_world_size(self.sequence_group)
        start = size * dist.get_rank(self.sequence_group)
        return slice(start, start + size)

    def _body(self, packed: Packed, part: slice, received: Tensor | None) -> Tensor:
        source = {"input_ids": packed.input_ids[:, part]} if received is None else {"inputs_embeds": received}
        with self.around_body():
            out = self.net.base_model(
                **source,
                attention_mask=None,
                position_ids=packed.position_ids[:, part],
                use_cache=False,
                segments=Segments(packed.lengths, packed.prefixes),
                sequence_group=self.sequence_group,
            )
        return out.last_hidden_state

    def _read(
        self,
        hidden: Tensor,
        targets: Tensor,
        needs: frozenset[str],
        temperature: float,
        reference: Reading | None,
    ) -> dict[str, Tensor]:
        """What the head says about chosen positions ``[n, D]``; values know no temperature."""
        if needs == HIDDEN:
            return {"hidden": hidden}
        if self.head == "value":
            if needs != {"values"}:
                raise EngineError(f"a value head gives values, not {', '.join(sorted(needs - {'values'}))}")
            assert isinstance(self.net, ValueModel)
            # A copy: FSDP hooks the outputs, and a hook on a view can be lost.
            return {"values": self.net.score(hidden)[:, 0].to(torch.float32, copy=True)}
        if not needs <= OF_WORDS:
            raise EngineError(f"a language model gives {', '.join(sorted(OF_WORDS))}, not {', '.join(sorted(needs))}")
        output = self.output_layer()
        assert output is not None
        weight, bias = _plain(output.weight), None if output.bias is None else _plain(output.bias)
        cut = {
            "temperature": temperature / self.logit_factor,
            "shard": self.vocabulary_shard,
            "vocab_limit": self.vocab_limit,
        }
        log_probs, entropy = token_log_probs(hidden, weight, targets, bias=bias, entropy="entropy" in needs, **cut)
        found = {"log_probs": log_probs, "entropy": entropy}
        if "full_kl" in needs:
            if reference is None:
                raise EngineError("full_kl compares with a reference, and none was handed in")
            found["full_kl"] = full_kl(hidden, weight, reference, bias=bias, **cut)
        if "sum_pi_squared" in needs:
            found["sum_pi_squared"] = sum_of_squares(hidden, weight, bias=bias, **cut)
        return {name: value for name, value in found.items() if name in needs and value is not None}

    def output_layer(self) -> nn.Linear | None:
        """The language model head; None for a value model and on all pipeline stages but the last."""
        if isinstance(self.net, ValueModel):
            return None
        output = self.net.get_output_embeddings()
        return output if isinstance(output, nn.Linear) else None

    def blocks(self) -> list[nn.Module]:
        """The body's layers in order: units of sharding, checkpointing and compilation."""
        names = self.net.no_split if isinstance(self.net, ValueModel) else tuple(self.net._no_split_modules or ())
        return [module for module in self.net.base_model.modules() if type(module).__name__ in names]

    def layer_parameters(self) -> frozenset[str]:
        """Hugging Face names of all parameters inside ``blocks``; ask before sharding renames their classes."""
        inside = {id(parameter) for block in self.blocks() for parameter in block.parameters()}
        return frozenset(name for name, parameter in self.hf_parameters().items() if id(parameter) in inside)

    def hf_parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters by Hugging Face name, ties once."""
        own = ((hf_name(name), parameter) for name, parameter in self.named_parameters())
        return {self.renamed.get(name, name): parameter for name, parameter in own}


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter of ``PackedModel``; adapters as PEFT writes them to disk."""
    name = name.removeprefix(PackedModel.PREFIX).replace(".base_layer.", ".")
    return name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")


def adapter_name(name: str) -> bool:
    """Whether a parameter of this name belongs to a LoRA adapter."""
    return ".lora_A." in name or ".lora_B." in name


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hidden_size(config: object) -> int:
    size = getattr(config, "hidden_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"{type(config).__name__} names no hidden_size: no value head can be put on it")
    return size


def _classifier_config(model: PreTrainedModel) -> PretrainedConfig:
    """The config under which transformers' token classification class reads an exported value model."""
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.architectures = [type(model).__name__.replace("ForCausalLM", "ForTokenClassification")]
    return config


def _check_head(net: PreTrainedModel) -> float:
    """What the model multiplies its logits by.

    Raises:
        ConfigError: when they are made in another way than ``factor * (hidden @ W^T + b)``.
    """
    config, kind = net.config, net.config.model_type
    if kind in PLAIN_HEAD_FAMILIES:
        return 1.0
    if net.base_model is net:
        raise ConfigError(f"model type {kind!r} has no body apart from its head: it is not supported")
    if capped := [name for name in _CAPPED if getattr(config, name, None) not in (None, 0, 1.0)]:
        raise ConfigError(f"model type {kind!r} changes its logits ({', '.join(capped)}): it is not supported")
    output = net.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ConfigError(f"model type {kind!r} has no linear output layer: it is not supported")
    if output.in_features != _hidden_size(config):
        raise ConfigError(f"model type {kind!r} has further layers before its output layer: it is not supported")
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
