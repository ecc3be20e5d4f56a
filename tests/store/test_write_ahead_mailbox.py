from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import StoreChanges, StoredBlock
from holdfast.store.write_ahead import Mailbox
from tests.fakes.stored_blocks import make_chain

BLOCKS = make_chain(8, part_bytes=(100,))


def box(*, most_bytes: int = 10**6, most_blocks: int = 100) -> Mailbox:
    return Mailbox(most_bytes=most_bytes, most_blocks=most_blocks)


def test_items_come_out_in_their_order() -> None:
    mailbox = box()
    order: list[object] = []
    mailbox.offer_block(BLOCKS[0])
    mailbox.send(lambda: order.append("task"))
    mailbox.offer_block(BLOCKS[1])
    assert mailbox.take_block() is BLOCKS[0]
    assert mailbox.take_block() is None
    task = mailbox.next_work(0)
    assert task is not None
    assert not isinstance(task, StoredBlock)
    task()
    assert order == ["task"]
    assert mailbox.next_work(0) is BLOCKS[1]
    assert mailbox.next_work(0) is None


@given(
    sizes=st.lists(st.integers(0, 7), max_size=30),
    most_bytes=st.integers(1, 500),
    most_blocks=st.integers(1, 5),
)
def test_the_limits_hold_and_refused_blocks_are_lost(
    sizes: list[int], most_bytes: int, most_blocks: int
) -> None:
    mailbox = box(most_bytes=most_bytes, most_blocks=most_blocks)
    answers = [mailbox.offer_block(BLOCKS[number]) for number in sizes]
    blocks, held_bytes = mailbox.held_blocks_and_bytes()
    assert blocks <= most_blocks
    assert held_bytes <= max(most_bytes, 100)
    assert (
        blocks
        == answers.count("taken")
        == len({n for n, a in zip(sizes, answers, strict=True) if a == "taken"})
    )
    assert mailbox.refused_blocks == answers.count("full") == len(mailbox.changes().lost)


def test_a_block_can_be_read_until_it_is_finished() -> None:
    mailbox = box()
    mailbox.offer_block(BLOCKS[0])
    assert mailbox.next_work(0) is BLOCKS[0]
    assert mailbox.held_block(BLOCKS[0].key) is BLOCKS[0]
    assert mailbox.offer_block(BLOCKS[0]) == "held already"
    mailbox.finish([BLOCKS[0].key], stored=True)
    assert mailbox.held_block(BLOCKS[0].key) is None
    assert mailbox.held_blocks_and_bytes() == (0, 0)


def test_changes_are_reported_once() -> None:
    mailbox = box()
    mailbox.finish([BLOCKS[0].key], stored=True)
    mailbox.finish([BLOCKS[1].key], stored=False)
    mailbox.report_lost([BLOCKS[2].key])
    assert mailbox.changes() == StoreChanges(
        stored=(BLOCKS[0].key,), lost=(BLOCKS[1].key, BLOCKS[2].key)
    )
    assert mailbox.changes() == StoreChanges()


def test_a_closed_mailbox_accepts_nothing_and_returns_the_rest() -> None:
    mailbox = box()
    mailbox.offer_block(BLOCKS[0])
    mailbox.close()
    assert mailbox.offer_block(BLOCKS[1]) == "closed"
    assert mailbox.send(lambda: None) is False
    assert mailbox.next_work(None) is BLOCKS[0]
    assert mailbox.next_work(None) is None


def test_a_waiting_reader_is_woken() -> None:
    mailbox = box()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(mailbox.next_work(None)))
    thread.start()
    mailbox.offer_block(BLOCKS[0])
    thread.join(60)
    assert got == [BLOCKS[0]]


def test_a_question_is_answered_or_fails() -> None:
    def fails() -> None:
        raise AssertionError("wrong")

    def breaks() -> None:
        raise KeyError("bug")

    mailbox = box()
    question, failing, breaking = (
        mailbox.ask(lambda: 5),
        mailbox.ask(fails),
        mailbox.ask(breaks),
    )
    for _ in range(2):
        work(mailbox)
    with pytest.raises(KeyError):
        work(mailbox)
    assert question.result() == 5
    assert isinstance(failing.exception(), AssertionError)
    assert isinstance(breaking.exception(), KeyError)


def test_questions_to_a_closed_or_abandoned_mailbox_are_cancelled() -> None:
    mailbox = box()
    open_question = mailbox.ask(lambda: 5)
    mailbox.abandon()
    assert open_question.cancelled()
    assert mailbox.ask(lambda: 5).cancelled()
    assert mailbox.next_work(None) is None


def work(mailbox: Mailbox) -> None:
    task = mailbox.next_work(0)
    assert task is not None
    assert not isinstance(task, StoredBlock)
    task()
