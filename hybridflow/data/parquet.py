"""Rows of a parquet file; the one home of pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybridflow.utils.errors import DataError

_ROWS_AT_A_TIME = 1024


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Rows as dicts of plain Python values, read in blocks.

    Raises:
        DataError: when the file is no parquet.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for block in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                yield from block.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
