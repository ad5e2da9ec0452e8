"""The batches of a publisher of KV events, without sockets: numbers, contents, and answers to whoever missed some."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvdepot.events import BlockEvent
from kvdepot.publish import stream as module
from kvdepot.publish.contents import Change, Contents
from kvdepot.publish.replays import ANSWERS_MAX, HELD_BYTES_MAX, MESSAGES_PER_TURN, STALLED_S, Replays, Request
from kvdepot.publish.stream import BLOCKS_PER_EVENT, CONTENTS_S, Batch, EventStream, first_sequence
from kvdepot.publish.wire import BatchEncoder

ONE, OTHER, THIRD = (digit * 32 for digit in "abc")
FIRST = first_sequence(1_800_000_000_000)


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in numbers)


def stored(*numbers: int, namespace: str = ONE, place: str = "pool") -> BlockEvent:
    return BlockEvent(namespace, place, True, names(*numbers))


def removed(*numbers: int, namespace: str = ONE, place: str = "pool") -> BlockEvent:
    return BlockEvent(namespace, place, False, names(*numbers))


def made(
    groups: Sequence[Sequence[str]] = (), *, batches_kept: int = 100, clears: bool = True, first: int = FIRST
) -> EventStream:
    encoder = BatchEncoder(tells_group=len(groups) > 1)
    return EventStream(Contents(groups), encoder, first=first, batches_kept=batches_kept, clears=clears)


class Told:
    """What a subscriber knows that applies every batch as vLLM's events are meant. Its numbers must rise by one."""

    def __init__(self, *, exact: bool = True) -> None:
        self.blocks: set[tuple[str, int | None, int]] = set()
        self.next: int | None = None
        self.exact = exact

    def apply(self, batches: Sequence[Batch]) -> "Told":
        for batch in batches:
            assert self.next in (None, batch.sequence), "a gap"
            self.next = batch.sequence + 1
            time_s, events, rank = msgspec.msgpack.decode(batch.payload)
            assert (time_s, rank) == (7.5, 0)
            for event in events:
                self._apply(event)
        return self

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        for number in event["block_hashes"]:
            entry = (event["ownership"], event.get("group_idx"), number)
            is_stored = event["type"] == "BlockStored"
            assert not self.exact or (entry in self.blocks) != is_stored, "told twice"
            (self.blocks.add if is_stored else self.blocks.discard)(entry)

    def at(self, place: str, group: int | None = None) -> set[int]:
        return {number for where, index, number in self.blocks if (where, index) == (f"kvdepot/{place}", group)}


def test_an_event_has_the_fields_of_vllm_s_classes() -> None:
    stream = made()
    (begin,) = stream.begin(7.5)
    assert msgspec.msgpack.decode(begin.payload) == [7.5, [{"type": "AllBlocksCleared"}], 0]
    (batch,) = stream.add([stored(1, 1 << 63, place="posix"), removed(1, place="posix")], 7.5)
    place = {"medium": "STORAGE", "locality": "LOCAL", "ownership": "kvdepot/posix"}
    nothing = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
    assert msgspec.msgpack.decode(batch.payload)[1] == [
        {"type": "BlockStored", "block_hashes": [1, 1 << 63], **place, **nothing},
        {"type": "BlockRemoved", "block_hashes": [1], **place},
    ]
    whole = BatchEncoder("bytes", 3).encode([Change(0, "remote", True, names(5))], False, 0.0)
    _, (event,), rank = msgspec.msgpack.decode(whole)
    assert (event["block_hashes"], event["medium"], event["locality"], rank) == ([*names(5)], "CPU", "REMOTE", 3)


def test_a_block_counts_when_all_ranks_have_it() -> None:
    stream, told = made([[ONE, OTHER]]), Told()
    told.apply(stream.begin(7.5))
    told.apply(stream.add([stored(1, 2), stored(2, 3, namespace=OTHER), stored(2, namespace=THIRD)], 7.5))
    assert told.at("pool") == {2}
    told.apply(stream.add([stored(2, place="posix"), stored(1, namespace=OTHER), removed(2)], 7.5))
    assert (told.at("pool"), told.at("posix")) == ({1}, set())
    assert stream.contents.blocks() == {"pool": 1, "posix": 0}
    told.apply(stream.add([removed(1, namespace=OTHER), removed(1), removed(3, namespace=OTHER)], 7.5))
    assert not told.blocks
    assert stream.contents.published == [ONE, OTHER]


