"""From a plan to a finished run: the only floor that knows everybody puts the pieces together and takes them apart."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console

from hybridflow.algorithms.kl import KL_CONTROLLERS
from hybridflow.batch.balance import TYPICAL_WIDTH
from hybridflow.config.root import PPOConfig
from hybridflow.data.builtin import model_folder
from hybridflow.data.loader import PromptLoader, validation_batches
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.dispatch.group import Fetched, WorkerGroup
from hybridflow.launch.cluster import ClusterStart
from hybridflow.launch.groups import open_groups
from hybridflow.launch.model_files import has_tokenizer
from hybridflow.launch.own_folder import own_folder
from hybridflow.launch.plan import RunPlan
from hybridflow.launch.prompts import read_prompts
from hybridflow.launch.restart import told_at_once, try_again
from hybridflow.launch.signals import Interrupted, StopSignals
from hybridflow.launch.specs import OBSERVER, ModelSource, worker_specs
from hybridflow.roles.handles import (
    ActorHandle,
    CostCriticHandle,
    CriticHandle,
    Handle,
    ModelRewardHandle,
    ObserverHandle,
    ReferenceHandle,
    RewardHandle,
    RewardModelHandle,
    RolloutHandle,
    WeightsHandle,
)
from hybridflow.roles.protocols import Checkpointed, Reward, Roles
from hybridflow.roles.separate_weights import SeparateWeightsHandle
from hybridflow.single_controller.replicas import ReplicaGroup
from hybridflow.topology.resources import MAIN_POOL
from hybridflow.trainer.checkpoint import CheckpointStore
from hybridflow.trainer.ppo import PPOTrainer
from hybridflow.trainer.progress import StartUp, final_lines, screen
from hybridflow.trainer.remax import ReMaxTrainer
from hybridflow.trainer.resume import checkpoint_store
from hybridflow.trainer.run import Run
from hybridflow.trainer.safe_rlhf import SafeRLHFTrainer
from hybridflow.trainer.tracking import build_trackers
from hybridflow.utils import logging as run_logging
from hybridflow.utils.errors import ConfigError, MachineError

logger = logging.getLogger(__name__)

H = TypeVar("H", bound=Handle)

TRAINERS: dict[str, type[PPOTrainer]] = {"remax": ReMaxTrainer}
"""Estimators whose dataflow differs from PPO's."""

TRY_NEXT = (
    "{python} -m hybridflow.report {folder}  # curves as a picture",
    "{python} -m hybridflow.main_ppo preset=ppo  # PPO with a critic",
    "{python} -m hybridflow.main_ppo trainer.n_gpus_per_node=2  # two ranks",
)


def run(config: PPOConfig, plan: RunPlan, cluster: ClusterStart | None = None) -> int:
    """Runs every step of the plan; 0 when all are done, 130 or 143 when a signal ended it before.

    Whatever happens, every process that it started is ended; after a death or a passed deadline, before it starts again
    (``trainer.max_restarts``).
    ``cluster``: Ray that starts in the background since before torch was imported; None: it is started here.
    """
    run_logging.set_up()
    folder = Path(config.trainer.default_local_dir)
    console = screen()
    store = checkpoint_store(config)
    with own_folder(folder), StopSignals(saves=config.trainer.save_freq > 0) as signals:
        _write_config(config, folder)
        tries = _Tries(config, plan, console, store, signals, cluster)
        try:
            record = try_again(
                tries.once,
                restarts=config.trainer.max_restarts,
                backoff_s=config.trainer.restart_backoff_s,
                progress=lambda: store.last_own,
                stop_asked=signals.asked,
                say=lambda text: console.print(text, markup=False),
            )
        except Interrupted:
            return signals.exit_code
    _print_end(console, record, folder)
    return signals.exit_code if record.interrupted else 0


