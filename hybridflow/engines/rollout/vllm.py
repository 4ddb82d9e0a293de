"""vLLM in the hosting process, with its step loop in our hands.

Its engine core is driven by ``add_request`` / ``get_output`` / ``abort_requests``; between two steps nothing is in
flight, so weights may change there. Tokens are collected here as they come (the backend forgets those of an aborted
request), each with the weight version that wrote it; vLLM's front end, which would build an output object per token (a
tenth of a small model's step), is left out. With tp > 1 every rank of the group runs the same engine on the same
commands ("external launcher"), and ``Lockstep`` makes sure that they do.

    weights written -> weights_written(v): repack, drop KV and prefix caches, recompute what runs -> tokens of version v

vLLM is used through its engine's calls except for the path to the model's parameters. What is special about the CPU
build is in ``vllm_cpu.py`` and ``vllm_cpu_kernels.py``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout import vllm_cpu, vllm_cpu_kernels
from hybridflow.engines.rollout.base import NO_VERSION, Completion, EngineParameters, InFlight, Request
from hybridflow.engines.rollout.inflight import Response, drawing_seed, end_token_ids, open_response, sampled_log_probs
from hybridflow.engines.rollout.lockstep import Lockstep
from hybridflow.engines.rollout.vllm_arguments import check_environment, engine_arguments
from hybridflow.engines.rollout.vllm_parameters import check_loader, check_names, engine_parameters, parts_in
from hybridflow.utils.errors import EngineError, StateError

T = TypeVar("T")
TAGS = ("weights", "kv_cache")


class VLLMEngine:
    """``RolloutEngine`` over vLLM; one object per rank, owned by one thread.

    ``close`` ends torch.distributed, and so may dropping the last reference: keep the engine until the trainer is done.
    """

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
        """An engine whose weights are yet to be written.

        Where torch.distributed has a world, every rank of it builds its engine at the same point: vLLM makes its groups
        collectively. For tp > 1 the host has initialised it, and ranks ``[i * tp, (i + 1) * tp)`` form an engine.
        Random state, thread setting and rank variables of the host are as before afterwards.

        Args:
            eos_token_ids: ids that end every response; None: those the model folder names.
            vocab_limit: ids from here on are never sampled (rows of the embedding beyond the tokenizer).
            seed: of vLLM's own generator; requests bring theirs.
            lockstep_timeout_s: tp > 1: longest wait for a peer rank at a step.

        Raises:
            EngineError: for a vLLM build, environment or model that would give wrong numbers.
        """
        hf_config = AutoConfig.from_pretrained(model_path).get_text_config()
        self._max_model_len = config.max_model_len or max_prompt_tokens + max_response_tokens
        self._engine, self._copies = _built(
            model_path,
            hf_config,
            config,
            max_model_len=self._max_model_len,
            tp=tp,
            on_cpu=torch.device(device).type == "cpu",
            seed=seed,
            vocab_limit=vocab_limit,
        )
        if tp > 1:
            _unlink_message_queue()
        self._core = self._engine.engine_core
        self._lockstep = Lockstep(tp, lockstep_timeout_s) if tp > 1 else None
        self._can_release = self._engine.vllm_config.model_config.enable_sleep_mode
        self._eos_token_ids = end_token_ids(model_path) if eos_token_ids is None else eos_token_ids
        self._vocab_size = hf_config.vocab_size
        self._version = NO_VERSION
        self._announcement = self._announced = -1
        self._asleep: set[str] = set()
        self._closed = False
        self._pending: list[Response] = []
        self._running: dict[str, Response] = {}
        self._over: list[Completion] = []
        self._check_layout(model_path)

    def _check_layout(self, model_path: str) -> None:
        """Raises EngineError unless every parameter of the folder's model lies where ``parameters`` says."""
        parameters = engine_parameters(self._model())
        check_names(parameters, model_path)
        check_loader(self._model(), parameters)

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self._pending or self._running or self._over)

    @property
    def version(self) -> int:
        """Weight version that tokens are sampled from; -1 before the first publish and after a deep sleep."""
        return self._version

    @property
    def announced(self) -> int:
        """The first rank's number as of the last step, the same on every rank of the engine; -1: none yet."""
        return self._announced

    def announce(self, number: int) -> None:
        """Leaves a number that all ranks shall know after the same step; with tp > 1 only the first rank is heard."""
        self._announcement = number

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests for the next step. Raises EngineError, and queues none, where one can not be served."""
        known = {*self._running, *(response.request.request_id for response in self._pending)}
        opened = []
        for request in requests:
            if request.request_id in known:
                raise EngineError(f"request {request.request_id!r} is already running")
            known.add(request.request_id)
            opened.append(
                open_response(
                    request,
                    eos_token_ids=self._eos_token_ids,
                    max_model_len=self._max_model_len,
                    vocab_size=self._vocab_size,
                )
            )
        for response in opened:
            request = response.request
            self._record("submit", request.request_id, [*request.prompt_ids], [*request.sampled_ids], request.seed)
            self._record(request.sampling)
            reason = response.finish_reason
            if reason is None:
                self._pending.append(response)
            else:
                self._over.append(response.complete(reason))

    def step(self) -> list[Completion]:
        """Adds queued requests in order, runs one engine step, hands out what finished.

        With tp > 1 every rank of the group calls it, busy or not, and waits for the others before the forward pass.

        Raises:
            StateError: while asleep or before the first publish.
            EngineError: when vLLM failed, or a peer rank failed, is missing, or was told something else.
        """
        self._require_awake("step", *TAGS)
        if self._version < 0:
            raise StateError("step: the engine holds no published weights; call weights_written(version) first")
        self._guarded(self._admit)
        self._announced = self._announcement
        if self._lockstep is not None:
            self._lockstep.note = self._announcement
            self._lockstep.agree()
            self._announced = self._lockstep.heard
        return self._guarded(self._advance)

    def cancel(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stops requests now; their partial tokens, with finish reason ``abort``. Unknown ids are passed over."""
        wanted = set(request_ids)
        self._record("cancel", sorted(wanted))
        over = [completion for completion in self._over if completion.request_id in wanted]
        running = [response for request_id, response in self._running.items() if request_id in wanted]
        pending = [response for response in self._pending if response.request.request_id in wanted]
        self._core.abort_requests([response.request.request_id for response in running])
        for response in running:
            del self._running[response.request.request_id]
        self._pending = [response for response in self._pending if response.request.request_id not in wanted]
        self._over = [completion for completion in self._over if completion.request_id not in wanted]
        return over + [response.complete("abort") for response in running + pending]

    def sleep(self, level: int = 1) -> None:
        """Releases KV cache, and weights (level 1: to host memory, level 2: for good), where the backend can (GPU).

        Raises:
            StateError: while requests are waiting or running.
        """
        if self.busy:
            raise StateError("sleep: requests are waiting or running; finish or cancel them first")
        if level not in (1, 2):
            raise EngineError(f"sleep: level {level} is unknown; allowed are 1 and 2")
        if self._asleep:
            raise StateError(f"sleep: {' and '.join(sorted(self._asleep))} asleep already; call wake first")
        self.clear_caches()
        if self._can_release:
            self._engine.sleep(level)
        self._asleep = set(TAGS)
        if level == 2:
            self._version = -1

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Takes memory back for ``tags``; publish between ``weights`` and ``kv_cache`` to keep the peak low."""
        unknown = set(tags) - set(TAGS)
        if unknown:
            raise EngineError(f"wake: unknown tags {sorted(unknown)}; allowed are {list(TAGS)}")
        asleep = [tag for tag in TAGS if tag in tags and tag in self._asleep]
        if asleep and self._can_release:
            self._engine.wake_up(asleep)
        self._asleep -= set(asleep)

    def parameters(self) -> EngineParameters:
        """Writable views of what this rank computes with, looked up in the model now."""
        self._require_awake("parameters", "weights")
        return engine_parameters(self._model())

    def weights_written(self, version: int, in_flight: InFlight = "recompute") -> None:
        """Tells the engine that ``parameters()`` now hold ``version``: repacks, drops or keeps caches.

        Running requests are computed again from their tokens at the next step, or go on with the old keys and values,
        or are handed out by the next step. Version -1: the parameters are about to change.
        """
        self._require_awake("weights_written", "weights")
        if version < NO_VERSION:
            raise EngineError(f"weights_written: version {version} must be 0 or more, or {NO_VERSION} for none")
        self._version = NO_VERSION  # until all of it worked, neither the old nor the new version is true
        if version == NO_VERSION:
            return
        if self._copies is not None:
            self._copies.repack()
        self._record("in flight", in_flight)
        if in_flight == "abort":
            self._over += self.cancel(list(self._running))
        if in_flight != "keep":  # blocks that are kept are never shared: their salt is the old version
            self.clear_caches()
        self._engine.set_weight_version(str(version))
        self._record("weights", version)
        self._version = version

    def stale_copies(self) -> list[str]:
        """Names of blocks whose packed copies, which the kernels read, are not of ``parameters()`` (CPU only)."""
        if self._copies is None:
            return []
        parameters = engine_parameters(self._model())
        names = {id(parameter): name for name, parameter in self._model().named_parameters()}
        return [
            f"{part.hf_name} {part.hf_box}: the engine's packed copy is not of the weights that it holds"
            for weight, rows in self._copies.stale()
            for part, span in parts_in(parameters, names[id(weight)], weight)
            if rows & set(span)
        ]

    def clear_caches(self) -> None:
        """Drops KV and prefix caches; running requests are computed again. Raises EngineError when vLLM refused."""
        self._record("clear")
        if self._engine.reset_prefix_cache(reset_running_requests=True) is not True:
            raise EngineError("vLLM refused to drop its KV cache, which holds keys and values of earlier weights")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights and kv_cache held now on this rank's device."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self._model().parameters()}
        held = {
            "weights": sum(storages.values()),
            "kv_cache": sum(_nbytes(cache) for cache in _runner(self._engine).kv_caches),
        }
        return {tag: 0 if self._can_release and tag in self._asleep else size for tag, size in held.items()}

    def close(self) -> None:
        """Ends the engine and, with it, torch.distributed in this process: vLLM destroys the world. Call it last."""
        if self._closed:
            return
        self._closed = True
        self._version = -1
        self._pending, self._running, self._over = [], {}, []
        self._engine.engine_core.shutdown()

    def _guarded(self, call: Callable[[], T]) -> T:
        """``call()``; a failure is told to the other ranks, who would wait for this one at their next step."""
        try:
            return call()
        except Exception as error:
            if self._lockstep is not None:
                self._lockstep.fail(error)
            raise EngineError(f"vLLM failed in a step: {error!r}") from error

    def _admit(self) -> None:
        """Gives queued requests to vLLM. Before the ranks agree: what fails here leaves no peer in a forward pass."""
        for response in self._pending:
            self._add(response)
        self._pending = []
        self._record("running", len(self._running))

    def _advance(self) -> list[Completion]:
        """One forward pass, and what finished with it."""
        done, self._over = self._over, []
        if not self._running:
            return done
        for output in self._core.get_output().outputs:
            response = self._running[output.request_id]
            told = output.new_logprobs
            assert told is not None, "log-probs are asked for in every request"
            log_probs = sampled_log_probs(output.new_token_ids, told.logprob_token_ids.tolist(), told.logprobs.tolist())
            for token_id, log_prob in zip(output.new_token_ids, log_probs, strict=True):
                response.append(token_id, log_prob, self._version)
            self._record(output.request_id, output.new_token_ids)
            if output.finish_reason is None:
                continue
            reason = str(output.finish_reason)
            if reason not in ("stop", "length"):
                raise EngineError(f"request {output.request_id!r} ended with {reason!r}")
            del self._running[output.request_id]
            done.append(response.complete(reason))
        return done

    def _add(self, response: Response) -> None:
        request, sampling = response.request, response.request.sampling
        parameters = SamplingParams(
            max_tokens=response.max_tokens - len(response.token_ids),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=drawing_seed(request),
            stop_token_ids=sorted(response.stop_ids),
            ignore_eos=True,  # the model's own end token: ours are all in stop_token_ids
            logprobs=0,
            detokenize=False,
        )
        prompt = TokensPrompt(
            prompt_token_ids=[*request.prompt_ids, *response.token_ids], cache_salt=f"version {self._version}"
        )
        given = self._engine.input_processor.process_inputs(
            request.request_id, prompt, parameters, supported_tasks=self._engine.get_supported_tasks()
        )
        self._core.add_request(given)
        self._running[request.request_id] = response

    def _record(self, *facts: object) -> None:
        if self._lockstep is not None:
            self._lockstep.record(*facts)

    def _require_awake(self, what: str, *tags: str) -> None:
        if self._closed:
            raise StateError(f"{what}: the engine is closed")
        asleep = sorted(self._asleep & set(tags))
        if asleep:
            raise StateError(f"{what}: {' and '.join(asleep)} asleep; call wake first")

    def _model(self) -> nn.Module:
        return _runner(self._engine).model


def _import_architectures(architectures: Sequence[str]) -> None:
    """Lets vLLM look at model classes in this process; it would start another python for it, 10 s on a new machine."""
    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _unlink_message_queue() -> None:
    """Takes the name from the segment of vLLM's tensor-parallel queue: it goes with its processes, however they end.

    All ranks have mapped it: they have built their engines together.
    """
    buffer = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # or it would be unlinked once more


def _built(
    model_path: str,
    hf_config: Any,
    config: RolloutConfig,
    *,
    max_model_len: int,
    tp: int,
    on_cpu: bool,
    seed: int,
    vocab_limit: int | None,
) -> tuple[LLMEngine, vllm_cpu.CpuWeights | None]:
    """vLLM's engine, and on CPU what keeps its weights writable; the host's state is as before."""
    options = dict(config.engine_kwargs.get("vllm") or {})
    gemm = options.pop("cpu_gemm", vllm_cpu.GEMMS[0])
    check_environment(on_cpu, gemm, tp)
    arguments = engine_arguments(
        model_path,
        hf_config,
        config,
        options,
        max_model_len=max_model_len,
        tp=tp,
        on_cpu=on_cpu,
        seed=seed,
        vocab_limit=vocab_limit,
    )
    _import_architectures(hf_config.architectures or ())
    with _host_state_kept():
        if not on_cpu:
            return LLMEngine.from_engine_args(EngineArgs(**arguments)), None
        with vllm_cpu.building(gemm, distributed=tp > 1) as copies:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    vllm_cpu_kernels.install(_runner(engine))
    return engine, copies


def _runner(engine: LLMEngine) -> Any:
    """vLLM's model runner in this process."""
    return engine.model_executor.driver_worker.model_runner


def _nbytes(cache: Any) -> int:
    """Bytes of one layer's KV cache: a tensor, or several."""
    return cache.nbytes if isinstance(cache, Tensor) else sum(_nbytes(one) for one in cache)


@contextmanager
def _host_state_kept() -> Iterator[None]:
    """Gives the external launcher its rank variables, and puts back the host's random state and variables after it.

    vLLM seeds python's, numpy's and torch's global generators, which also belong to the trainer in this process.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    names = {}
    if dist.is_initialized():
        local = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
        names = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": local}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
