"""Reading and encoding prompts under a deadline: a disk, a network or a class of the user's may hang."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from hybridflow.config.root import PPOConfig
from hybridflow.data.dataset import PromptDataset, build_datasets
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.single_controller.host import dump_stacks
from hybridflow.utils.background import in_background
from hybridflow.utils.errors import DeadlineError


def read_prompts(config: PPOConfig, tokenizer: Tokenizer) -> tuple[PromptDataset, PromptDataset]:
    """Training and validation prompts; waits for a thread that reads them, unblocked by it or by the deadline.

    Raises:
        DeadlineError: it takes longer than ``trainer.timeouts.data_s``; where the thread stands is in the stacks.
        DataError, ConfigError: as ``build_datasets``.
    """
    deadline_s = config.trainer.timeouts.data_s
    before = {*multiprocessing.active_children()}
    reading = in_background("data", build_datasets, config.data, tokenizer, config.trainer.seed)
    try:
        return reading.result(deadline_s)
    except TimeoutError as error:
        if reading.done():  # a time-out of the reading itself
            raise
        stacks = _leave_stacks(Path(config.trainer.default_local_dir) / "stacks" / "stacks_driver.txt")
        for encoder in {*multiprocessing.active_children()} - before:
            encoder.kill()
        files = ", ".join((*config.data.train_files, *config.data.val_files))
        raise DeadlineError(
            f"the driver had not read and encoded its prompts after {deadline_s:g} s (trainer.timeouts.data_s): "
            f"{files}. Its thread 'data' waits for the disk, an encoder or data.custom_cls; its stack: {stacks}"
        ) from error


def _leave_stacks(path: Path) -> str:
    """Where the driver's stacks are now: a file, or, where the disk refuses it, the answer itself."""
    found = dump_stacks()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    except OSError:
        return f"\n{found}"
    return str(path)