class _Tries:
    """The run from start to end, any number of times; each try ends all that it started."""

    def __init__(
        self,
        config: PPOConfig,
        plan: RunPlan,
        console: Console,
        store: CheckpointStore,
        signals: StopSignals,
        cluster: ClusterStart | None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.console = console
        self.store = store
        self.signals = signals
        self._cluster = cluster
        self._restart = False

    def once(self) -> Run:
        """One try."""
        start = StartUp(restart=self._restart)
        self._restart = True
        cluster, self._cluster = self._cluster or ClusterStart(self.config), None
        try:
            with ExitStack() as stack, told_at_once():
                with start.phase("wait for ray"):
                    cluster.enter(stack)
                trainer, record = _assemble(self, start, stack)
                self.console.print(start.table())
                self.signals.arm()
                trainer.fit()
            return record
        except Exception:
            self.signals.disarm()
            raise


def _assemble(tries: _Tries, start: StartUp, stack: ExitStack) -> tuple[PPOTrainer, Run]:
    config, plan = tries.config, tries.plan
    with start.phase("tokenizer"):
        source, tokenizer = _model_source(config)
    known = plan.batch.total_steps
    if known is not None or not _schedule_needs_length(config):
        # Workers import and load while the driver reads and tokenises.
        with start.phase("start processes"):
            groups = open_groups(config, plan, worker_specs(config, plan, source, known), stack)
        with start.phase("data"):
            train, validation = read_prompts(config, tokenizer)
    else:
        with start.phase("data"):
            train, validation = read_prompts(config, tokenizer)
        with start.phase("start processes"):
            specs = worker_specs(config, plan, source, plan.batch.steps(len(train)))
            groups = open_groups(config, plan, specs, stack)
    loader = PromptLoader(
        train,
        batch_size=config.data.train_batch_size,
        seed=config.trainer.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
    )
    with start.phase("workers ready"):
        for group in groups.values():
            group.wait_ready()
    roles = _roles(config, plan, groups)
    if isinstance(roles.weights, SeparateWeightsHandle):
        with start.phase("join pools"):
            roles.weights.join()
    total_steps = plan.batch.steps(len(train))
    tracker = build_trackers(
        config.trainer.logger,
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        folder=config.trainer.default_local_dir,
        config=dataclasses.asdict(config),
        total_steps=total_steps,
        deadline_s=config.trainer.timeouts.track_s,
    )
    stack.callback(tracker.finish)  # also when a run fails: the live line must not stay open
    record = Run(
        config,
        roles=roles,
        prompts=loader,
        validation=lambda: validation_batches(validation, config.data.val_batch_size),
        kl=KL_CONTROLLERS[config.algorithm.kl_ctrl.type](config.algorithm.kl_ctrl),
        tracker=tracker,
        store=tries.store,
        total_steps=total_steps,
        observers=[ObserverHandle(group, OBSERVER) for group in groups.values()],
        bytes_moved=lambda: sum(group.bytes_moved() for group in groups.values()),
        bytes_fetched=lambda: sum((group.bytes_fetched() for group in groups.values()), Fetched()),
        stragglers=lambda: {name: ratio for group in groups.values() for name, ratio in group.stragglers().items()},
        offer=groups[MAIN_POOL].keep,
        stop_asked=tries.signals.asked,
    )
    record.keep("trackers", tracker)
    stack.callback(record.close)
    return trainer_of(config)(roles, record, config), record


def trainer_of(config: PPOConfig) -> type[PPOTrainer]:
    """The dataflow of the run."""
    if config.algorithm.safe_rlhf.enable:
        return SafeRLHFTrainer
    return TRAINERS.get(config.algorithm.adv_estimator, PPOTrainer)


def _model_source(config: PPOConfig) -> tuple[ModelSource, Tokenizer]:
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    policy = model_folder(model.path)
    source = ModelSource(
        policy=policy,
        critic=policy if config.critic.model.path is None else model_folder(config.critic.model.path),
        reward_model=_reward_model(config, tokenizer),
        tokenizer=model_folder(model.tokenizer_path or model.path),
        eos_token_ids=tokenizer.eos_ids,
        vocab_limit=tokenizer.vocabulary_size,
    )
    return source, tokenizer


def _reward_model(config: PPOConfig, tokenizer: Tokenizer) -> str:
    """Folder of the reward model; empty where none scores. One without a tokenizer reads the policy's tokens.

    Raises:
        ConfigError: it was trained on other tokens than those that the policy samples, or its tokenizer cannot be read.
    """
    scorer = config.reward.reward_model
    if not scorer.enable:
        return ""
    folder = model_folder(scorer.model.path)
    own = scorer.model.tokenizer_path or folder
    if Path(own).is_dir() and not has_tokenizer(Path(own)):
        return folder
    other = load_tokenizer(own, trust_remote_code=scorer.model.trust_remote_code)
    if other.hf.get_vocab() != tokenizer.hf.get_vocab():
        raise ConfigError(
            f"reward.reward_model.model.path={scorer.model.path}: its tokens are not those of {tokenizer.source}, "
            "which it would be given. Use a reward model with the policy's tokenizer, or call this one from "
            "reward.custom_reward_function"
        )
    return folder


def _schedule_needs_length(config: PPOConfig) -> bool:
    optims = [config.actor_rollout_ref.actor.optim, *([config.critic.optim] if config.needs_critic else [])]
    return any(optim.lr_scheduler_type != "constant" or optim.lr_warmup_steps_ratio > 0 for optim in optims)


def _roles(config: PPOConfig, plan: RunPlan, groups: dict[str, WorkerGroup]) -> Roles:
    played = {role.role: role for role in plan.roles}

    def handle(kind: type[H], role: str, *, updates: bool = False) -> H:
        where = played[role]
        return kind(
            groups[where.pool],
            role,
            balanced_over=where.dims.dp if config.trainer.balance_batch else 1,
            block_rows=plan.batch.update(role).mini_batch_sequences if updates else None,
            together=config.actor_rollout_ref.rollout.n if config.shares_prompts(role) else 1,
            hidden=TYPICAL_WIDTH if plan.model is None else plan.model.hidden,
        )

    actor = handle(ActorHandle, "actor", updates=True)
    critic = handle(CriticHandle, "critic", updates=True) if "critic" in played else None
    cost_critic = handle(CostCriticHandle, "cost_critic", updates=True) if "cost_critic" in played else None
    checkpointed: dict[str, Checkpointed] = {"actor": actor}
    if critic is not None:
        checkpointed["critic"] = critic
    if cost_critic is not None:
        checkpointed["cost_critic"] = cost_critic
    scorer = handle(RewardHandle, "reward")
    reward: Reward = scorer
    if "reward_model" in played:
        reward = ModelRewardHandle(handle(RewardModelHandle, "reward_model"), scorer)
    return Roles(
        actor=actor,
        rollout=handle(RolloutHandle, "rollout"),
        weights=_weights(config, groups),
        reward=reward,
        critic=critic,
        cost_critic=cost_critic,
        reference=handle(ReferenceHandle, "reference") if "reference" in played else None,
        checkpointed=checkpointed,
    )


def _weights(config: PPOConfig, groups: dict[str, WorkerGroup]) -> WeightsHandle | SeparateWeightsHandle:
    senders = groups[config.pool_of("actor")]
    if config.rollout_shares_devices:
        return WeightsHandle(senders, "weights")
    receivers = groups[config.pool_of("rollout")]
    assert isinstance(receivers, ReplicaGroup), "open_groups makes one where the generator lives apart"
    handle = SeparateWeightsHandle(senders, receivers, "weights")
    receivers.welcome = handle.welcome
    return handle


def python_command() -> str:
    """``python`` where that starts this interpreter (an activated environment), else this interpreter's path."""
    own = Path(sys.executable)
    if shutil.which("python") == str(own):
        return "python"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def _write_config(config: PPOConfig, folder: Path) -> None:
    text = yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)
    try:
        (folder / "resolved_config.yaml").write_text(text)
    except OSError as error:
        raise MachineError(f"trainer.default_local_dir={folder} cannot be written to: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _print_end(console: Console, record: Run, folder: Path) -> None:
    try_next = [command.format(python=python_command(), folder=shlex.quote(str(folder))) for command in TRY_NEXT]
    for line in final_lines(record.first_validation, record.last_validation, folder=folder, try_next=try_next):
        console.print(line, markup=False)
