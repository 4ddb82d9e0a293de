"""Scorers by data source and the user's own function."""

import pytest

from hybridflow.config.reward import RewardConfig, RewardFunctionConfig
from hybridflow.data.builtin_spec import DATA_SOURCE
from hybridflow.data.reasoning_tasks import SOURCE_PREFIX, question_stream
from hybridflow.rewards.registry import SCORERS, find_scorer, is_async, load_reward_function
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

CALL = {"data_source": "x", "solution_str": "4", "ground_truth": "4", "extra_info": {}}
FILE = """
import functools
import json
def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    return weight * (solution_str == ground_truth)
def two(weight, **sample):
    return compute_score(**sample, weight=weight)
half = functools.partial(two, 0.5)
class Scorer:
    def __call__(self, **sample):
        return compute_score(**sample)
    async def later(self, **sample):
        return 1
class Later:
    async def __call__(self, **sample):
        return 1
instance, later_instance, short = Scorer(), Later(), lambda **sample: 0.25
bound = instance.later
async def later(**sample):
    return 1
partly_later = functools.partial(functools.partial(later), extra=1)
number = 3
"""


def own(folder, name, file="reward.py", text=FILE, **kwargs):
    (folder / file).write_text(text)
    config = RewardFunctionConfig(path=str(folder / file), name=name, reward_kwargs=kwargs)
    return load_reward_function(RewardConfig(custom_reward_function=config))


@pytest.mark.parametrize(("name", "score"), [("compute_score", 1.0), ("half", 0.5), ("instance", 1.0), ("short", 0.25)])
def test_every_kind_of_callable_loads(tmp_path, name, score):
    function = own(tmp_path, name)
    assert function(**CALL) == score
    assert not is_async(function)


@pytest.mark.parametrize("name", ["later", "later_instance", "partly_later", "bound"])
def test_async_callables_are_told_apart(tmp_path, name):
    assert is_async(own(tmp_path, name))


def test_reward_kwargs_reach_every_call(tmp_path):
    assert own(tmp_path, "compute_score", weight=3.0)(**CALL) == 3.0


def test_a_file_named_like_a_standard_module_shadows_nothing(tmp_path):
    text = "import math\ndef compute_score(**sample):\n    return math.floor(2.5) + (__name__ == 'math')\n"
    assert own(tmp_path, "compute_score", file="math.py", text=text)(**CALL) == 2


def test_a_file_may_import_its_neighbour_and_runs_once(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("seen = []\n")
    text = (
        "import neighbour_of_reward\nneighbour_of_reward.seen.append(1)\n"
        "def compute_score(**sample):\n    return len(neighbour_of_reward.seen)\n"
    )
    assert own(tmp_path, "compute_score", text=text)(**CALL) == 1
    assert own(tmp_path, "compute_score", text=text)(**CALL) == 1


def test_a_missing_file_or_name_is_named(tmp_path):
    missing = RewardFunctionConfig(path=str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match=r"none.py' is no file"):
        load_reward_function(RewardConfig(custom_reward_function=missing))
    with pytest.raises(ConfigError, match=r"has no 'score_it'; it has .*compute_score"):
        own(tmp_path, "score_it")
    with pytest.raises(ConfigError, match="'number' in .* cannot be called"):
        own(tmp_path, "number")


def test_every_registered_scorer_exists():
    for scorer in SCORERS.values():
        assert callable(load(scorer.target))


def test_the_data_side_and_the_reward_side_use_the_same_names():
    assert DATA_SOURCE in SCORERS
    assert f"{SOURCE_PREFIX}*" in SCORERS


def test_an_unknown_data_source_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"'gsm9k'.*openai/gsm8k.*custom_reward_function"):
        find_scorer("gsm9k")


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "countdown", "leg_counting"])
def test_procedural_tasks_are_scored_by_their_own_verifier(task):
    function = load_reward_function(RewardConfig())
    for row in question_stream(task, {}, seed=1, size=3):
        sample = {"data_source": row["data_source"], "extra_info": row["extra_info"]}
        truth = row["reward_model"]["ground_truth"]
        for text in (truth, f"  {truth}\n", f"I think\n<answer> {truth} </answer> or so"):
            assert function(**sample, solution_str=text, ground_truth=truth) == 1.0
        assert function(**sample, solution_str="no idea", ground_truth=truth) < 0.2


def test_a_procedural_row_without_its_entry_fails():
    with pytest.raises(ValueError, match="no 'entry'"):
        load_reward_function(RewardConfig())(
            data_source="reasoning_gym/chain_sum", solution_str="4", ground_truth="4", extra_info={}
        )


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7", 1),
        ("2 + 5 = 7", 1),
        ("2+5=7.", 1),
        ("The answer is 7", 1),
        ("it is <answer>7</answer>, not 8", 1),
        ("7, no, 8", 0),
        ("-7", 0),
        ("9-7", 1),
        ("x = -7", 0),
        ("seven", 0),
        ("", 0),
    ],
)
def test_the_last_number_is_the_answer_where_a_number_is_asked_for(response, score):
    entry = {"question": "2 + 5 =", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    function = load_reward_function(RewardConfig())
    sample = {"data_source": "reasoning_gym/chain_sum", "ground_truth": "7", "extra_info": {"entry": entry}}
    assert int(function(solution_str=response, **sample)) == score
