"""The interface of a generator: one object per rank, owned by one thread, that we step ourselves.

Nothing here knows chat, tools, rewards or batches: multi-turn, partial rollouts and a server are clients of these
calls. In a tensor-parallel group every rank calls ``submit``, ``step`` and ``cancel`` in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

NO_VERSION = -1
"""What a generator holds before the first publish, while it is written, and after a publish that broke midway."""

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal["recompute", "keep", "abort"]
"""What happens to requests in flight when weights change under them; the prefix cache never outlives its weights.

``recompute``: keys and values are computed again from their tokens with the new weights (exact, costs a prefill).
``keep``: they go on with those of the old weights (free; later tokens are then of neither version's policy).
``abort``: they are handed out with what they have, and may be continued by a request with ``sampled_ids``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; the trainer's configuration alone decides, never a model's generation config."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, besides the engine's own end tokens; the id is part of the response."""
    ignore_eos: bool = False
    """Whether the response runs to ``max_tokens``: no id ends it, those of ``stop_token_ids`` neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to generate."""

    request_id: str
    prompt_ids: Sequence[int]
    """All tokens before the response (earlier turns included), unpadded; never any of ``sampled_ids``."""
    sampling: SamplingParams
    seed: int
    """``utils.seeding.derive_seed`` of (run seed, step, prompt, sample, turn, tokens so far); in [0, 2**31).

    Where ``sampled_ids`` is given, the engine draws from a seed that it derives
    from this one and their number, so that a continuation never repeats the noise of its first tokens."""
    sampled_ids: Sequence[int] = ()
    """Tokens of an earlier, interrupted try; the engine continues after them and returns them in front. They count
    toward ``sampling.max_tokens``."""
    sampled_log_probs: Sequence[float] = ()
    sampled_versions: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished or cancelled response."""

    request_id: str
    token_ids: tuple[int, ...]
    """As sampled, end token included."""
    log_probs: tuple[float, ...]
    """Nats, of the (tempered, truncated) distribution sampled from, one per token; greedy: at temperature 1."""
    versions: tuple[int, ...]
    """Weight version each token was sampled from."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Part:
    """One fused part of an engine parameter, in the engine's own storage."""

    hf_name: str
    """Name of the Hugging Face parameter that it holds a slice of."""
    view: Tensor
    """Writable view of the engine's storage."""
    hf_box: tuple[tuple[int, int], ...]
    """Half-open range of every dim of the Hugging Face parameter that ``view`` holds (row-major, same order)."""
    hf_shape: tuple[int, ...]
    """Full shape of that parameter."""


@dataclass(frozen=True, slots=True)
class EngineParameters:
    """What a rank's engine stores: every slice of every Hugging Face parameter it needs. Tied copies appear once."""

    parts: tuple[Part, ...]
    engine_names: dict[str, str] = field(default_factory=dict)
    """Real parameter name in the engine, by Hugging Face name."""


class RolloutEngine(Protocol):
    """One rank of a generator."""

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...

    @property
    def version(self) -> int:
        """Weight version that tokens are sampled from; -1 before the first publish."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; takes effect at the next step, in this order."""
        ...

    def step(self) -> list[Completion]:
        """Applies queued commands in order, runs one engine step, hands out what finished.

        Raises:
            StateError: while asleep or before the first publish.
        """
        ...

    def cancel(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stops requests now; their partial tokens, with finish reason ``abort``."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Releases KV cache (and at level 2 weights) where the backend can; a step raises until ``wake``.

        After level 2 the weights are gone: ``version`` is -1 until they are written again.

        Raises:
            StateError: while requests are waiting or running (finish or cancel them first).
        """
        ...

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes memory back."""
        ...

    def parameters(self) -> EngineParameters:
        """Writable views of what this rank stores."""
        ...

    def weights_written(self, version: int, in_flight: InFlight = "recompute") -> None:
        """Tells the engine that ``parameters()`` now hold ``version``: repacks if needed, drops or keeps caches.

        Version -1 comes before the first byte is written: they hold none any more, and a step raises StateError until
        the next call.
        """
        ...

    def stale_copies(self) -> list[str]:
        """One line for each block of which the engine computes with a copy that is not of ``parameters()``; names it.

        Asked after ``weights_written``. Empty for an engine that computes with the parameters themselves.
        """
        ...

    def announce(self, number: int) -> None:
        """Leaves a number (0 or more) that all ranks of the engine shall know after one and the same step.

        Only the first rank of a tensor-parallel group is heard.
        """
        ...

    @property
    def announced(self) -> int:
        """The first rank's number as of the last step, the same on every rank of the engine; -1: none yet."""
        ...

    def clear_caches(self) -> None:
        """Drops KV and prefix caches. Raises EngineError when the backend refused."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights and kv_cache held now."""
        ...

    def close(self) -> None:
        """Ends the engine; nothing may be called after. May end torch.distributed."""
        ...


def _nothing() -> None:
    """What most callers do between steps."""


def generate(
    engine: RolloutEngine, requests: Sequence[Request], *, between_steps: Callable[[], None] = _nothing
) -> list[Completion]:
    """Completions of ``requests`` in their order: submit all, step until idle.

    ``between_steps`` is called after every step, when nothing is in flight on the device: weights may change there.
    """
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.busy:
        for completion in engine.step():
            done[completion.request_id] = completion
        between_steps()
    return [done[request.request_id] for request in requests]
