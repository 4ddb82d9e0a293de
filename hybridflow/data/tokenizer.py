"""The only home of tokenizers: text or chat into prompt ids, sampled ids into text.

Token ids that were sampled are never decoded and encoded again; decoding is for rewards and logs alone. A prompt has
exactly one begin token if the model's tokenizer uses one, whether it comes from plain text, from a chat template that
writes it, or from one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridflow.data.builtin import model_folder
from hybridflow.utils.errors import ConfigError, DataError

ChatMessage = Mapping[str, Any]
Prompt = str | Sequence[ChatMessage]


class Tokenizer:
    """A Hugging Face tokenizer with the few operations that RL needs.

    Attributes:
        source: folder or hub name it came from.
        hf: the Hugging Face tokenizer.
        pad_id: id that fills unused positions; never read, so the end token serves where there is no pad token.
        bos_id: the begin token, if prompts start with one.
        eos_ids: every id that ends a response, of the tokenizer and of the model's generation config.
        vocabulary_size: ids from here on are padding rows of the embedding and must not be sampled.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, *, source: str, eos_ids: Sequence[int]) -> None:
        self.source = source
        self.hf = hf
        self.eos_ids = tuple(eos_ids)
        pad_id = _special_id(hf.pad_token_id)
        self.pad_id: int = eos_ids[0] if pad_id is None else pad_id
        self.bos_id: int | None = _begin_id(hf)
        self.vocabulary_size = len(hf)

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of finished prompt texts, with one begin token each if the model uses one."""
        if not texts:
            return []
        encoded = self.hf(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [self._with_one_begin(ids) for ids in encoded]

    def render(self, prompt: Prompt, **template_kwargs: Any) -> str:
        """The text of a prompt: plain text as it is, a chat through its template with the turn of the assistant opened.

        Raises:
            DataError: when a chat meets a tokenizer without a chat template, or the template refuses it.
        """
        if isinstance(prompt, str):
            return prompt
        if not self.hf.chat_template:
            raise DataError(
                f"the prompt is a chat, but the tokenizer of {self.source} has no chat template: "
                "use a prompt column of plain text, or a model with a template"
            )
        messages = [dict(message) for message in prompt]
        try:
            text = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
        except (TemplateError, TypeError) as error:  # what templates raise: by name, or for a None that they add up
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template of {self.source} refuses a prompt with the roles {roles}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def encode_prompt(self, prompt: Prompt, **template_kwargs: Any) -> list[int]:
        """Ids of one prompt (text or chat)."""
        return self.encode_text([self.render(prompt, **template_kwargs)])[0]

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Texts of sampled ids without special tokens; ids beyond the vocabulary stand for nothing and are dropped."""
        known = [[i for i in ids if 0 <= i < self.vocabulary_size] for ids in responses]
        decode = partial(self.hf.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [str(decode(ids)) for ids in known]

    def _with_one_begin(self, ids: list[int]) -> list[int]:
        if self.bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder, hub name or ``builtin:arithmetic``.

    Raises:
        ConfigError: when there is none, or it names no end token.
    """
    folder = model_folder(path)
    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {path!r}: {error}") from error
    eos_ids = _end_ids(hf, folder)
    if not eos_ids:
        raise ConfigError(f"neither the tokenizer nor the generation config of {path!r} names an end token")
    return Tokenizer(hf, source=path, eos_ids=eos_ids)


def truncate(ids: list[int], limit: int, mode: str, *, keep_first: bool, where: str) -> list[int]:
    """At most ``limit`` of ``ids``: ``left`` and ``right`` name the side that is cut, ``middle`` keeps both ends.

    Args:
        ids: token ids of a prompt.
        limit: tokens at most.
        mode: error, left, right or middle.
        keep_first: whether the first id (the begin token) survives every mode.
        where: the row, for the message.

    Raises:
        DataError: mode ``error`` and too many ids; names the row and both lengths.
    """
    if len(ids) <= limit:
        return ids
    if mode == "error":
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}: raise it, set "
            "data.truncation to left, right or middle, or data.filter_overlong_prompts=True"
        )
    head = ids[:1] if keep_first else []
    body, room = ids[len(head) :], limit - len(head)
    front = {"left": 0, "right": room, "middle": room // 2}[mode]
    return head + body[:front] + body[len(body) - (room - front) :]


def _begin_id(hf: PreTrainedTokenizerBase) -> int | None:
    """The begin token, if the tokenizer by itself puts it in front of plain text."""
    bos_id = _special_id(hf.bos_token_id)
    first = [] if bos_id is None else hf("0")["input_ids"][:1]
    return bos_id if first == [bos_id] else None


def _end_ids(hf: PreTrainedTokenizerBase, folder: str) -> tuple[int, ...]:
    own, configured = _special_id(hf.eos_token_id), _generation_config(folder).eos_token_id
    found: list[int] = [] if own is None else [own]
    found += configured if isinstance(configured, list) else [] if configured is None else [configured]
    return tuple(dict.fromkeys(found))


def _special_id(given: object) -> int | None:
    """The id of a special token; transformers types it as anything that a tokenizer may return."""
    assert given is None or isinstance(given, int)
    return given


def _generation_config(folder: str) -> GenerationConfig:
    """The model's generation config; an empty one where it has none, which is common and no fault.

    Raises:
        ConfigError: it has one that cannot be read: which tokens end a response would be guessed.
    """
    file = Path(folder) / "generation_config.json"
    if Path(folder).is_dir() and not file.is_file():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError as error:
        if file.is_file():
            raise ConfigError(f"{file} cannot be read: {error}") from error
        return GenerationConfig()  # a name on the hub
