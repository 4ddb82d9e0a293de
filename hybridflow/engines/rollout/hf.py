"""The slow reference generator: transformers' own forward, one token per step for every running request.

Requests that are prefilled in the same step form a *cohort*: one key-value cache, left-padded, from which finished rows
are dropped. A weight change dissolves all cohorts, and their rows are prefilled again, prompt and tokens so far, at the
next step; that is all the cache handling there is. It is used where vLLM is missing and to judge vLLM in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout.base import NO_VERSION, Completion, EngineParameters, InFlight, Part, Request
from hybridflow.engines.rollout.inflight import DTYPES, Response, drawing_seed, end_token_ids, open_response
from hybridflow.engines.rollout.sampling import draw, sampler_log_probs
from hybridflow.utils.errors import EngineError, StateError

TAGS = ("weights", "kv_cache")


@dataclass(slots=True)
class _Row:
    """One running request."""

    response: Response
    generator: Generator


@dataclass(slots=True)
class _Cohort:
    """Rows that share a key-value cache; every row's last token is not in the cache yet."""

    rows: list[_Row]
    cache: DynamicCache
    mask: Tensor
    """``[b, slots]`` int64, 1 where a slot of the cache holds a token of the row."""

    def keep(self, kept: list[int]) -> None:
        """Drops every row but ``kept``."""
        if len(kept) == len(self.rows):
            return
        if not kept:
            self.rows = []
            return
        index = torch.tensor(kept, dtype=torch.long, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]
        self.rows = [self.rows[row] for row in kept]


