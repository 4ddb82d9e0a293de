"""Turns GSM8K's jsonl files (``question``, ``answer``) into parquet files in the columns of ``data.train_files``.

Get ``train.jsonl`` and ``test.jsonl`` of openai/grade-school-math (or the Hugging Face set ``openai/gsm8k``, config
``main``, saved as json) first; nothing is downloaded here. Usage:

    python scripts/prepare_gsm8k.py --in FOLDER --out data/gsm8k
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybridflow.data.sources import read_jsonl

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MARKER = "####"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="source", type=Path, required=True, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of train.parquet and test.parquet")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [as_row(row, split, i) for i, row in enumerate(read_jsonl(options.source / f"{split}.jsonl"))]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), options.out / f"{split}.parquet")
        print(f"{options.out / split}.parquet: {len(rows)} rows")


def as_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One question in hybridflow's (and verl's) columns."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].rsplit(MARKER, 1)[1].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]},
    }


if __name__ == "__main__":
    main()