def test_groups_of_a_hybrid_model_have_numbers() -> None:
    stream, told = made([["a" * 8], ["b" * 8, "c" * 32]]), Told()
    told.apply(stream.begin(7.5))
    events = [stored(1), stored(1, 2, namespace=OTHER), stored(2, namespace=THIRD)]
    told.apply(stream.add(events, 7.5))
    assert (told.at("pool", 0), told.at("pool", 1)) == ({1}, {2})


def test_without_groups_a_block_counts_while_any_namespace_has_it() -> None:
    stream, told = made(), Told()
    told.apply(stream.begin(7.5))
    told.apply(stream.add([stored(1), stored(1, 2, namespace=OTHER), removed(1)], 7.5))
    assert told.at("pool") == {1, 2}
    told.apply(stream.add([removed(1, 2, namespace=OTHER)], 7.5))
    assert not told.blocks


def test_digits_of_two_namespaces_name_the_first_one_found() -> None:
    contents = Contents([["a" * 8]])
    later = "a" * 31 + "b"
    assert contents.apply(stored(1)) == Change(0, "pool", True, names(1))
    assert contents.apply(stored(1, namespace=later)) is None
    assert contents.apply(stored(2, namespace=later)) is None
    assert contents.ambiguous == [("a" * 8, ONE, later)]


def test_a_batch_has_a_bounded_number_of_blocks() -> None:
    stream, told = made(), Told()
    told.apply(stream.begin(7.5))
    many = range(BLOCKS_PER_EVENT + 1)
    batches = stream.add([stored(*many), stored(*many, place="posix")], 7.5)
    sizes = [[len(event["block_hashes"]) for event in msgspec.msgpack.decode(batch.payload)[1]] for batch in batches]
    assert sizes == [[2048], [1, 2047], [2]]
    told.apply(batches)
    assert told.at("pool") == told.at("posix") == set(many)
    assert (stream.batches, stream.blocks_stored, stream.next_sequence) == (4, 2 * len(many), FIRST + 4)


def test_a_subscriber_that_missed_batches_gets_them() -> None:
    stream, told = made(), Told()
    told.apply(stream.begin(7.5))
    for number in range(10):
        batches = stream.add([stored(number)], 7.5)
        if number < 4:
            told.apply(batches)
    told.apply(stream.replay(told.next or 0, 7.5))
    assert told.at("pool") == set(range(10))
    assert stream.replay(stream.next_sequence, 7.5) == []
    assert stream.replay((1 << 64) - 1, 7.5) == []


def test_a_subscriber_that_joins_late_gets_the_contents_with_numbers_in_a_row() -> None:
    stream = made(batches_kept=3)
    stream.begin(7.5)
    for number in range(10):
        stream.add([stored(number, number + 100)], 7.5)
    stream.add([removed(0, 109)], 7.5)
    stream.add([stored(0, place="posix")], 7.5)
    told = Told().apply(stream.replay(0, 7.5))
    assert told.at("pool") == {*range(1, 10), *range(100, 109)}
    assert told.at("posix") == {0}
    assert told.next == stream.next_sequence


def test_a_subscriber_of_an_earlier_run_forgets_what_it_told() -> None:
    earlier, told = made(first=first_sequence(1_700_000_000_000)), Told()
    told.apply(earlier.begin(7.5))
    told.apply(earlier.add([stored(1, 2)], 7.5))
    assert told.next is not None
    for kept in (100, 1):
        later = made(batches_kept=kept)
        later.begin(7.5)
        later.add([stored(3)], 7.5)
        answer = later.replay(told.next, 7.5)
        assert answer[0].sequence > told.next, "a gap, or a subscriber would take it for what it missed"
        heir = Told()
        heir.blocks = set(told.blocks)
        assert heir.apply(answer).at("pool") == {3}


