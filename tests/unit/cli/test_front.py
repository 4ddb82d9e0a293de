from __future__ import annotations

import pytest

from hybridflow.cli.front import BAD_CONFIG, BAD_MACHINE, FAILED, LOST, OK, compose_and_run, config_folder, rewrite
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.utils.errors import ConfigError, DataError, DeadlineError, LostError, MachineError, WorkerError


def composed(*arguments: str) -> dict:
    trees = []

    def keep(tree: dict) -> int:
        trees.append(tree)
        return OK

    assert compose_and_run(PPOConfig, "ppo_trainer", keep, arguments) == OK
    return trees[0]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == [], "Hydra left files behind"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b=1", "++a.b=1"),
        ("+a.b=1", "++a.b=1"),
        ("++a.b=1", "++a.b=1"),
        ("a=x=y", "++a=x=y"),
        ("preset=ppo", "preset=ppo"),
        ("+preset=ppo", "preset=ppo"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("~a.b", "~a.b"),
        ("a.b=~/x y", '++a.b="~/x y"'),
        ("--dry-run", "++trainer.dry_run=True"),
        ("--strict", "++trainer.strict=True"),
        ("--cfg", "--cfg"),
    ],
)
def test_every_key_reaches_our_loader(argument, expected):
    assert rewrite([argument]) == [expected]


def test_values_of_hydras_own_flags_are_left_alone():
    assert rewrite(["--config-dir", "a=b", "c=d"]) == ["--config-dir", "a=b", "++c=d"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_all_three_spellings_set_a_key_and_add_an_unknown_one(plus):
    tree = composed(f"{plus}data.train_batch_size=32", f"{plus}data.not_there=1")
    assert tree["data"]["train_batch_size"] == 32
    assert tree["data"]["not_there"] == 1


def test_what_is_composed_without_overrides_is_sound():
    assert load_config(composed()).algorithm.adv_estimator == "grpo"


def test_the_output_folder_follows_the_names():
    tree = composed("trainer.project_name=p", "trainer.experiment_name=e")
    assert tree["trainer"]["default_local_dir"] == "outputs/p/e"


def test_dry_run_is_a_key():
    assert composed("--dry-run", "--strict")["trainer"]["dry_run"] is True
    assert composed()["trainer"]["dry_run"] is False


@pytest.mark.parametrize("preset", sorted(file.stem for file in (config_folder() / "preset").glob("*.yaml")))
def test_every_preset_composes_and_loads(preset):
    load_config(composed(f"preset={preset}"))


def test_every_yaml_of_the_repository_is_covered_by_a_test():
    names = {str(file.relative_to(config_folder())) for file in config_folder().rglob("*.yaml")}
    presets = {name for name in names if name.startswith("preset/")}
    assert names - presets <= {"ppo_trainer.yaml", "sft_trainer.yaml", "generation.yaml", "evaluation.yaml"}


def test_command_line_beats_preset():
    assert composed("preset=ppo", "actor_rollout_ref.rollout.n=2")["actor_rollout_ref"]["rollout"]["n"] == 2


def test_lists_as_public_scripts_write_them():
    tree = composed("trainer.logger=['console','wandb']", "data.train_files=['a.parquet','b.parquet']")
    config = load_config(tree)
    assert config.trainer.logger == ("console", "wandb")
    assert config.data.train_files == ("a.parquet", "b.parquet")
    assert load_config(composed('trainer.logger=["console","wandb"]')).trainer.logger == ("console", "wandb")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("k: bad"), BAD_CONFIG),
        (DataError("row 3"), BAD_CONFIG),
        (MachineError("no GPU"), BAD_MACHINE),
        (LostError("rank 1 died"), LOST),
        (DeadlineError("rank 1 hangs"), LOST),
        (WorkerError("rank 1 raised"), FAILED),
    ],
)
def test_errors_of_the_users_making_become_exit_codes_without_traceback(error, code, capsys):
    def fail(tree: dict) -> int:
        raise error

    assert compose_and_run(PPOConfig, "ppo_trainer", fail, []) == code
    shown = capsys.readouterr().err
    assert str(error) in shown
    assert "Traceback" not in shown


def test_any_other_error_is_a_failed_run_with_its_traceback(capsys):
    def fail(tree: dict) -> int:
        raise ValueError("a bug")

    assert compose_and_run(PPOConfig, "ppo_trainer", fail, []) == FAILED
    shown = capsys.readouterr().err
    assert "ValueError: a bug" in shown and "in fail" in shown


