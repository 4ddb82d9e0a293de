"""The rollout worker: rows to requests, completions to columns, around one rank of a generator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import AutoConfig

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.rollout.base import Completion, Part, Request, RolloutEngine, SamplingParams, generate
from hybridflow.engines.rollout.inflight import DTYPES
from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
from hybridflow.engines.train.work import peak_flops
from hybridflow.hybrid_engine.residency import Actions, Residency, State
from hybridflow.hybrid_engine.start_check import check_layout
from hybridflow.roles.profiles import Generated
from hybridflow.roles.protocols import PublishNow, SamplingMode
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import StateError
from hybridflow.utils.optional import load
from hybridflow.utils.seeding import derive_seed

WRITES = (
    "response_ids",
    "response_length",
    "response_mask",
    "rollout_log_probs",
    "weight_version",
    "finish_reason",
    "valid",
)


class RolloutWorker:
    """One rank of the generator.

    Args:
        context: where this rank runs.
        config: the whole configuration.
        dims: generation layout of this group (dp_shard, tp).
        model_path: folder of the architecture; weights come by publish.
        eos_token_ids: every id that ends a response.
        vocab_limit: tokenizer size; ids beyond it are never sampled.
        replicas: groups like this one that share the rows of a step.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        config: PPOConfig,
        dims: ParallelDims,
        model_path: str,
        eos_token_ids: tuple[int, ...],
        vocab_limit: int,
        replicas: int = 1,
    ) -> None:
        self._config = config
        self._mailbox = context.mailbox
        self._asked: list[PublishNow] = []
        self._steps = 0
        self.publish: Callable[[int], None] = _no_publisher
        """Brings new weights between two steps; the weights worker puts itself here."""
        self._context = context
        self._generated: list[tuple[float, float, float]] = []
        """Tokens of responses, FLOPs and seconds of each generation since they were last asked for."""
        self._eos = eos_token_ids
        rollout = config.actor_rollout_ref.rollout
        # On devices of its own nobody needs the memory that it would free.
        self._frees_memory = rollout.free_cache_engine and config.rollout_shares_devices
        rows = -(-config.data.train_batch_size * rollout.n // (dims.dp * replicas))
        self.dims = dims
        self.engine: RolloutEngine = load(ROLLOUT_ENGINES[rollout.name])(
            model_path=model_path,
            # A CPU engine reserves KV cache for every sequence it may run: no more than a step brings.
            config=replace(
                rollout,
                max_num_seqs=min(rollout.max_num_seqs, rows),
                free_cache_engine=self._frees_memory,
            ),
            max_prompt_tokens=config.prompt_length,
            max_response_tokens=config.response_length,
            tp=dims.tp,
            device=context.device,
            eos_token_ids=eos_token_ids,
            vocab_limit=vocab_limit,
            seed=config.trainer.seed,
            lockstep_timeout_s=float(config.actor_rollout_ref.nccl_timeout),
        )
        stored = self.engine.parameters()
        self._flops = TokenFlops(stored.parts)
        check_layout(
            stored,
            AutoConfig.from_pretrained(model_path),
            tp=dims.tp,
            tp_rank=context.rank % dims.tp,
        )
        self.residency = Residency(
            Actions(
                wake_weights=lambda: self.engine.wake(("weights",)),
                wake_cache=lambda: self.engine.wake(("kv_cache",)),
                sleep=self.engine.sleep,
                memory_bytes=self.engine.memory_bytes,
            )
        )

    @register(
        dispatch="MESH_3D",
        mesh="rollout",
        reads=("prompt_ids", "prompt_length", "group_id", "row_id", "sample_index"),
        writes=WRITES,
    )
    def generate_sequences(self, prompts: Batch, *, step: int, mode: SamplingMode = "train") -> Batch:
        """One response per row, sampled from the published weights (see roles.protocols.Rollout)."""
        if self.residency.state is State.TRAINING:
            self.residency.to_generating()
        self.engine.clear_caches()
        self._steps = 0
        start = time.perf_counter()
        with self._context.pulse.expected():
            completions = generate(self.engine, self._requests(prompts, step, mode), between_steps=self._between_steps)
        self._count(prompts["prompt_length"].tolist(), completions, time.perf_counter() - start)
        if self._frees_memory:
            self.residency.to_training()
        return to_columns(completions)

    def _between_steps(self) -> None:
        """Publishes where the control lane asked for it, after the same step on every rank of an engine.

        A message is announced to the engine's ranks with one step and acted upon after it.
        """
        self._context.pulse.beat()
        self._steps += 1
        self._asked += [message for message in self._mailbox.drain() if isinstance(message, PublishNow)]
        for message in self._asked:
            if message.version > self.engine.version and message.after_steps <= self._steps + 1:
                self.engine.announce(message.version)
        self._asked = [message for message in self._asked if message.version > self.engine.version]
        if self.engine.announced > self.engine.version:
            with self._context.pulse.expected(False):  # the trainers come when they are done with what they do
                self.publish(self.engine.announced)

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of weights and KV cache on this rank."""
        return self.engine.memory_bytes()

    def _count(self, prompts: Sequence[int], completions: Sequence[Completion], seconds: float) -> None:
        responses = [len(completion.token_ids) for completion in completions]
        flops = self._flops(sum(prompts), sum(responses))
        self._generated.append((sum(responses), flops, seconds))

    def take_generated(self) -> Generated | None:
        """What this rank did since the last call; None: nothing."""
        generated, self._generated = self._generated, []
        if not generated:
            return None
        tokens, flops, seconds = map(sum, zip(*generated, strict=True))
        return Generated(
            tokens=tokens / self.dims.tp,  # tensor-parallel ranks have counted the same sequences
            flops=flops / self.dims.tp,
            seconds=seconds,
            peak_flops=peak_flops(
                self._context.device, getattr(torch, DTYPES[self._config.actor_rollout_ref.rollout.dtype])
            ),
        )

    def _requests(self, prompts: Batch, step: int, mode: SamplingMode) -> list[Request]:
        sampling = self._sampling(mode)
        ids, lengths = prompts["prompt_ids"].tolist(), prompts["prompt_length"].tolist()
        key_column = "group_id" if mode == "train" else "row_id"
        keys = zip(prompts[key_column].tolist(), prompts["sample_index"].tolist(), strict=True)
        seed, when = self._config.trainer.seed, step if mode == "train" else "validation"
        return [
            Request(
                request_id=f"{i}",
                prompt_ids=ids[i][: lengths[i]],
                sampling=sampling,
                seed=derive_seed(seed, mode, when, key, sample, 0, 0),
            )
            for i, (key, sample) in enumerate(keys)
        ]

    def _sampling(self, mode: SamplingMode) -> SamplingParams:
        rollout = self._config.actor_rollout_ref.rollout
        chosen = rollout.val_kwargs if mode == "validate" else rollout
        greedy = mode == "greedy" or not chosen.do_sample
        return SamplingParams(
            max_tokens=self._config.response_length,
            temperature=0.0 if greedy else chosen.temperature,
            top_p=1.0 if greedy else chosen.top_p,
            top_k=-1 if greedy or chosen.top_k is None else chosen.top_k,
            stop_token_ids=self._eos,
            ignore_eos=rollout.ignore_eos,
        )


def _no_publisher(version: int) -> None:
    """A generator whose weights come from nowhere."""
    raise StateError(f"version {version} was asked for between two steps, but no weights worker is in this process")


class TokenFlops:
    """FLOPs of a generator's matrices; those of attention are left out (they grow with the context).

    Args:
        parts: what one rank stores; full shapes count.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        shapes = {part.hf_name: part.hf_shape for part in parts if len(part.hf_shape) == 2}
        embedding = next((math.prod(shape) for name, shape in shapes.items() if "embed_tokens" in name), 0)
        self._head = next((math.prod(shape) for name, shape in shapes.items() if "lm_head" in name), embedding)
        inside = (shape for name, shape in shapes.items() if "embed_tokens" not in name and "lm_head" not in name)
        self._layers = sum(math.prod(shape) for shape in inside)

    def __call__(self, prompt_tokens: int, response_tokens: int) -> float:
        """FLOPs of sampling ``response_tokens``; only they reach the head."""
        return 2.0 * ((prompt_tokens + response_tokens) * self._layers + response_tokens * self._head)


def to_columns(completions: Sequence[Completion]) -> Batch:
    """Columns of responses, padded on the right to the longest (at least one token wide).

    Lengths and finish reasons are the engine's; an empty or aborted response is not valid.
    """
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.long)
    width = max(1, int(lengths.max())) if len(completions) else 1
    ids = torch.zeros(len(completions), width, dtype=torch.long)
    log_probs = torch.zeros(len(completions), width)
    versions = torch.full((len(completions), width), -1, dtype=torch.long)
    for i, completion in enumerate(completions):
        count = len(completion.token_ids)
        ids[i, :count] = torch.tensor(completion.token_ids, dtype=torch.long)
        log_probs[i, :count] = torch.tensor(completion.log_probs)
        versions[i, :count] = torch.tensor(completion.versions, dtype=torch.long)
    reasons = [completion.finish_reason for completion in completions]
    return Batch(
        {
            "response_ids": ids,
            "response_length": lengths,
            "response_mask": torch.arange(width)[None, :] < lengths[:, None],
            "rollout_log_probs": log_probs,
            "weight_version": versions,
            "finish_reason": reasons,
            "valid": (lengths > 0) & torch.tensor([reason != "abort" for reason in reasons], dtype=torch.bool),
        }
    )
