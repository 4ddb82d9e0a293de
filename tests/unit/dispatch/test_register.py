from __future__ import annotations

from hybridflow.dispatch.group import Mailbox
from hybridflow.dispatch.register import Registration, register, registrations


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


def test_a_mailbox_hands_out_messages_once_and_in_order() -> None:
    mailbox = Mailbox()
    mailbox.put("a")
    mailbox.put("b")
    assert mailbox.drain() == ["a", "b"]
    assert mailbox.drain() == []
