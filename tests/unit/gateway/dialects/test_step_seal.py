import pytest

from stepwell.access.access_keys import AccessKeys
from stepwell.gateway.dialects.chat_form import StepSeal

OLD, NEW = "old-control-key-1", "new-control-key-2"
UID = "0123456789abcdef" * 2


def test_a_sealed_uid_is_opened_whatever_stands_before_it() -> None:
    seal = StepSeal(AccessKeys((NEW,)))
    assert seal.opened("toolu_" + seal.seal(UID)) == UID


def test_a_seal_of_the_key_before_is_still_opened() -> None:
    assert StepSeal(AccessKeys((NEW, OLD))).opened(StepSeal(AccessKeys((OLD,))).seal(UID)) == UID


def test_gateways_without_keys_open_each_others_seals() -> None:
    assert StepSeal(AccessKeys(())).opened(StepSeal(AccessKeys(())).seal(UID)) == UID


@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_a_changed_text_is_not_opened(place: int) -> None:
    seal = StepSeal(AccessKeys((NEW,)))
    sealed = list(seal.seal(UID))
    sealed[place] = "x" if sealed[place] != "x" else "y"
    assert seal.opened("".join(sealed)) is None


@pytest.mark.parametrize("text", ["", UID, "é" * 60, "call_abc"])
def test_a_text_of_another_origin_is_not_opened(text: str) -> None:
    assert StepSeal(AccessKeys((NEW,))).opened(text) is None


def test_a_seal_of_a_foreign_key_is_not_opened() -> None:
    assert StepSeal(AccessKeys((NEW,))).opened(StepSeal(AccessKeys((OLD,))).seal(UID)) is None


@pytest.mark.parametrize("text", ["", "call_1", "functions.run:0", "a-b", "grüße"])
def test_a_text_with_a_seal_attached_gives_both_back(text: str) -> None:
    seal, other = StepSeal(AccessKeys((NEW,))), StepSeal(AccessKeys((OLD,)))
    sealed = seal.attach(text, UID)
    assert seal.detach(sealed) == (text, UID)
    assert other.detach(sealed) == (sealed, None)
    assert seal.detach(text) == (text, None)