def test_the_contents_fit_into_the_numbers_that_are_free() -> None:
    stream, told = made(batches_kept=2), Told()
    told.apply(stream.begin(7.5))
    told.apply(stream.add([stored(0)], 7.5))
    stream.add([stored(*range(1, 5 * BLOCKS_PER_EVENT))], 7.5)
    stream.add([removed(0)], 7.5)
    for start in (0, told.next or 0, stream.next_sequence - 3, 0):
        answer = stream.replay(start, 7.5)
        assert answer[0].sequence >= start
        late = Told()
        assert late.apply(answer).at("pool") == set(range(1, 5 * BLOCKS_PER_EVENT))
        assert late.next == stream.next_sequence


def test_subscribers_that_join_at_the_same_time_share_the_contents() -> None:
    stream = made(batches_kept=2)
    stream.begin(7.5)
    for number in range(3):
        stream.add([stored(number)], 7.5)
    first, again = stream.replay(0, 7.5), stream.replay(0, 7.5)
    assert all(one is other for one, other in zip(first, again, strict=True))
    stream.add([removed(0)], 7.5)
    assert Told().apply(stream.replay(0, 7.5)).at("pool") == {1, 2}


def repeated(stream: EventStream) -> list[Batch]:
    """Returns a whole repetition."""
    batches = stream.repeat(1000, 7.5)
    assert not stream.is_repeating
    return batches


def test_contents_are_published_again_for_those_that_cannot_ask() -> None:
    stream, told = made(), Told()
    stream.begin(7.5)
    assert Told().apply(repeated(stream)).blocks == set()
    stream.add([stored(*range(3000)), removed(1)], 7.5)
    told.apply(repeated(stream))
    assert told.at("pool") == {0, *range(2, 3000)}
    told.apply(stream.add([stored(1)], 7.5))
    assert Told().apply(stream.replay(0, 7.5)).blocks == told.blocks


def test_changes_during_a_repetition_are_not_undone_by_it() -> None:
    stream, told = made(), Told(exact=False)
    stream.begin(7.5)
    stream.add([stored(*range(3 * BLOCKS_PER_EVENT))], 7.5)
    told.apply(stream.repeat(2, 7.5))
    assert len(told.at("pool")) == BLOCKS_PER_EVENT
    last = 3 * BLOCKS_PER_EVENT - 1
    told.apply(stream.add([removed(0, last), stored(last + 1)], 7.5))
    while stream.is_repeating:
        told.apply(stream.repeat(1, 7.5))
    assert told.at("pool") == {*range(1, last), last + 1}


