"""What this machine has or lacks for a plan: devices, packages, files, model, data, reward function, memory, folders.

Nothing heavy is imported and no user code runs: files are parsed, packages are looked up.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import fsspec
from packaging.version import Version

from hybridflow.config.actor import ActorConfig, RefConfig
from hybridflow.config.checks import is_generated
from hybridflow.config.choices import PARALLEL_FAMILIES
from hybridflow.config.constraints import is_url
from hybridflow.config.critic import CriticConfig
from hybridflow.config.data import BUILTIN_TASK
from hybridflow.config.model import ModelConfig
from hybridflow.config.problems import did_you_mean
from hybridflow.config.reward import RewardModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.data.builtin import SHIPPED_MODEL
from hybridflow.launch.data_findings import check_data
from hybridflow.launch.hf_model import ModelFacts, find_folder, hub_answers, looks_like_hub_name, read_model
from hybridflow.launch.machine import Machine, inspect_machine
from hybridflow.launch.model_files import check_model_files, check_tokenizer, stored_shapes
from hybridflow.launch.paths import similar
from hybridflow.launch.plan import Finding, RunPlan
from hybridflow.launch.user_code import check_user_code
from hybridflow.trainer.checkpoint import MANIFEST
from hybridflow.trainer.remote import RemoteFolder
from hybridflow.utils.errors import MachineError

MODEL_KEY = "actor_rollout_ref.model.path"
ROLLOUT = "actor_rollout_ref.rollout"
GIB = 1 << 30
MUON_SINCE = (2, 9)
"""First torch with torch.optim.Muon."""


def check_machine(config: PPOConfig, plan: RunPlan, machine: Machine | None = None) -> list[Finding]:
    """Findings on this machine, one per question; those of level ``error`` are fatal for a real run."""
    machine = machine or inspect_machine()
    return [
        *_devices(config, plan, machine),
        *_packages(config),
        *_training(config, plan),
        *_models(config, plan),
        *check_data(config),
        *check_user_code(config),
        *_files(config),
        *_memory(plan, machine),
    ]


def fatal(findings: list[Finding]) -> MachineError | None:
    """The error that a real run ends with; None when nothing is fatal."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return None
    if len(errors) == 1:
        return MachineError(str(errors[0]))
    lines = [f"this machine lacks {len(errors)} things:"] + [f"  {n}. {error}" for n, error in enumerate(errors, 1)]
    return MachineError("\n".join(lines))


