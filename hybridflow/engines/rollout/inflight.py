"""What both engines keep of a request while it runs, and the rules that must not differ between them.

A response's tokens are collected here, not in the backend: a cancelled request still has its partial tokens, and every
token carries the weight version that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.engines.rollout.base import Completion, FinishReason, Request
from hybridflow.utils.errors import EngineError
from hybridflow.utils.seeding import derive_seed

SEED_LIMIT = 1 << 31
LOWEST_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than it was asked for."""
DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
"""Torch's name of every dtype that the configuration may say."""


@dataclass(slots=True)
class Response:
    """Tokens of one request so far, earlier tries included."""

    request: Request
    stop_ids: frozenset[int]
    """Ids that end it."""
    max_tokens: int
    """Tokens it may reach in all, context limit included."""
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]

    def append(self, token_id: int, log_prob: float, version: int) -> None:
        """Adds one sampled token."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    @property
    def finish_reason(self) -> FinishReason | None:
        """``stop`` or ``length`` where the response is over, else None."""
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def complete(self, reason: FinishReason) -> Completion:
        """What the caller gets."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


def open_response(request: Request, *, eos_token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> Response:
    """A response that starts with the tokens of the earlier try, checked against the engine's limits.

    Raises:
        EngineError: when the request can not be served as given; the message names it and the field.
    """
    _check(request, vocab_size)
    room = max_model_len - len(request.prompt_ids)
    if room < 1:
        raise EngineError(
            f"request {request.request_id!r}: prompt of {len(request.prompt_ids)} tokens leaves no room in a context "
            f"of {max_model_len}; raise rollout.max_model_len or filter long prompts"
        )
    sampling = request.sampling
    return Response(
        request=request,
        stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids) | frozenset(eos_token_ids),
        max_tokens=min(sampling.max_tokens, room),
        token_ids=list(request.sampled_ids),
        log_probs=list(request.sampled_log_probs),
        versions=list(request.sampled_versions),
    )


def sampled_log_probs(
    token_ids: Sequence[int], candidates: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
) -> list[float]:
    """The log-prob of each sampled token, found by its id among the candidates of its position.

    Raises:
        EngineError: when a sampled token is not among them.
    """
    found = []
    for token_id, ids, values in zip(token_ids, candidates, log_probs, strict=True):
        if token_id not in ids:
            raise EngineError(f"token {token_id} was sampled and has no log-prob: those of {list(ids)} came back")
        found.append(values[ids.index(token_id)])
    return found


def _check(request: Request, vocab_size: int) -> None:
    where, sampling, n = f"request {request.request_id!r}", request.sampling, len(request.sampled_ids)
    if not request.prompt_ids:
        raise EngineError(f"{where}: prompt_ids is empty")
    if n != len(request.sampled_log_probs) or n != len(request.sampled_versions):
        raise EngineError(
            f"{where}: {n} sampled_ids, {len(request.sampled_log_probs)} sampled_log_probs and "
            f"{len(request.sampled_versions)} sampled_versions; give one of each per token"
        )
    if not 0 <= request.seed < SEED_LIMIT:
        raise EngineError(f"{where}: seed {request.seed} is outside [0, 2**31); use derive_seed")
    if sampling.max_tokens < 1:
        raise EngineError(f"{where}: max_tokens {sampling.max_tokens} must be at least 1")
    if sampling.temperature < 0 or 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"{where}: temperature {sampling.temperature} must be 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"{where}: top_p {sampling.top_p} must be in (0, 1]")
    if sampling.top_k < -1:
        raise EngineError(f"{where}: top_k {sampling.top_k} must be positive, or -1 or 0 for off")
    highest = max(max(request.prompt_ids), max(request.sampled_ids, default=0))
    if min(request.prompt_ids) < 0 or highest >= vocab_size:
        raise EngineError(f"{where}: token ids must be in [0, {vocab_size}), got {highest}")


def drawing_seed(request: Request) -> int:
    """Seed of this try: the request's own, or one derived from it and the number of tokens that it continues after."""
    return derive_seed(request.seed, len(request.sampled_ids)) if request.sampled_ids else request.seed


def end_token_ids(model_path: str) -> tuple[int, ...]:
    """Ids that a model folder names as ends, sorted: the union of ``generation_config.json`` and ``config.json``."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if not file.is_file():
            continue
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))