class HFEngine:
    """``RolloutEngine`` over a transformers causal language model, on one rank."""

    def __init__(
        self,
        *,
        model_path: str,
        config: RolloutConfig,
        max_prompt_tokens: int,
        max_response_tokens: int,
        tp: int,
        device: str,
        eos_token_ids: tuple[int, ...] | None = None,
        vocab_limit: int | None = None,
        seed: int = 0,
        lockstep_timeout_s: float = 120.0,
    ) -> None:
        """A model with the folder's architecture and weights yet to be written.

        Args:
            eos_token_ids: ids that end every response; None: those the model folder names.
            vocab_limit: ids from here on are never sampled (rows of the embedding beyond the tokenizer).
            seed: of the weights before the first publish; nothing is sampled from them.
            lockstep_timeout_s: has no effect: one rank waits for no peer.

        Raises:
            EngineError: for more than one tensor-parallel rank.
        """
        if tp != 1:
            raise EngineError(
                f"rollout.name=hf runs on one rank, got tensor_model_parallel_size={tp}; use rollout.name=vllm"
            )
        hf_config = AutoConfig.from_pretrained(model_path)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, DTYPES[config.dtype]))
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._vocab_size = hf_config.get_text_config().vocab_size
        self._vocab_limit = self._vocab_size if vocab_limit is None else min(vocab_limit, self._vocab_size)
        self._eos_token_ids = end_token_ids(model_path) if eos_token_ids is None else eos_token_ids
        self._max_model_len = config.max_model_len or max_prompt_tokens + max_response_tokens
        self._max_num_seqs = config.max_num_seqs
        self._version = NO_VERSION
        self._announcement = self._announced = -1
        self._asleep: set[str] = set()
        self._waiting: list[_Row] = []
        self._cohorts: list[_Cohort] = []
        self._over: list[Completion] = []

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self._waiting or self._cohorts or self._over)

    @property
    def version(self) -> int:
        """Weight version that tokens are sampled from; -1 before the first publish."""
        return self._version

    @property
    def announced(self) -> int:
        """The number announced before the last step; -1: none yet."""
        return self._announced

    def announce(self, number: int) -> None:
        """Leaves a number for ``announced``."""
        self._announcement = number

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests for the next step. Raises EngineError, and queues none, where one can not be served."""
        known = {row.response.request.request_id for row in self._rows()}
        rows = []
        for request in requests:
            if request.request_id in known:
                raise EngineError(f"request {request.request_id!r} is already running")
            known.add(request.request_id)
            response = open_response(
                request,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._max_model_len,
                vocab_size=self._vocab_size,
            )
            rows.append(_Row(response, Generator().manual_seed(drawing_seed(request))))
        for row in rows:
            reason = row.response.finish_reason
            if reason is None:
                self._waiting.append(row)
            else:
                self._over.append(row.response.complete(reason))

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """One token for every running request; waiting ones are prefilled first. Hands out what finished.

        Raises:
            StateError: while asleep or before the first publish.
        """
        self._require_awake("step", *TAGS)
        if self._version < 0:
            raise StateError("step: the engine holds no published weights; call weights_written(version) first")
        self._announced = self._announcement
        done, self._over = self._over, []
        room = self._max_num_seqs - sum(len(cohort.rows) for cohort in self._cohorts)
        admitted, self._waiting = self._waiting[:room], self._waiting[room:]
        for cohort in self._cohorts:
            done += self._sample(cohort, self._decode(cohort))
        if admitted:
            cohort, logits = self._prefill(admitted)
            done += self._sample(cohort, logits)
            self._cohorts.append(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return done

    def cancel(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stops requests now; their partial tokens, with finish reason ``abort``. Unknown ids are passed over."""
        wanted = set(request_ids)
        cancelled = [row for row in self._rows() if row.response.request.request_id in wanted]
        self._waiting = [row for row in self._waiting if row.response.request.request_id not in wanted]
        for cohort in self._cohorts:
            cohort.keep([i for i, row in enumerate(cohort.rows) if row.response.request.request_id not in wanted])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        over = [completion for completion in self._over if completion.request_id in wanted]
        self._over = [completion for completion in self._over if completion.request_id not in wanted]
        return over + [row.response.complete("abort") for row in cancelled]

    def sleep(self, level: int = 1) -> None:
        """Drops caches (all that this backend can release); at level 2 the weights count as gone.

        Raises:
            StateError: while requests are waiting or running.
        """
        if self.busy:
            raise StateError("sleep: requests are waiting or running; finish or cancel them first")
        self._asleep = set(TAGS)
        if level >= 2:
            self._version = -1

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Ends sleep for ``tags``."""
        unknown = set(tags) - set(TAGS)
        if unknown:
            raise EngineError(f"wake: unknown tags {sorted(unknown)}; allowed are {list(TAGS)}")
        self._asleep -= set(tags)

    def parameters(self) -> EngineParameters:
        """The model's own parameters, whole, tied ones once."""
        self._require_awake("parameters", "weights")
        parts = tuple(
            Part(name, parameter.data, tuple((0, size) for size in parameter.shape), tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
        )
        return EngineParameters(parts, {part.hf_name: part.hf_name for part in parts})

    def weights_written(self, version: int, in_flight: InFlight = "recompute") -> None:
        """Tells the engine that its parameters hold ``version`` (-1: none), and what becomes of running requests."""
        self._require_awake("weights_written", "weights")
        if version < NO_VERSION:
            raise EngineError(f"weights_written: version {version} must be 0 or more, or {NO_VERSION} for none")
        self._version = version
        if version == NO_VERSION or in_flight == "keep":
            return
        if in_flight == "abort":
            running = [row.response.request.request_id for cohort in self._cohorts for row in cohort.rows]
            self._over += self.cancel(running)
        self.clear_caches()

    def stale_copies(self) -> list[str]:
        """Nothing: the model computes with its parameters."""
        return []

    def clear_caches(self) -> None:
        """Drops every key-value cache; running requests go back in front of the queue, in their order."""
        self._waiting = list(self._rows())
        self._cohorts = []

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights and kv_cache held now."""
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        layers: list[Any] = [layer for cohort in self._cohorts for layer in cohort.cache.layers]
        return {"weights": weights, "kv_cache": sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)}

    def close(self) -> None:
        """Ends the engine: drops caches and requests."""
        self._waiting, self._cohorts, self._over = [], [], []
        self._version = -1

    def _rows(self) -> list[_Row]:
        """All unfinished rows, those that run before those that wait."""
        return [row for cohort in self._cohorts for row in cohort.rows] + self._waiting

    def _require_awake(self, what: str, *tags: str) -> None:
        asleep = sorted(self._asleep & set(tags))
        if asleep:
            raise StateError(f"{what}: {' and '.join(asleep)} asleep; call wake first")

    def _prefill(self, rows: list[_Row]) -> tuple[_Cohort, Tensor]:
        """A new cohort and the logits ``[b, V]`` that follow its rows."""
        sequences = [[*row.response.request.prompt_ids, *row.response.token_ids] for row in rows]
        width = max(map(len, sequences))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in sequences], device=self._device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in sequences], device=self._device)
        cohort = _Cohort(rows, DynamicCache(config=self._model.config), mask)
        return cohort, self._forward(cohort, ids, (mask.cumsum(dim=1) - 1).clamp(min=0))

    def _decode(self, cohort: _Cohort) -> Tensor:
        """Logits ``[b, V]`` that follow every row's last token; the token enters the cache."""
        last = torch.tensor([[row.response.token_ids[-1]] for row in cohort.rows], device=self._device)
        cohort.mask = torch.cat([cohort.mask, torch.ones_like(last)], dim=1)
        return self._forward(cohort, last, cohort.mask.sum(dim=1, keepdim=True) - 1)

    def _forward(self, cohort: _Cohort, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=cohort.mask,
            position_ids=positions,
            past_key_values=cohort.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _sample(self, cohort: _Cohort, logits: Tensor) -> list[Completion]:
        """Appends one token to every row; finished rows leave the cohort and are returned."""
        settings = [row.response.request.sampling for row in cohort.rows]
        log_probs = sampler_log_probs(logits, settings, self._vocab_limit)
        ids = draw(log_probs, settings, [row.generator for row in cohort.rows])
        chosen = log_probs.gather(1, ids[:, None]).squeeze(1).tolist()
        done, kept = [], []
        for index, (row, token_id, log_prob) in enumerate(zip(cohort.rows, ids.tolist(), chosen, strict=True)):
            row.response.append(token_id, log_prob, self._version)
            reason = row.response.finish_reason
            if reason is None:
                kept.append(index)
            else:
                done.append(row.response.complete(reason))
        cohort.keep(kept)
        return done
