"""The run around the dataflow: prompts in, metrics out, and what happens on a cadence (validate, save, log).

``PPOTrainer`` calls it at the seams of a step and knows nothing of files, trackers or clocks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridflow.algorithms.kl import KLController
from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import gather
from hybridflow.config.problems import did_you_mean
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import Fetched
from hybridflow.roles.protocols import Observer, Roles
from hybridflow.trainer.checkpoint import Checkpoint, CheckpointStore
from hybridflow.trainer.costs import cost_metrics
from hybridflow.trainer.failures import failure_metrics, failures, refuse_too_many
from hybridflow.trainer.metrics import batch_metrics, reward_parts
from hybridflow.trainer.profiling import StepProfiler
from hybridflow.trainer.resume import plain_config, tell_changes, tell_versions, versions
from hybridflow.trainer.saving import Saver
from hybridflow.trainer.tracking import Tracker, clean_name, finite
from hybridflow.trainer.validate import validate
from hybridflow.trainer.warnings import TOKEN_MEANS, Alarms
from hybridflow.utils.errors import ConfigError, MachineError, StateError
from hybridflow.utils.timing import Stopwatch

logger = logging.getLogger(__name__)


class Prompts(Protocol):
    """Where training prompts come from: endless, seeded, resumable."""

    def next_batch(self) -> Batch:
        """The next ``data.train_batch_size`` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        ...

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        ...


class Stateful(Protocol):
    """What a dataflow learns besides weights, in a checkpoint."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from them."""
        ...


