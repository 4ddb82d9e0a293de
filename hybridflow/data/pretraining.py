"""Text for PPO-ptx: files to documents, documents to blocks of token ids.

Documents follow one another with an end token between them and are cut into blocks of one length, as in pretraining;
the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hybridflow.data.sources import read_jsonl
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.utils.errors import DataError

TEXT = "text"
"""Key of the document in a line of a ``.jsonl`` file."""
SHORTEST = 2
"""Tokens of a block at least: the second is predicted from the first."""


def read_documents(path: str) -> Iterator[str]:
    """Documents of a ``.txt`` file (the whole file is one) or a ``.jsonl`` file (``text`` of each line); no empty ones.

    Raises:
        DataError: the file does not exist, or a line has no text.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"algorithm.ptx_files: {path} does not exist (looked for {file.resolve()})")
    if file.suffix != ".jsonl":
        texts: Iterable[str] = [file.read_text(encoding="utf-8")]
    else:
        texts = (_text_of(row, f"{path} row {number}") for number, row in enumerate(read_jsonl(file)))
    return (text for text in texts if text.strip())


def text_blocks(paths: Sequence[str], tokenizer: Tokenizer, *, length: int) -> list[list[int]]:
    """Blocks of ``length`` token ids from all files in order.

    Raises:
        DataError: the files hold less than two tokens.
    """
    documents = [text for path in paths for text in read_documents(path)]
    ids: list[int] = []
    for document in tokenizer.encode_text(documents):
        ids += [*document, tokenizer.eos_ids[0]]
    blocks = [ids[start : start + length] for start in range(0, len(ids), length)]
    blocks = [block for block in blocks if len(block) >= SHORTEST]
    if not blocks:
        raise DataError(f"algorithm.ptx_files: {', '.join(paths)} hold {len(ids)} tokens, too few to learn from")
    return blocks


def _text_of(row: dict[str, object], where: str) -> str:
    text = row.get(TEXT)
    if not isinstance(text, str):
        raise DataError(f"{where}: a text in the key {TEXT!r} is expected, it has {', '.join(row) or 'no key'}")
    return text