def test_the_exit_code_of_the_task_is_kept():
    assert compose_and_run(PPOConfig, "ppo_trainer", lambda tree: 7, []) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["foo=["], ["foo=[", "a bracket has no partner", "'foo=[a,b]'"]),
        (["data.train_files=a=b.parquet"], ["a sign that needs quotes", """'data.train_files="a=b.parquet"'"""]),
        (["data.train_files=it's.parquet"], ["data.train_files=it's.parquet", "a sign that needs quotes"]),
        (["trainer.logger=console,wandb"], ["several values without brackets", "'trainer.logger=[console,wandb]'"]),
        (["data.seed=1,2"], ["data.seed=1,2", "several values"]),
        (["bareword"], ["bareword", "neither KEY=VALUE nor an option"]),
        (["data.train_batch_size:8"], ["data.train_batch_size:8", "Write KEY=VALUE"]),
        (["data.train_batch_size", "=", "8"], ["data.train_batch_size", "without blanks"]),
        (["data..seed=1"], ["data..seed", "no such key"]),
        (["--dryrun"], ["--dryrun", "no such option", "Did you mean --dry-run?"]),
        (["--train_batch_size", "8"], ["--train_batch_size", "Settings have no dashes: train_batch_size=VALUE"]),
        (["--data.seed=8"], ["Settings have no dashes: data.seed=8"]),
        (["--multirun"], ["sweeps are not supported", "shell loop"]),
        (["-x"], ["no such option", "--help shows the options"]),
        (["foo=[", "--dryrun"], ["a bracket has no partner", "Did you mean --dry-run?"]),
        (["preset=gropo"], ["preset=gropo", "one of dapo, dr_grpo, grpo", "Did you mean grpo?"]),
        (["preset=null"], ["preset=null", "one of dapo"]),
        (["trainer.logger={console:1}"], ["trainer.logger"]),
        (["~data.not_there"], ["'data.not_there' does not exist"]),
        (["--config-name", "nope"], ["Cannot find primary config 'nope'"]),
        (["data.train_files=${oc.env:NO_SUCH_VARIABLE}"], ["data.train_files", "NO_SUCH_VARIABLE is not set"]),
    ],
)
def test_a_broken_command_line_is_a_configuration_error_that_says_what_to_write(arguments, words, capsys):
    assert compose_and_run(PPOConfig, "ppo_trainer", lambda tree: OK, arguments) == BAD_CONFIG
    shown = capsys.readouterr().err
    assert [word for word in words if word not in shown] == []
    assert "Traceback" not in shown and "HYDRA_FULL_ERROR" not in shown


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(composed("data.train_files=[/a,'~/b']", "trainer.default_local_dir=~/runs"))
    assert config.data.train_files == ("/a", "/home/me/b")
    assert config.trainer.default_local_dir == "/home/me/runs"


def test_an_interpolation_that_points_nowhere_names_its_key(capsys):
    arguments = ["trainer.project_name=${no.such.key}"]
    assert compose_and_run(PPOConfig, "ppo_trainer", lambda tree: OK, arguments) == BAD_CONFIG
    assert "trainer.project_name" in capsys.readouterr().err


def test_a_shell_variable_in_braces_is_pointed_to_the_environment(capsys):
    arguments = ["data.train_files=${HOME}/x.parquet"]
    assert compose_and_run(PPOConfig, "ppo_trainer", lambda tree: OK, arguments) == BAD_CONFIG
    assert "${oc.env:HOME}" in capsys.readouterr().err


def test_showing_the_configuration_runs_nothing(capsys):
    def fail(tree: dict) -> int:
        raise AssertionError("ran")

    assert compose_and_run(PPOConfig, "ppo_trainer", fail, ["--cfg", "job", "data.train_batch_size=9"]) == OK
    assert "train_batch_size: 9" in capsys.readouterr().out


def test_help_is_ours(capsys):
    assert compose_and_run(PPOConfig, "ppo_trainer", lambda tree: 1, ["--help"]) == OK
    assert "--dry-run" in capsys.readouterr().out


def test_a_users_own_yaml_builds_on_ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 16}\n")
    tree = composed("--config-dir", str(folder), "--config-name", "mine", "trainer.seed=4")
    assert (tree["data"]["train_batch_size"], tree["trainer"]["seed"]) == (16, 4)