class Run:
    """One run of a trainer.

    Args:
        config: the whole configuration.
        roles: who plays (for validation and checkpoints).
        prompts: training prompts.
        validation: batches of held-out prompts, made anew each time.
        kl: coefficient of the KL in the reward.
        tracker: where metrics go.
        store: where checkpoints go; what it has made itself is gone on from first (a restart).
        total_steps: trainer steps.
        observers: what says what a step cost, one for each pool.
        bytes_moved: payload bytes through the driver since the last call.
        stragglers: by method, the slowest rank's time over the median since the last call.
        bytes_fetched: bytes that ranks read of one another's rows since the last call.
        offer: puts the wide columns of prompts where ranks can fetch them.
        stop_asked: whether the run should save and end after the step that runs.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        roles: Roles,
        prompts: Prompts,
        validation: Callable[[], Iterable[Batch]],
        kl: KLController,
        tracker: Tracker,
        store: CheckpointStore,
        total_steps: int,
        observers: Sequence[Observer],
        bytes_moved: Callable[[], int],
        stragglers: Callable[[], Mapping[str, float]],
        bytes_fetched: Callable[[], Fetched],
        offer: Callable[[Batch], Batch],
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.kl = kl
        self.total_steps = 0 if config.trainer.val_only else total_steps
        self.first_validation: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self._roles = roles
        self._prompts = prompts
        self._validation = validation
        self._tracker = tracker
        self._observers = observers
        self._profiler = StepProfiler(config.profiler, observers, Path(config.trainer.default_local_dir))
        self._bytes_moved = bytes_moved
        self._stragglers = stragglers
        self._bytes_fetched = bytes_fetched
        self._offer = offer
        self._stop_asked = stop_asked
        self.interrupted = False
        """Whether the run ended before its last step because it was asked to."""
        self._store = store
        self._saver = Saver(
            self._store,
            roles.checkpointed,
            overlaps=_saves_in_background(config),
            goes_on=config.trainer.save_failure == "warn",
            deadline_s=config.trainer.timeouts.save_s,
        )
        self._metrics: dict[str, float] = {}
        self._watch = Stopwatch()
        self._validated_at: int | None = None
        self._alarms = Alarms(kl_loss_per_token=config.actor_rollout_ref.actor.loss_agg_mode in TOKEN_MEANS)
        self._kept: dict[str, Stateful] = {"alarms": self._alarms}

    def keep(self, name: str, state: Stateful) -> None:
        """Saves ``state`` with every checkpoint and restores it with the run; to be called before ``restore``."""
        self._kept[name] = state

    def next_prompts(self, n: int) -> Batch:
        """The next prompts, each ``n`` times next to itself, with ``sample_index`` 0..n-1."""
        rows = self._offer(self._prompts.next_batch()).repeat(n)
        return rows.with_columns(sample_index=torch.arange(len(rows)) % n)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of the step as ``timing_s/<name>``."""
        return self._watch.phase(name)

    def took(self, name: str, seconds: float) -> None:
        """Adds the time of a call to ``timing_s/<name>``; a save in the background moves on, the next need not wait."""
        self._watch.add(name, seconds)
        self._saver.poll()

    def record(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step."""
        self._metrics.update(metrics)

    def note_scores(self, batch: Batch) -> None:
        """Adds what the reward function said beside scores, and failed samples by cause; before anything is learned.

        Raises:
            RewardError: more than ``reward.max_failed_share`` of the step failed.
        """
        found = failures(batch)
        parts = reward_parts(batch.objects("reward_info"))
        self.record({**failure_metrics(found), **{f"reward/{name}/mean": mean for name, mean in parts.items()}})
        refuse_too_many(batch, found, self.config.reward.max_failed_share)

    def observe(self, batch: Batch) -> None:
        """Adds what the finished batch says about itself; writes its samples where asked."""
        self.record(batch_metrics(batch))
        if self.config.trainer.rollout_data_dir is not None:
            step = int(self._metrics["training/global_step"])
            self._write_samples("rollout_data_dir", self.config.trainer.rollout_data_dir, step, _rollout_rows(batch))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Collects the metrics of one step."""
        self._metrics = {"training/global_step": float(step), "training/epoch": float(self._prompts.epoch)}
        for call in [observer.begin_step() for observer in self._observers]:
            gather(call)
        self._watch.take()  # what came between two steps belongs to neither
        self._bytes_moved()
        self._bytes_fetched()
        self._stragglers()
        with self._profiler.step(step), self.phase("step"):
            yield
            self.record({"perf/driver_bytes": float(self._bytes_moved())})
            fetched = self._bytes_fetched()
            self.record({"perf/fetched_bytes": float(fetched.all), "perf/over_fetch_bytes": float(fetched.beyond)})
            self.record({f"perf/straggler/{method}": ratio for method, ratio in self._stragglers().items()})
        costs = [gather(call) for call in [observer.step_costs() for observer in self._observers]]
        self.record(cost_metrics(costs, self._watch.seconds["step"]))

    def before(self, done: int) -> None:
        """Validates before the first step, unless the run goes on from a checkpoint."""
        self._watch.take()  # what the start took belongs to no step
        if done == 0 and self.config.trainer.val_before_train:
            self._metrics = {}
            self._validate(done)
            self.record(self._watch.take())
            self._tracker.log(done, self._metrics)

    def steps(self, done: int) -> Iterator[int]:
        """Steps ``done + 1 .. total``; asked to stop, it saves what is not saved yet and ends."""
        for step in range(done + 1, self.total_steps + 1):
            if self._profiler.over(step - 1):
                return
            if self._stop_asked():
                self.interrupted = True
                if self.config.trainer.save_freq > 0 and step > 1 and self._saver.saved_at != step - 1:
                    self._save(step - 1)
                return
            yield step

    def after(self, step: int) -> None:
        """Validates, logs and saves, each on its own cadence; the last step validates and (if asked at all) saves.

        The line of a step is written before its checkpoint: a run that dies between the two does the step again, and
        the line is replaced; the other way round it would be lost. What the checkpoint took is added to it.
        """
        settings = self.config.trainer
        last = step == self.total_steps
        self._saver.poll()
        if last or _due(step, settings.test_freq):
            self._validate(step)
        self._log(step)
        if settings.save_freq > 0 and (last or _due(step, settings.save_freq)):
            with self.phase("save_checkpoint"):
                self._save(step)
            self._tracker.log(step, self._watch.take())

    def end(self) -> None:
        """Waits for the last checkpoint and closes the trackers."""
        self._saver.settle()
        self._tracker.finish()

    def close(self) -> None:
        """Completes a checkpoint that is being written, also when the run failed."""
        self._saver.close()

    def restore(self) -> int:
        """Goes on from a checkpoint where ``trainer.resume_mode`` finds one; the step it was made after, else 0."""
        found = self._find_checkpoint()
        if found is None:
            self._store.go_on_from(0)
            return 0
        self._store.go_on_from(found.step)
        state = found.state()
        tell_changes(state["config"], self.config)
        tell_versions(found.about()["versions"], versions())
        self._saver.load(found)
        self._prompts.load_state_dict(state["prompts"])
        self.kl.load_state_dict(state["kl"])
        for name, kept in self._kept.items():
            if name in state:
                kept.load_state_dict(state[name])
            else:
                logger.warning("%s was saved without the state of %s: it starts anew", found.folder, name)
        self.first_validation = state["first_validation"]
        self.last_validation = state["last_validation"]
        logger.info("resumed from %s", found.folder)
        if 0 < self.total_steps <= found.step:
            said = (found.folder, found.step, self.total_steps)
            logger.warning("%s is of step %d and the run has %d: no step is left to do", *said)
        return found.step

    def _find_checkpoint(self) -> Checkpoint | None:
        settings = self.config.trainer
        if (own := self._store.newest_own()) is not None:
            return own
        if settings.resume_mode == "disable":
            return None
        if settings.resume_mode == "auto":
            return self._store.newest()
        if settings.resume_from_path is None:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        try:
            return self._store.at(settings.resume_from_path)
        except StateError as error:
            raise ConfigError(f"trainer.resume_from_path: {error}") from error

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "prompts": self._prompts.state_dict(),
            "kl": self.kl.state_dict(),
            "first_validation": self.first_validation,
            "last_validation": self.last_validation,
            "config": plain_config(self.config),
            **{name: kept.state_dict() for name, kept in self._kept.items()},
        }
        self._saver.save(step, state, score=self._score(step))

    def _score(self, step: int) -> float | None:
        """What ``trainer.best_metric`` names at this step; a name that no step can have is told."""
        name = self.config.trainer.best_metric
        score = _score(self._metrics, name)
        if name is not None and score is None and self._validated_at == step:
            close = did_you_mean(name.removeprefix("-"), list(self._metrics))
            logger.warning("trainer.best_metric=%s is no metric of step %d, so none is the best. %s", name, step, close)
        return score

    def _validate(self, step: int) -> None:
        if self._validated_at == step:
            return
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        with self.phase("testing"):
            found = validate(self._roles, map(self._offer, self._validation()), sampling, step=step)
        self._validated_at = step
        self.record(found.metrics)
        self.last_validation = found.metrics
        self.first_validation = self.first_validation or found.metrics
        if self.config.trainer.validation_data_dir is not None:
            self._write_samples("validation_data_dir", self.config.trainer.validation_data_dir, step, found.samples)
        self._tracker.log_samples(step, found.samples[: self.config.trainer.log_val_generations])

    def _write_samples(self, key: str, folder: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the samples of a step; what a disk that refuses leads to is that of a checkpoint."""
        try:
            _write_lines(Path(folder) / f"step_{step}.jsonl", rows)
        except OSError as error:
            text = f"the samples of step {step} could not be written to trainer.{key}={folder}: {error}"
            if self.config.trainer.save_failure != "warn":
                raise MachineError(f"{text}. trainer.save_failure=warn goes on without them") from error
            logger.error("%s. Training goes on (trainer.save_failure=warn)", text)

    def _log(self, step: int) -> None:
        seconds = self._watch.seconds["step"]
        tokens = self._metrics.get("perf/total_num_tokens", 0.0)
        if self._saver.failed:
            self.record({"checkpoint/failed_saves": float(self._saver.failed)})
        self.record({**self._watch.take(), "perf/time_per_step": seconds, "perf/throughput": tokens / seconds})
        self._alarms.say(self._metrics)
        self._tracker.log(step, self._metrics)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _saves_in_background(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.actor.checkpoint.async_save or config.critic.checkpoint.async_save


def _score(metrics: Mapping[str, float], name: str | None) -> float | None:
    """The metric that ``trainer.best_metric`` names, higher is better; None where the step has none."""
    if name is None:
        return None
    bare = name.removeprefix("-")
    found = next((value for key, value in metrics.items() if bare in (key, clean_name(key))), None)
    return None if found is None else float(found) * (-1 if name != bare else 1)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(finite(row), default=str) + "\n" for row in rows))


def _rollout_rows(batch: Batch) -> Iterator[dict[str, Any]]:
    columns = zip(
        batch["group_id"].tolist(),
        batch["sample_index"].tolist(),
        batch.objects("raw_prompt"),
        batch.objects("response_text"),
        batch.objects("ground_truth"),
        batch["score"].tolist(),
        batch["valid"].tolist(),
        batch.objects("finish_reason"),
        batch.objects("reward_info"),
        strict=True,
    )
    names = ("group_id", "sample_index", "prompt", "response", "ground_truth", "score", "valid", "finish_reason")
    names = (*names, "reward_info")
    for values in columns:
        yield dict(zip(names, values, strict=True))