def test_the_blocks_of_one_repetition_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise repetitions would fill the memory: they change nothing, but have a payload (P7)."""
    stream = made()
    stream.begin(7.5)
    stream.add([stored(*range(2 * BLOCKS_PER_EVENT))], 7.5)
    early = Told().apply(stream.replay(0, 7.5))
    for _ in range(20):
        repeated(stream)
    assert stream._blocks_kept == 4 * BLOCKS_PER_EVENT == sum(kept.blocks for kept in stream._kept)
    assert sum(len(kept.batch.payload) > 50 for kept in stream._kept) == 4
    for known in (early, Told()):
        known.exact = False
        assert known.apply(stream.replay(known.next or 0, 7.5)).at("pool") == set(range(2 * BLOCKS_PER_EVENT))
    monkeypatch.setattr(module, "BLOCKS_KEPT_MAX", 3 * BLOCKS_PER_EVENT)
    repeated(stream)
    assert stream._blocks_kept == 3 * BLOCKS_PER_EVENT
    assert Told(exact=False).apply(stream.replay(0, 7.5)).at("pool") == set(range(2 * BLOCKS_PER_EVENT))


@pytest.mark.parametrize("seed", range(20))
def test_every_subscriber_converges_over_repetitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot ask, when it has heard a whole repetition; one that missed some of it, when it has asked, too."""
    chance = random.Random(seed)
    monkeypatch.setattr(module, "BLOCKS_PER_EVENT", 2)
    monkeypatch.setattr(module, "BLOCKS_KEPT_MAX", chance.choice([3, 10, 1000]))
    stream = made(batches_kept=chance.choice([1, 5, 100]), clears=chance.random() < 0.7)
    there: set[int] = set()
    heard: list[Batch] = []
    asking = Told(exact=False)

    def told(batches: list[Batch]) -> None:
        heard.extend(batches)
        for batch in batches:
            if asking.next is not None and asking.next != batch.sequence:
                missed = [one for one in stream.replay(asking.next, 7.5) if one.sequence <= batch.sequence]
                asking.next = None
                asking.apply(missed)
            elif chance.random() < 0.8:
                asking.apply([batch])

    told(stream.begin(7.5))
    asking.apply(heard[asking.next is not None :])
    for _ in range(6):
        begun = len(heard)
        told(stream.repeat(chance.randrange(1, 3), 7.5))
        while stream.is_repeating:
            number = chance.randrange(12)
            there ^= {number}
            told(stream.add([(stored if number in there else removed)(number)], 7.5))
            told(stream.repeat(chance.randrange(1, 3), 7.5))
        # A router that knows other blocks, and joins when the repetition begins.
        joined = Told(exact=False)
        joined.blocks = {("kvdepot/pool", None, 99)}
        wanted = there if stream._clears else {*there, 99}
        assert joined.apply(heard[begun:]).at("pool") == wanted
    if asking.next != stream.next_sequence:
        missed = stream.replay(asking.next or 0, 7.5)
        asking.next = None
        asking.apply(missed)
    assert asking.at("pool") == there


@pytest.mark.parametrize("clears", [True, False])
def test_nothing_is_known_after_the_end(clears: bool) -> None:
    stream, told = made(clears=clears), Told()
    told.apply(stream.begin(7.5))
    told.blocks.add(("an engine's", None, 1))
    told.apply(stream.add([stored(1, 2), stored(1, place="posix")], 7.5))
    told.apply(stream.end(7.5))
    assert told.blocks == (set() if clears else {("an engine's", None, 1)})


def test_blocks_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCKS_KEPT_MAX", 10)
    stream = made()
    stream.begin(7.5)
    for number in range(0, 40, 4):
        stream.add([stored(*range(number, number + 4))], 7.5)
    assert len(stream._kept) == 2
    assert Told().apply(stream.replay(0, 7.5)).at("pool") == set(range(40))
    stream.add([stored(*range(100, 150))], 7.5)
    assert len(stream._kept) == 1, "the last batch is kept, whatever its size"
    assert Told().apply(stream.replay(0, 7.5)).at("pool") == {*range(40), *range(100, 150)}


@pytest.mark.parametrize("seed", range(40))
def test_every_subscriber_converges(seed: int) -> None:
    """Whenever it joins or misses batches, a subscriber that asks for them knows what is there."""
    chance = random.Random(seed)
    groups = chance.choice([(), [[ONE]], [[ONE, OTHER]], [[ONE], [OTHER]]])
    stream = made(groups, batches_kept=chance.choice([1, 2, 7, 50]))
    there: set[tuple[str, str, int]] = set()
    always = Told().apply(stream.begin(7.5))
    subscribers = [Told(exact=False) for _ in range(3)]
    for _ in range(60):
        events = []
        for _ in range(chance.randrange(4)):
            entry = (chance.choice([ONE, OTHER]), chance.choice(["pool", "posix"]), chance.randrange(6))
            there ^= {entry}
            kind = stored if entry in there else removed
            events.append(kind(entry[2], namespace=entry[0], place=entry[1]))
        batches = stream.add(events, 7.5)
        always.apply(batches)
        for one in subscribers:
            if chance.random() < 0.2:
                missed = stream.replay(0 if one.next is None else one.next, 7.5)
                assert one.next is None or not missed or missed[0].sequence >= one.next
                one.next = None if missed else one.next
                assert one.apply(missed).blocks == always.blocks
            elif one.next is not None and batches and batches[0].sequence == one.next:
                one.apply(batches)
    held = {
        None: lambda place, number: any((name, place, number) in there for name in (ONE, OTHER)),
        0: lambda place, number: all((name, place, number) in there for name in (groups or [[ONE]])[0]),
        1: lambda place, number: (OTHER, place, number) in there,
    }
    wanted = {
        (f"kvdepot/{place}", group if len(groups) > 1 else None, number)
        for group in (range(len(groups)) if groups else [None])
        for place in ("pool", "posix")
        for number in range(6)
        if held[group](place, number)
    }
    assert always.blocks == wanted


