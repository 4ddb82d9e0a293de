"""Where prompts come from and how many make a step (``data.*``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.choices import TRUNCATIONS
from hybridflow.config.constraints import CountOrAll, OneOf, Only, PositiveInt, Section, Seed, check_fields
from hybridflow.config.problems import Problem

BUILTIN_TASK = "builtin:arithmetic"


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomClassConfig(Section):
    """The user's own class or function in a file of theirs."""

    path: str | None = None
    """Python file."""
    name: str | None = None
    """Name in that file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """Prompt sources, lengths and batch sizes."""

    train_files: tuple[str, ...] = (BUILTIN_TASK,)
    """Parquet, json or jsonl files, or generated sources: ``builtin:arithmetic``, ``reasoning_gym:<task>``."""
    val_files: tuple[str, ...] = (BUILTIN_TASK,)
    """The same for validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a chat list of ``{role, content}``."""
    reward_fn_key: str = "data_source"
    """Column that names the scorer."""
    max_prompt_length: PositiveInt = 16
    """Tokens of a prompt at most."""
    max_response_length: PositiveInt = 8
    """Tokens of a response at most."""
    train_batch_size: PositiveInt = 64
    """Prompts per trainer step, global, before ``rollout.n``."""
    val_batch_size: PositiveInt | None = None
    """Prompts per validation round, global; None: all at once."""
    gen_batch_size: PositiveInt | None = None
    """Prompts per round of dynamic sampling; None: ``train_batch_size``."""
    shuffle: bool = True
    """Whether the order of training prompts is drawn anew each epoch."""
    seed: Seed | None = None
    """Seed of that order; None: ``trainer.seed``."""
    truncation: Annotated[str, OneOf(TRUNCATIONS)] = "error"
    """What happens to a prompt over ``max_prompt_length``: error, left, right, middle."""
    filter_overlong_prompts: bool = False
    """Whether over-long prompts are dropped (and counted) before training."""
    filter_overlong_prompts_workers: PositiveInt = 1
    """Processes that tokenise the prompts, all of them before the first step; 1: this one."""
    train_max_samples: CountOrAll = -1
    """First rows of the training set that are used; -1: all."""
    val_max_samples: CountOrAll = -1
    """First rows of the validation set that are used; -1: all."""
    return_raw_chat: Annotated[bool, Only(True, "the raw chat always travels with the row")] = True
    """Kept for existing scripts: the raw chat always travels with the row."""
    trust_remote_code: bool = False
    """Whether tokenizers may run code from their folder."""
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of ``apply_chat_template``."""
    generated_size: PositiveInt = 2048
    """Rows drawn for a generated training source."""
    generated_val_size: PositiveInt = 256
    """Rows drawn for a generated validation source (held out from training)."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """The user's own dataset class."""

    def __post_init__(self) -> None:
        check_fields(self, self._faults())

    def _faults(self) -> Iterator[Problem]:
        if self.custom_cls.name is not None and self.custom_cls.path is None:
            fix = "Set data.custom_cls.path=FILE.py, or remove it."
            yield Problem(key="custom_cls.name", given=self.custom_cls.name, text="is not read without a file", fix=fix)
