from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.wire import codec
from scheduler.wire.codec import CodecError, FrameDecoder, MessageTooLargeError, VersionError, encode_into
from scheduler.wire.messages import MAX_FRAME, PROTOCOL, AnyMessage, Cancel, Ping, Snapshot
from tests.wire.cast import frame
from tests.wire.strategies import MESSAGE_TYPES, MESSAGES, of_type, property_test


def decode_all(pieces: list[bytes]) -> list[AnyMessage]:
    decoder = FrameDecoder()
    return [message for piece in pieces for message in decoder.feed(piece)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@property_test
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    message = data.draw(of_type(kind))

    assert decode_all([frame(message)]) == [message]


@property_test
@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
def test_it_does_not_matter_in_what_pieces_bytes_arrive(messages: list[AnyMessage], places: list[int]) -> None:
    assert decode_all(cut(frame(*messages), places)) == messages


def test_bytes_may_arrive_one_by_one() -> None:
    data = frame(Cancel("a"), Ping(1), Cancel("b"))

    assert decode_all([bytes([byte]) for byte in data]) == [Cancel("a"), Ping(1), Cancel("b")]


@property_test
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_garbage_is_a_codec_error_and_nothing_else(pieces: list[bytes]) -> None:
    with contextlib.suppress(CodecError):
        decode_all(pieces)


@property_test
@given(st.binary(max_size=64))
def test_garbage_in_a_well_formed_frame_is_a_codec_error_and_nothing_else(payload: bytes) -> None:
    size = (len(payload) + 1).to_bytes(4, "big")
    with contextlib.suppress(CodecError):
        decode_all([size + bytes([PROTOCOL]) + payload])


@property_test
@given(MESSAGES, st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_frame_is_another_message_or_a_codec_error(message: AnyMessage, place: int, change: int) -> None:
    data = bytearray(frame(message))
    data[place % len(data)] ^= change
    with contextlib.suppress(CodecError):
        decode_all([bytes(data)])


def test_good_frames_before_a_bad_one_are_delivered() -> None:
    decoder = FrameDecoder()
    got = []

    with pytest.raises(CodecError):
        for message in decoder.feed(frame(Ping(1), Ping(2)) + b"\0\0\0\2" + bytes([PROTOCOL, 0xC1])):
            got.append(message)

    assert got == [Ping(1), Ping(2)]


def test_a_frame_over_the_limit_is_refused_by_its_header_alone() -> None:
    with pytest.raises(CodecError, match=str(MAX_FRAME)):
        decode_all([(MAX_FRAME + 1).to_bytes(4, "big") + bytes([PROTOCOL])])


def test_a_message_over_the_limit_is_not_encoded_and_leaves_the_buffer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME", 100)
    buffer = bytearray(frame(Ping(1)))

    with pytest.raises(MessageTooLargeError):
        encode_into(Cancel("x" * 100), buffer)

    assert decode_all([bytes(buffer)]) == [Ping(1)]


def test_a_message_that_has_no_form_leaves_the_buffer_as_it_was() -> None:
    buffer = bytearray(frame(Ping(1)))

    with pytest.raises(TypeError):
        encode_into(Snapshot(1, {"good": 1, "bad": object()}), buffer)

    assert decode_all([bytes(buffer)]) == [Ping(1)]


def test_another_version_is_named() -> None:
    with pytest.raises(VersionError, match=f"protocol {PROTOCOL + 1}, this process protocol {PROTOCOL}"):
        decode_all([b"\0\0\0\1" + bytes([PROTOCOL + 1])])


def test_nesting_without_end_is_a_codec_error() -> None:
    payload = b"\x93\x0f\x01\x81\xa1v" + b"\x91" * 100_000  # a Snapshot with a very deep value
    with pytest.raises(CodecError):
        decode_all([(len(payload) + 1).to_bytes(4, "big") + bytes([PROTOCOL]) + payload])