@pytest.mark.parametrize("seed", range(20))
def test_a_subscriber_as_in_vllm_s_example_converges(seed: int) -> None:
    """On a gap it asks from the first batch that it missed, and reads the answer only up to the batch that it has."""
    chance = random.Random(seed)
    stream = made(batches_kept=chance.choice([1, 3, 20]))
    always, example = Told().apply(stream.begin(7.5)), Told(exact=False)
    last = stream.next_sequence - 1
    there: set[int] = set()
    for _ in range(100):
        number = chance.randrange(8)
        there ^= {number}
        (batch,) = stream.add([(stored if number in there else removed)(number)], 7.5)
        always.apply([batch])
        if chance.random() < 0.6:
            continue  # it misses this one
        if batch.sequence > last + 1:
            for old in stream.replay(last + 1, 7.5):
                if old.sequence > last:
                    example.next = None
                    example.apply([old])
                    last = old.sequence
                    if last >= batch.sequence - 1:
                        break
        example.next = None
        example.apply([batch])
        last = batch.sequence
        assert example.blocks == always.blocks


def test_numbers_of_runs_never_meet() -> None:
    """Each fits into a signed 64-bit number, and no run's contents have numbers of the run before."""
    assert first_sequence(0) > 0
    assert first_sequence((1 << 43) - 1) < (1 << 63) - 1
    assert first_sequence(1001) - first_sequence(1000) == module.NUMBERS_PER_MS
    assert module.SNAPSHOT_NUMBERS > 16 * (4 << 20) // BLOCKS_PER_EVENT, (
        "the most that a follower tracks, in all places"
    )


def test_answers_leave_at_the_pace_of_their_readers() -> None:
    replays: Replays[int] = Replays()
    sent: dict[bytes, list[int]] = {b"quick": [], b"slow": []}

    def send(subscriber: bytes, message: int) -> bool:
        if subscriber == b"slow" and len(sent[subscriber]) >= 3:
            return False
        sent[subscriber].append(message)
        return True

    for subscriber in sent:
        replays.begin(subscriber, range(MESSAGES_PER_TURN + 1), 0.0)
    assert replays.turn(send, 0.0)
    assert (len(sent[b"quick"]), sent[b"slow"]) == (MESSAGES_PER_TURN, [0, 1, 2])
    assert replays.turn(send, 1.0)
    assert sent[b"quick"] == [*range(MESSAGES_PER_TURN + 1)]
    assert not replays.turn(send, STALLED_S)
    assert (len(replays), replays.dropped) == (1, 0)
    assert not replays.turn(send, STALLED_S + 0.1)
    assert (len(replays), replays.dropped) == (0, 1)


def test_an_answer_that_is_not_read_takes_the_requests_behind_it_along() -> None:
    replays: Replays[int] = Replays()
    for subscriber in (b"gone", b"gone", b"other"):
        replays.ask(Request(subscriber, 0))
    first = replays.next(lambda _: True, 0.0)
    assert first == Request(b"gone", 0)
    replays.begin(b"gone", [1], 0.0)
    replays.turn(lambda *_: False, STALLED_S + 1)
    assert (len(replays), replays.dropped) == (1, 2)
    assert replays.next(lambda _: True, 0.0) == Request(b"other", 0)


