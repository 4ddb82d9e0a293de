from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.dispatch.group import Mailbox, WorkerSpec
from hybridflow.dispatch.register import Registration, register, registrations
from hybridflow.single_controller.calls import CallTable


class Base:
    @register(dispatch="ONE_TO_ALL")
    def inherited(self) -> None:
        """Inherited."""

    def plain(self) -> None:
        """Not registered."""


class Worker(Base):
    @register(dispatch="MESH_3D", reads=("x",), writes=("y",), mesh="rollout", blocking=True)
    def own(self) -> None:
        """Registered here."""


def test_registrations_hold_what_was_said_and_nothing_else() -> None:
    assert registrations(Worker) == {
        "inherited": Registration(dispatch="ONE_TO_ALL"),
        "own": Registration(dispatch="MESH_3D", reads=("x",), writes=("y",), mesh="rollout", blocking=True),
    }


def chosen(arguments: Mapping[str, Any]) -> tuple[str, ...] | None:
    return arguments["columns"]


class Chooser:
    @register(dispatch="RANK_ZERO", reads=chosen)
    def read(self, batch: Batch) -> None:
        """What its worker was told to read."""


def test_the_columns_that_travel_may_follow_from_the_worker_s_arguments() -> None:
    batch = Batch({"x": torch.zeros(2), "y": torch.zeros(2), "valid": torch.ones(2, dtype=torch.bool)})
    for columns, travelling in ((("x",), {"x", "valid"}), (("y", "z?"), {"y", "valid"}), (None, {"x", "y", "valid"})):
        spec = WorkerSpec(role="w", target=f"{__name__}:Chooser", kwargs={"columns": columns})
        (share,) = CallTable([spec], 1).prepare("w", "read", (batch,), {}).shares
        assert share is not None
        assert set(share.args[0].names) == travelling


def test_a_mailbox_hands_out_messages_once_and_in_order() -> None:
    mailbox = Mailbox()
    mailbox.put("a")
    mailbox.put("b")
    assert mailbox.drain() == ["a", "b"]
    assert mailbox.drain() == []
