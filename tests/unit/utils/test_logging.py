from __future__ import annotations

import logging

import pytest

from hybridflow.utils.logging import set_up, warn_once


@pytest.fixture(autouse=True)
def _restore():
    logger = logging.getLogger("hybridflow")
    state = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate = state[0], state[1]
    logger.setLevel(state[2])


def test_a_line_names_role_and_rank(capsys):
    set_up(role="actor", rank=3)
    logging.getLogger("hybridflow.engines").warning("slow")
    line = capsys.readouterr().err
    assert "WARNING actor[3] hybridflow.engines: slow" in line


def test_setting_up_twice_prints_each_line_once(capsys):
    set_up()
    set_up(role="critic")
    logging.getLogger("hybridflow.x").info("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_a_warning_said_once_is_not_repeated(capsys):
    set_up()
    logger = logging.getLogger("hybridflow.test_warn_once")
    for step in range(3):
        warn_once(logger, f"queue is full at step {step}", key="queue")
    assert capsys.readouterr().err.count("queue is full") == 1
