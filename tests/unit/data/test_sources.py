"""Rows from files and generators, and the error that names file, row and column."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.config.data import BUILTIN_TASK, CustomClassConfig, DataConfig
from hybridflow.data.reasoning_tasks import question_stream
from hybridflow.data.sources import Look, load_rows, prompt_key, read_sources
from hybridflow.utils.errors import DataError

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}
WORDS = "reasoning_gym:chain_sum?max_terms=2&max_digits=2&instruction=Only the number."


def write(folder, rows, name="train.jsonl"):
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def read(*sources, held_out=False, seed=0, rows=None, **config):
    look = None if rows is None else Look(rows=rows)
    return read_sources(sources, DataConfig(**config), seed=seed, held_out=held_out, look=look)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_all_file_kinds_give_the_same_rows(tmp_path, name):
    path = write(tmp_path, [ROW, {**ROW, "extra_info": {"index": 1}}], name)
    first, second = read(path)
    assert first.prompt == ({"role": "user", "content": "2+2?"},)
    assert (first.data_source, first.ground_truth) == ("openai/gsm8k", "4")
    assert (first.extra_info, second.extra_info) == ({"index": 0}, {"index": 1})
    assert second.where == f"{path} row 1"


def test_a_json_file_with_one_object_a_line_is_read_too(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW))
    assert len(read(str(tmp_path / "a.json"))) == 2


@pytest.mark.parametrize("missing", [{}, {"extra_info": None}, {"extra_info": float("nan")}])
def test_missing_extra_info_is_an_empty_dict(tmp_path, missing):
    bare = {key: value for key, value in ROW.items() if key != "extra_info"}
    assert read(write(tmp_path, [{**bare, **missing}]))[0].extra_info == {}


def test_parquet_fills_of_other_messages_do_not_reach_a_template(tmp_path):
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "eve"}]]
    rows = read(write(tmp_path, [{**ROW, "prompt": chat} for chat in chats], "a.parquet"))
    assert rows[0].prompt == ({"role": "user", "content": "a"},)
    assert rows[1].prompt == ({"role": "user", "content": "b", "name": "eve"},)


def test_a_plain_ground_truth_column_will_do(tmp_path):
    assert read(write(tmp_path, [{"data_source": "x", "prompt": "1+1=", "ground_truth": 2}]))[0].ground_truth == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, r"row 1, column 'prompt'.*text or a chat list"),
        ({"prompt": ""}, r"row 1, column 'prompt'"),
        ({"prompt": [{"role": "user"}]}, r"row 1, column 'prompt', message 0.*role and content"),
        ({"prompt": 3}, r"row 1, column 'prompt'.*got 3"),
        ({"data_source": None}, r"row 1, column 'data_source'"),
        ({"reward_model": {"style": "rule"}}, r"row 1, column 'reward_model'.*ground_truth"),
        ({"extra_info": [1]}, r"row 1, column 'extra_info'"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path, change, said):
    path = write(tmp_path, [ROW, {**ROW, **change}])
    with pytest.raises(DataError, match=said):
        read(path)


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_is_named_with_those_there(tmp_path, column):
    path = write(tmp_path, [{key: value for key, value in ROW.items() if key != column}])
    with pytest.raises(DataError, match=rf"train.jsonl row 0 has no column '{column}'; it has .*extra_info"):
        read(path)


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n{oops\n")
    with pytest.raises(DataError, match=r"a.jsonl line 2 is not valid json"):
        read(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"a.parquet is not a readable parquet file"):
        read(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"does not exist"):
        read(str(tmp_path / "none.parquet"))
    with pytest.raises(DataError, match=r"is no data source: a file that ends in .parquet"):
        read("table.csv")


def test_other_column_names_are_honoured(tmp_path):
    path = write(tmp_path, [{"q": "1+1=", "scorer": "exact_match", "ground_truth": "2"}])
    row = read(path, prompt_key="q", reward_fn_key="scorer")[0]
    assert (row.prompt, row.data_source) == ("1+1=", "exact_match")


def test_max_samples_takes_the_first_rows_of_all_files(tmp_path):
    paths = [
        write(tmp_path, [{**ROW, "extra_info": {"index": i + 3 * k}} for i in range(3)], f"{k}.jsonl") for k in (0, 1)
    ]
    rows = read(*paths, train_max_samples=4)
    assert [row.extra_info["index"] for row in rows] == [0, 1, 2, 3]
    assert len(read(*paths, held_out=True, train_max_samples=4)) == 6
    assert len(read(*paths, rows=1)) == 2


def test_a_look_reads_its_rows_and_more_while_it_costs_little():
    for rows, cpu_s, read_rows, whole in (
        (5, 0.0, 5, False),
        (10, 0.0, 10, True),
        (20, 0.0, 10, True),
        (5, 9.0, 10, True),
    ):
        look = Look(rows=rows, cpu_s=cpu_s)
        assert list(look.take(range(10))) == list(range(read_rows))
        assert look.whole is whole


def test_empty_ground_truths_are_counted_in_the_log(tmp_path, caplog):
    empty = {**ROW, "reward_model": {"ground_truth": ""}}
    read(write(tmp_path, [ROW, empty, {**empty, "reward_model": {"ground_truth": None}}]))
    assert "2 rows have an empty ground truth" in caplog.text


def test_a_procedural_task_carries_what_its_verifier_needs():
    row = next(question_stream("chain_sum", {"max_terms": "2", "max_digits": "1"}, seed=3, size=5))
    assert row["data_source"] == "reasoning_gym/chain_sum"
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["entry"]["answer"]


def test_procedural_questions_are_held_out_of_training_and_fixed_over_seeds():
    config = DataConfig(train_files=(WORDS,), val_files=(WORDS,), generated_size=64, generated_val_size=32)
    train, val = load_rows(config, seed=1)
    other_train, same_val = load_rows(config, seed=2)
    asked = [prompt_key(row.prompt) for row in val]
    assert len(train) == 64
    assert len(set(asked)) == len(asked) == 32
    assert not {prompt_key(row.prompt) for row in train} & set(asked)
    assert asked == [prompt_key(row.prompt) for row in same_val]
    assert [row.prompt for row in train] != [row.prompt for row in other_train]
    assert train[0].prompt[0]["content"].endswith("\nOnly the number.")


def test_a_plus_in_a_parameter_stays_and_percent_escapes_are_read():
    row = read("reasoning_gym:chain_sum?size=1&system=1 + 1 %26 so on&instruction=a=b")[0]
    assert row.prompt[0] == {"role": "system", "content": "1 + 1 & so on"}
    assert row.prompt[1]["content"].endswith("\na=b")


def test_source_parameters_win_over_the_configured_size():
    assert len(read(WORDS + "&size=7&seed=5")) == 7


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("reasoning_gym:chain_summ", "no such task; there are .*chain_sum"),
        ("reasoning_gym:chain_sum?max_trems=2", "no parameter 'max_trems'; it takes .*max_terms"),
        ("reasoning_gym:chain_sum?max_terms=two", "max_terms=two: a number is expected"),
        ("reasoning_gym:chain_sum?max_terms=0", "refuses its parameters"),
        ("reasoning_gym:chain_sum?size=many", "size=many: a whole number"),
        ("reasoning_gym:chain_sum?allow_negation=perhaps", "true or false"),
        ("reasoning_gym:chain_sum?max_terms", "chain_sum.*max_terms"),
    ],
)
def test_a_bad_procedural_source_says_what_is_allowed(source, said):
    with pytest.raises(DataError, match=said):
        read(source)


def test_a_task_with_too_few_questions_says_so():
    with pytest.raises(DataError, match="new and not held out"):
        read("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=500", held_out=True)


def test_the_users_own_reader_takes_the_place_of_files(tmp_path):
    (tmp_path / "reader.py").write_text(
        "def rows(source, *, config, held_out):\n"
        "    for i in range(3):\n"
        "        yield {'prompt': f'{source}{i}', 'data_source': 'x', 'ground_truth': held_out}\n"
    )
    own = CustomClassConfig(path=str(tmp_path / "reader.py"), name="rows")
    rows = read("abc", held_out=True, custom_cls=own)
    assert [(row.prompt, row.ground_truth) for row in rows] == [("abc0", True), ("abc1", True), ("abc2", True)]


def test_reading_imports_no_torch_and_needs_no_optional_package(tmp_path):
    path = write(tmp_path, [ROW])
    code = (
        "import sys; from hybridflow.config.data import DataConfig; from hybridflow.data.sources import read_sources\n"
        f"read_sources([{path!r}, {BUILTIN_TASK!r}], DataConfig(), seed=0, held_out=False)\n"
        "sys.exit(bool({'torch', 'pyarrow', 'reasoning_gym'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