def test_a_bounded_number_of_answers_is_under_way() -> None:
    replays: Replays[int] = Replays()
    for number in range(ANSWERS_MAX):
        assert replays.has_room
        replays.ask(Request(bytes([number]), 0))
        if number % 2:
            assert replays.next(lambda _: True, 0.0) is not None
            replays.begin(bytes([number // 2]), [1], 0.0)
    assert not replays.has_room
    assert len(replays) == ANSWERS_MAX


def test_answers_under_way_hold_a_bounded_number_of_bytes() -> None:
    """A slow reader keeps the contents as of its request, and the contents change meanwhile."""
    replays: Replays[bytes] = Replays(lambda message: message)
    block = HELD_BYTES_MAX // 2 + 1
    shared = bytes(block)
    for number in range(3):
        replays.ask(Request(bytes([number]), 0))
        assert replays.next(lambda _: True, 0.0)
        replays.begin(bytes([number]), [shared, b"end"], float(number))
    assert replays.held_bytes == block + len(b"end"), "they share it"
    replays.ask(Request(b"other", 0))
    assert replays.next(lambda _: True, 3.0)
    replays.begin(b"other", [bytes(block), b"end"], 3.0)
    replays.ask(Request(b"next", 0))
    late_s = STALLED_S * (1 + replays.held_bytes / HELD_BYTES_MAX)
    assert late_s > 2 * STALLED_S, "a reader that moves gets time for what it holds"
    assert replays.next(lambda _: True, late_s) is None, "all of them are under way, and hold too much"
    for now_s in range(int(STALLED_S)):
        # They go on reading.
        replays.turn(lambda *_: False, float(now_s))
    assert replays.next(lambda _: True, late_s + 1.5) is None, "the third keeps what the first two shared"
    assert (replays.dropped, len(replays)) == (2, 3)
    assert replays.next(lambda _: True, late_s + 2.5) == Request(b"next", 0)
    assert replays.held_bytes == block + len(b"end")
    replays.begin(b"next", [b"end"], late_s + 2.5)
    assert replays.turn(lambda *_: True, late_s + 3.0)
    assert (len(replays), replays.held_bytes, replays.dropped) == (0, 0, 3)


def test_every_request_of_a_subscriber_is_answered_in_order() -> None:
    """It takes the end of an answer for the end of the one that it waits for."""
    replays: Replays[str] = Replays()
    sent: list[str] = []

    def send(_: bytes, message: str) -> bool:
        sent.append(message)
        return True

    for start in (7, 0, 5):
        replays.ask(Request(b"one", start))
    replays.ask(Request(b"other", 3))
    assert replays.next(lambda start: start != 7, 0.0) == Request(b"other", 3), (
        "its first request cannot be answered yet"
    )
    replays.begin(b"other", [], 0.0)
    while request := replays.next(lambda _: True, 0.0):
        replays.begin(request.subscriber, [f"{request.start} begins", f"{request.start} ends"], 0.0)
        assert replays.next(lambda _: True, 0.0) is None, "not before the answer has ended"
        while b"one" in replays._answers:
            replays.turn(send, 0.0)
    assert sent == [f"{start} {what}" for start in (7, 0, 5) for what in ("begins", "ends")]
    assert (len(replays), replays.dropped) == (0, 0)


def test_contents_are_encoded_now_and_then_for_all_who_ask() -> None:
    """It takes long for many blocks, on the thread that publishes, and anybody may ask (P7)."""
    stream = made(batches_kept=2)
    encoded: list[int] = []
    original = stream._encode_contents

    def encode(room: int, now_s: float) -> None:
        encoded.append(room)
        original(room, now_s)

    stream._encode_contents = encode  # type: ignore[method-assign]
    stream.begin(7.5)
    for number in range(4):
        stream.add([stored(number)], 7.5)
    assert stream.admits(0, 100.0)
    assert Told().apply(stream.replay(0, 7.5)).at("pool") == set(range(4))
    assert stream.admits(0, 100.0), "they are there"
    stream.replay(0, 7.5)
    stream.add([stored(4)], 7.5)
    assert not stream.admits(0, 100.0 + CONTENTS_S - 0.1)
    for start in (stream.next_sequence - 2, stream.next_sequence, 1 << 63):
        assert stream.admits(start, 100.0), "no contents are needed"
    for start in (0, 1):
        assert stream.admits(start, 100.0 + CONTENTS_S)
        assert Told().apply(stream.replay(start, 7.5)).at("pool") == set(range(5))
    assert len(encoded) == 2