def joins_cluster(config: PPOConfig) -> bool:
    """Whether the run uses a Ray cluster that already exists."""
    return bool(config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS"))


def _devices(config: PPOConfig, plan: RunPlan, machine: Machine) -> Iterator[Finding]:
    asked = sum(pool.pool.world for pool in plan.pools if pool.device == plan.device and pool.pool.name != "host")
    key = "trainer.n_gpus_per_node"
    if config.trainer.controller == "ray" and joins_cluster(config):
        text = f"{asked} devices are asked of a Ray cluster that is judged when it is joined"
        yield Finding(level="ok", what=key, text=text)
    elif plan.device == "cpu":
        text = f"{asked} logical slot{'s' * (asked > 1)} on {machine.cores} CPU core{'s' * (machine.cores > 1)}"
        if asked > machine.cores:
            yield Finding(level="warning", what=key, text=text, fix="It works, and slots take turns on the cores.")
        else:
            yield Finding(level="ok", what=key, text=text)
    else:
        yield from _gpus(config, machine, asked)


def _gpus(config: PPOConfig, machine: Machine, asked: int) -> Iterator[Finding]:
    key, have = "trainer.n_gpus_per_node", len(machine.gpus)
    if config.trainer.nnodes > 1:
        text = f"{config.trainer.nnodes} nodes need a Ray cluster, and no address is given"
        fix = "Set ray_kwargs.ray_init.address=HOST:PORT (or RAY_ADDRESS), or trainer.nnodes=1."
        yield Finding(level="error", what="trainer.nnodes", text=text, fix=fix)
    elif have == 0:
        fix = "Use trainer.device=cpu, or run on a machine with GPUs."
        yield Finding(
            level="error", what="trainer.device", text="cuda is asked for and this machine has no GPU", fix=fix
        )
    elif not machine.cuda_usable:
        text = f"the installed torch ({machine.torch_build}) cannot use this machine's GPUs"
        fix = "Install a CUDA build (bash scripts/install.sh), or use trainer.device=cpu."
        yield Finding(level="error", what="trainer.device", text=text, fix=fix)
    elif asked > have:
        text = f"{asked} GPUs are asked for (all pools together) and this machine has {have}"
        fix = f"Use trainer.n_gpus_per_node={have}, fewer pools, or a Ray cluster (ray_kwargs.ray_init.address)."
        yield Finding(level="error", what=key, text=text, fix=fix)
    else:
        gpu = machine.gpus[0]
        text = f"{asked} of {have} GPUs ({gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB)"
        yield Finding(level="ok", what=key, text=text)


def _packages(config: PPOConfig) -> Iterator[Finding]:
    wanted = [("torch", "trainer", "bash scripts/install.sh", True)]
    if config.trainer.controller == "ray":
        fix = "Install hybridflow[ray], or set trainer.controller=local."
        wanted.append(("ray", "trainer.controller", fix, True))
    engine = config.actor_rollout_ref.rollout.name
    if engine == "vllm":
        fix = f"Install hybridflow[cpu] or [gpu], or set {ROLLOUT}.name=hf."
        wanted.append(("vllm", f"{ROLLOUT}.name", fix, True))
    trackers = {"tensorboard": "tensorboard", "wandb": "wandb"}
    for name in config.trainer.logger:
        if name in trackers:
            wanted.append(
                (trackers[name], "trainer.logger", f"Install {name}, or leave it out of trainer.logger.", True)
            )
    sources = (*config.data.train_files, *config.data.val_files)
    if any(source.startswith("reasoning_gym:") for source in sources):
        wanted.append(("reasoning_gym", "data.train_files", "Install hybridflow[data].", True))
    for package, key, fix, needed in wanted:
        present = importlib.util.find_spec(package) is not None
        if present:
            yield Finding(level="ok", what=key, text=f"package {package} is installed")
        elif needed:
            yield Finding(level="error", what=key, text=f"package {package} is not installed", fix=fix)


def _training(config: PPOConfig, plan: RunPlan) -> Iterator[Finding]:
    """What the training engine can do on this device and with this torch."""
    policy = config.actor_rollout_ref
    roles = [("actor_rollout_ref.actor", policy.actor.use_torch_compile)]
    roles += [("actor_rollout_ref.ref", policy.ref.use_torch_compile)] if config.needs_reference else []
    for at, compiled in roles:
        if compiled and plan.device == "cpu":
            key, text = f"{at}.use_torch_compile", "layers are compiled on GPUs only, and this run uses the CPU"
            yield Finding(level="error", what=key, text=text, fix="Use False.")
    models = [("actor_rollout_ref.model", policy.model)]
    models += [("critic.model", config.critic.model)] if config.needs_critic else []
    for at, model in models:
        if model.use_liger and plan.device == "cpu":
            key, text = f"{at}.use_liger", "liger's kernels run on GPUs only, and this run uses the CPU"
            yield Finding(level="error", what=key, text=text, fix="Use False.")
        elif model.use_liger and importlib.util.find_spec("liger_kernel") is None:
            key, text = f"{at}.use_liger", "package liger_kernel is not installed"
            yield Finding(level="error", what=key, text=text, fix="Install hybridflow[liger].")
        if model.enable_activation_offload and plan.device == "cpu":
            key, text = f"{at}.enable_activation_offload", "does nothing: on a CPU activations are in host memory"
            yield Finding(level="warning", what=key, text=text, fix="Remove the key.")
    optimizers = [("actor_rollout_ref.actor.optim", policy.actor.optim)]
    optimizers += [("critic.optim", config.critic.optim)] if config.needs_critic else []
    for at, optim in optimizers:
        if optim.optimizer == "Muon" and _torch_release() < MUON_SINCE:
            text = f"torch {metadata.version('torch')} has no Muon"
            fix = f"Install torch {'.'.join(map(str, MUON_SINCE))} or later, or use AdamW."
            yield Finding(level="error", what=f"{at}.optimizer", text=text, fix=fix)


def _torch_release() -> tuple[int, ...]:
    """Release numbers of the installed torch; without one, which another finding says, nothing more is said."""
    if importlib.util.find_spec("torch") is None:
        return MUON_SINCE
    return Version(metadata.version("torch")).release


def _models(config: PPOConfig, plan: RunPlan) -> Iterator[Finding]:
    policy = config.actor_rollout_ref
    yield from _model_folder(MODEL_KEY, policy.model.path)
    yield from _tokenizer(policy.model)
    if config.needs_critic and config.critic.model.path is not None:
        yield from _model_folder("critic.model.path", config.critic.model.path)
    if config.reward.reward_model.enable:
        yield from _reward_model(config.reward.reward_model)
    adapter = policy.model.lora_adapter_path
    if adapter is not None:
        key = "actor_rollout_ref.model.lora_adapter_path"
        yield from _exists(key, adapter)
        if Path(adapter).exists() and not (Path(adapter) / "adapter_model.safetensors").is_file():
            text = f"{adapter} holds no adapter_model.safetensors"
            yield Finding(level="error", what=key, text=text, fix="Give the folder that PEFT's save_pretrained wrote.")
    for at, model in (("actor_rollout_ref.model", policy.model), ("critic.model", config.critic.model)):
        path = model.path or policy.model.path
        if model.lora_rank > 0 and (at != "critic.model" or config.needs_critic):
            yield from _adapted(f"{at}.target_modules", model.target_modules, path)
    if plan.model is not None:
        yield from _model_fits(config, plan.model)


def _adapted(key: str, targets: str | tuple[str, ...], path: str) -> Iterator[Finding]:
    """Whether every module that is to get an adapter is part of the model (PEFT passes over those that are not)."""
    folder = SHIPPED_MODEL if path == BUILTIN_TASK else find_folder(path)
    try:
        modules = {name.rpartition(".")[0] for name in (stored_shapes(folder) if folder is not None else ())}
    except MachineError:  # said elsewhere
        return
    leaves = sorted({module.rpartition(".")[2] for module in modules if ".layers." in module})
    if targets == "all-linear" or not leaves:
        return
    if isinstance(targets, str):
        absent = [] if _matches(targets, modules) else [targets]
    else:
        absent = [target for target in targets if not any(f".{module}".endswith(f".{target}") for module in modules)]
    if absent:
        fix = f"Write all-linear, or a list of some of {', '.join(leaves)}."
        if isinstance(targets, str) and targets in leaves:
            fix = f"A text is a pattern of whole names; write [{targets}]."
        yield Finding(level="error", what=key, text=f"{path} has no module {', '.join(absent)}", fix=fix)


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern fits any name whole; one that is no pattern fits nothing."""
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return False


def _model_folder(key: str, path: str) -> Iterator[Finding]:
    if path == BUILTIN_TASK:
        yield Finding(level="ok", what=key, text=f"{path} comes with hybridflow")
        return
    try:
        model = read_model(path)
    except MachineError as error:
        yield Finding(level="error", what=key, text=str(error), fix="Give a folder with config.json and safetensors.")
        return
    folder = find_folder(path)
    if model is not None and folder is not None:
        faults = list(check_model_files(key, folder))
        count = f"{model.parameters / 1e6:,.2f} million parameters"
        yield from faults or [Finding(level="ok", what=key, text=f"{model.kind}, {count}, in {folder}")]
    elif Path(path).is_file():
        text = f"{path} is a file"
        yield Finding(level="error", what=key, text=text, fix=f"Give the folder: {Path(path).parent}.")
    elif not looks_like_hub_name(path):
        yield Finding(level="error", what=key, text=f"{path} does not exist", fix=similar(path))
    elif os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        fix = "Download it first, or give a folder."
        yield Finding(
            level="error", what=key, text=f"{path} is not in the local cache and HF_HUB_OFFLINE is set", fix=fix
        )
    elif not hub_answers():
        text = f"{path} is neither a folder nor in the local cache, and the hub cannot be reached from here"
        yield Finding(level="error", what=key, text=text, fix="Give a folder, or download it where there is a network.")
    else:
        text = f"{path} is neither a folder nor in the local cache: it would be downloaded from the hub"
        yield Finding(level="warning", what=key, text=text, fix="Its sizes could not be judged.")


def _reward_model(scorer: RewardModelConfig) -> Iterator[Finding]:
    key, path = "reward.reward_model.model.path", scorer.model.path
    yield from _model_folder(key, path)
    try:
        facts, folder = read_model(path), find_folder(path)
        shapes = {} if folder is None else stored_shapes(folder)
    except MachineError:  # said above
        return
    head = shapes.get("score.weight")
    if shapes and head is None:
        text, fix = f"{path} has no score.weight: it is no reward model", "Give a sequence classifier with one output."
        yield Finding(level="error", what=key, text=text, fix=fix)
    elif head is not None and head[0] != 1:
        text, fix = f"{path} has {head[0]} outputs: a reward is one number", "Give a sequence classifier with one."
        yield Finding(level="error", what=key, text=text, fix=fix)
    if facts is not None:
        yield from _training_fits("reward.reward_model", scorer, facts)


def _tokenizer(model: ModelConfig) -> Iterator[Finding]:
    """What is wrong with the policy's tokenizer; a folder that is not there is said elsewhere."""
    own = model.tokenizer_path
    key, path = (MODEL_KEY, model.path) if own is None else ("actor_rollout_ref.model.tokenizer_path", own)
    folder = find_folder(path)
    if folder is not None and (own is not None or (folder / "config.json").is_file()):
        yield from check_tokenizer(key, folder)
    elif own is not None and folder is None and own != BUILTIN_TASK and not looks_like_hub_name(own):
        yield Finding(level="error", what=key, text=f"{own} does not exist", fix=similar(own))


def _model_fits(config: PPOConfig, model: ModelFacts) -> Iterator[Finding]:
    policy = config.actor_rollout_ref
    heads = f"{model.heads} attention and {model.kv_heads} key-value heads"
    tp = policy.rollout.tensor_model_parallel_size
    if not _divides_heads(model, tp):
        fits = [degree for degree in range(1, model.heads + 1) if _divides_heads(model, degree)]
        key, fix = f"{ROLLOUT}.tensor_model_parallel_size", f"Use one of {', '.join(map(str, fits))}."
        yield Finding(level="error", what=key, text=f"{tp} does not divide the model's {heads}", fix=fix)
    yield from _training_fits("actor_rollout_ref.actor", policy.actor, model)
    if config.needs_reference:
        yield from _training_fits("actor_rollout_ref.ref", policy.ref, model)
    if config.needs_critic and config.critic.model.path is None:
        yield from _training_fits("critic", config.critic, model)
    if model.context is not None and config.model_length > model.context:
        key = f"{ROLLOUT}.max_model_len" if policy.rollout.max_model_len else "data.max_response_length"
        text = (
            f"{config.prompt_length} prompt + {config.response_length} response tokens (context {config.model_length}) "
            f"exceed the {model.context} positions of the model"
        )
        fix = "Shorten them, or set actor_rollout_ref.model.override_config.max_position_embeddings if the model can."
        yield Finding(level="error", what=key, text=text, fix=fix)


def _training_fits(
    at: str, section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig, model: ModelFacts
) -> Iterator[Finding]:
    """Whether the training engine can cut the model as asked (the arithmetic of engines/train/tensor_parallel.py)."""
    pp, tp, sp = (
        section.pipeline_parallel_size,
        section.tensor_parallel_size,
        section.ulysses_sequence_parallel_size,
    )
    if pp * tp * sp == 1:
        return
    key = f"{at}.{'tensor' if tp > 1 else 'ulysses_sequence' if sp > 1 else 'pipeline'}_parallel_size"
    if model.kind not in PARALLEL_FAMILIES:
        text = f"model type {model.kind} cannot be cut (only {', '.join(PARALLEL_FAMILIES)})"
        yield Finding(level="error", what=key, text=text, fix="Use data parallelism alone.")
    if pp > model.layers:
        text = f"{pp} stages for {model.layers} layers"
        fix = f"Use at most {model.layers}."
        yield Finding(level="error", what=f"{at}.pipeline_parallel_size", text=text, fix=fix)
    if model.heads % (tp * sp) or model.kv_heads % tp or model.intermediate % tp:
        sizes = f"{model.heads} attention heads, {model.kv_heads} key-value heads, {model.intermediate} inner size"
        text = f"tp={tp} (x sp={sp}) does not divide the model's {sizes}"
        fix = "tp x sp must divide the attention heads, tp the other two."
        yield Finding(level="error", what=key, text=text, fix=fix)


def _divides_heads(model: ModelFacts, degree: int) -> bool:
    """Whether every one of ``degree`` ranks gets whole heads; key-value heads may be copied."""
    return model.heads % degree == 0 and (model.kv_heads % degree == 0 or degree % model.kv_heads == 0)


def _files(config: PPOConfig) -> Iterator[Finding]:
    trainer = config.trainer
    if trainer.resume_from_path is not None:
        yield from _checkpoint("trainer.resume_from_path", trainer.resume_from_path, trainer.timeouts.save_s)
    if trainer.checkpoint_copy is not None and is_url(trainer.checkpoint_copy):
        yield from _file_system("trainer.checkpoint_copy", trainer.checkpoint_copy)
    for source in config.algorithm.ptx_files:
        yield from _exists("algorithm.ptx_files", source)
    for key, folder in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
    ):
        if folder is not None:
            yield _writable(key, Path(folder).expanduser())


