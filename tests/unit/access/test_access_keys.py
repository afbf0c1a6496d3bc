import base64

import pytest

from stepwell.access.access_keys import AccessKeys
from stepwell.errors import BadRequest

CONTROL = "control-key-of-the-tests"
NEXT = "next-control-key-of-the-tests"


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.fixture
def keys() -> AccessKeys:
    return AccessKeys([CONTROL])


def test_a_trajectory_key_is_a_256_bit_seal_that_every_gateway_makes_alike(keys: AccessKeys) -> None:
    key = keys.trajectory_key("t", "p")
    assert key == AccessKeys([CONTROL]).trajectory_key("t", "p")
    assert key.startswith("sk-sw-")
    assert len(base64.urlsafe_b64decode(key.removeprefix("sk-sw-") + "=")) == 32


def test_a_trajectory_key_opens_its_own_trajectory_alone(keys: AccessKeys) -> None:
    header = bearer(keys.trajectory_key("t", "p"))
    assert keys.may_call(header, "t", "p")
    assert not keys.may_call(header, "u", "p")
    assert not keys.may_call(header, "t", "q")
    assert not keys.may_control(header)


@pytest.mark.parametrize("other", [("ab", "c"), ("a:b", "c"), ("", "abc"), ("abc", ""), ("1:a", "bc"), ("bc", "a")])
def test_names_that_join_to_the_same_text_have_different_keys(keys: AccessKeys, other: tuple[str, str]) -> None:
    assert not keys.may_call(bearer(keys.trajectory_key("a", "bc")), *other)


def test_the_control_key_opens_everything(keys: AccessKeys) -> None:
    assert keys.may_control(bearer(CONTROL))
    assert keys.may_call(bearer(CONTROL), "t", "p")


def test_a_gateway_with_another_control_key_accepts_neither(keys: AccessKeys) -> None:
    stranger = AccessKeys([NEXT])
    assert not keys.may_control(bearer(NEXT))
    assert not keys.may_call(bearer(stranger.trajectory_key("t", "p")), "t", "p")


def test_while_keys_rotate_both_are_accepted_and_the_first_makes_new_ones(keys: AccessKeys) -> None:
    rotating = AccessKeys([NEXT, CONTROL])
    for key in (NEXT, CONTROL):
        assert rotating.may_control(bearer(key))
        assert rotating.may_call(bearer(AccessKeys([key]).trajectory_key("t", "p")), "t", "p")
    assert rotating.trajectory_key("t", "p") == AccessKeys([NEXT]).trajectory_key("t", "p")
    assert not AccessKeys([NEXT]).may_call(bearer(keys.trajectory_key("t", "p")), "t", "p")


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer   {} "])
def test_the_header_may_be_text_or_bytes_and_its_scheme_in_any_case(keys: AccessKeys, header: str) -> None:
    sent = header.format(keys.trajectory_key("t", "p"))
    assert keys.may_call(sent, "t", "p")
    assert keys.may_call(sent.encode(), "t", "p")


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", b"", "Bearer", b"Bearer ", "Bearer \x00", CONTROL, f"Basic {CONTROL}", f"Bearer{CONTROL}"),
        *(f"Bearer {CONTROL}x", f"Bearer {CONTROL[:-1]}", f"Bearer {CONTROL} {CONTROL}", f"Bearer, {CONTROL}"),
        *("Bearer ключ", f"Bearer {CONTROL}\udc80", b"Bearer \xff\xfe", b"\xff" * 100_000, "Bearer sk-sw-", "ſ" * 7),
    ],
)
def test_a_header_that_is_wrong_or_unreadable_is_refused_without_an_exception(
    keys: AccessKeys, header: str | bytes | None
) -> None:
    assert not keys.may_control(header)
    assert not keys.may_call(header, "t", "p")


def test_names_that_are_no_text_are_refused_without_an_exception(keys: AccessKeys) -> None:
    assert not keys.may_call(bearer("sk-sw-x"), "\udc80", "\x00")


def test_without_a_control_key_everything_is_open() -> None:
    keys = AccessKeys([])
    assert keys.open
    assert keys.trajectory_key("t", "p") == "not-needed"
    assert keys.may_control(None)
    assert keys.may_call(b"\xff", "t", "p")
    assert not AccessKeys([CONTROL]).open


@pytest.mark.parametrize(
    ("weak", "why"),
    [
        ("fifteen-letters", "control key 2 has 15 characters and could be guessed; use 16 or more"),
        ("", "control key 2 has 0 characters"),
        ("with a space in it, long", "control key 2 has characters that no header can carry"),
        ("schlüssel-mit-umlaut", "control key 2 has characters that no header can carry"),
        ("a-line-break-at-the-end\n", "control key 2 has characters that no header can carry"),
    ],
)
def test_a_control_key_that_is_weak_or_cannot_be_sent_is_refused_and_not_shown(weak: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        AccessKeys([CONTROL, weak])
    assert not weak or weak not in str(refused.value)


@pytest.mark.parametrize("user", ["", "anyone"])
def test_a_key_may_come_as_the_password_of_a_url(keys: AccessKeys, user: str) -> None:
    def basic(password: str) -> bytes:
        return b"Basic " + base64.b64encode(f"{user}:{password}".encode())

    assert keys.may_control(basic(CONTROL))
    assert keys.may_call(basic(keys.trajectory_key("t", "p")), "t", "p")
    assert not keys.may_control(basic(NEXT))


@pytest.mark.parametrize("credentials", [b"", b"*", base64.b64encode(CONTROL.encode()), b"\xff\xfe"])
def test_a_basic_header_without_a_password_is_refused_without_an_exception(
    keys: AccessKeys, credentials: bytes
) -> None:
    assert not keys.may_control(b"Basic " + credentials)