def _checkpoint(key: str, path: str, deadline_s: float) -> Iterator[Finding]:
    if not is_url(path):
        yield from _local_checkpoint(key, path)
        return
    above, _, name = path.rstrip("/").rpartition("/")
    try:
        held = RemoteFolder(above, key=key, deadline_s=deadline_s).complete(last=MANIFEST)
    except MachineError as error:
        yield Finding(level="error", what=key, text=str(error), fix="Check the URL and its credentials.")
        return
    if name not in held:
        fix = did_you_mean(name, list(held)) or f"Complete checkpoints there: {', '.join(sorted(held)) or 'none'}."
        yield Finding(level="error", what=key, text=f"{path} holds no complete checkpoint", fix=fix)


def _local_checkpoint(key: str, path: str) -> Iterator[Finding]:
    folder = Path(path)
    if not folder.is_dir():
        yield Finding(level="error", what=key, text=f"{path} does not exist", fix=similar(path))
    elif not (folder / MANIFEST).is_file():
        steps = sorted(folder.glob(f"global_step_*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
        fix = f"Name one of the checkpoints in it: {steps[-1].parent}." if steps else "Name a global_step_N folder."
        yield Finding(level="error", what=key, text=f"{path} is no checkpoint: it has no {MANIFEST}", fix=fix)


def _file_system(key: str, url: str) -> Iterator[Finding]:
    for part in url.split("::"):
        try:
            fsspec.get_filesystem_class(part.partition("://")[0] if is_url(part) else "file")
        except ImportError as error:
            yield Finding(level="error", what=key, text=f"{url}: {error}", fix="Install that package.")


def _exists(key: str, path: str) -> Iterator[Finding]:
    if not is_generated(path) and not Path(path).expanduser().exists():
        yield Finding(level="error", what=key, text=f"{path} does not exist", fix=similar(path))


def _writable(key: str, folder: Path) -> Finding:
    at = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    if at.is_dir() and os.access(at, os.W_OK):
        return Finding(level="ok", what=key, text=f"{folder} can be written")
    text = f"{folder} cannot be written: {at} is {'read-only for you' if at.is_dir() else 'a file'}"
    return Finding(level="error", what=key, text=text, fix="Choose another folder.")


def _memory(plan: RunPlan, machine: Machine) -> Iterator[Finding]:
    if not plan.memory:
        return
    for pool in plan.pools:
        need = plan.memory_per_device(pool.pool.name)
        if need == 0:
            continue
        if pool.device == "cuda" and machine.gpus:
            have, where = machine.gpus[0].memory_bytes, "a GPU"
        else:
            have, where = machine.available_bytes // pool.pool.world, "a slot's share of the free host memory"
        text = f"about {need / GIB:.2f} GiB per device in pool {pool.pool.name}, and {where} has {have / GIB:.2f} GiB"
        fix = "Use smaller micro-batches, offload, gradient checkpointing, or more devices."
        yield Finding(
            level="warning" if need > have else "ok",
            what=f"memory of {pool.pool.name}",
            text=text,
            fix=fix if need > have else "",
        )
