"""The tables that `benchmarks.bridge_matrix --docs` and `benchmarks.exactness --docs` write into docs/bridge.md agree
with one another and with the code."""

import re

import pytest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from benchmarks.bridge_rig.matrix_tables import BEGIN, END
from benchmarks.exactness_rig.exactness_tables import BEGIN as EXACTNESS_BEGIN
from benchmarks.exactness_rig.exactness_tables import DIALECTS
from rig.docs_pages import DOCS

PAGE = (DOCS / "bridge.md").read_text()
GENERATED = PAGE.partition(BEGIN)[2].partition(END)[0]
KINDS_OF_TOOLS = 3
NUMBERS = re.compile(r"\d[\d,]*")


def table(heading: str) -> list[list[str]]:
    """The rows of the generated table whose first column has that heading, with its head."""
    lines = GENERATED.partition(f"| {heading} |")[2].partition("\n\n")[0]
    rows = f"| {heading} |{lines}".splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in (rows[0], *rows[2:])]


def test_the_summary_says_what_the_table_of_cases_says() -> None:
    said = [int(number.replace(",", "")) for number in NUMBERS.findall(GENERATED.partition("\n")[0])]
    templates, cases, tokenizers, conversations, bridged, refused, not_rendered, wrong = said
    assert wrong == 0
    assert templates >= 130
    assert tokenizers == 3
    assert bridged + refused + not_rendered == conversations == templates * cases * (tokenizers + 1)
    rows = table("case")[1:]
    assert len(rows) == cases
    for _, is_bridged, is_refused, is_not_rendered, _ in rows:
        assert int(is_bridged) + int(is_refused) + int(is_not_rendered) == templates


def test_every_refusal_has_a_reason_that_the_page_explains() -> None:
    explained = PAGE.partition(BEGIN)[0]
    for _, _, refused, _, reasons in table("case")[1:]:
        counted = {reason: int(number) for reason, number in re.findall(r"`(\w+)` (\d+)", reasons)}
        assert sum(counted.values()) == int(refused)
        assert all(f"`{BridgeOutcome(reason)}`" in explained for reason in counted)


def test_the_families_of_templates_add_up() -> None:
    heads, *rows = table("bridged of rendered")
    templates = sum(int(NUMBERS.findall(head)[-1]) for head in heads[1:])
    by_case = {row[0]: row for row in table("case")[1:]}
    for case, *shares in rows:
        bridged, rendered = (sum(int(share.split("/")[part]) for share in shares if "/" in share) for part in (0, 1))
        assert bridged == int(by_case[case][1])
        assert rendered == templates - int(by_case[case][3])


@pytest.mark.parametrize("on_vllm", EXACTNESS_BEGIN)
def test_no_cell_of_the_exactness_matrix_is_wrong_and_every_refusal_is_explained(on_vllm: bool) -> None:
    before, _, rest = PAGE.partition(EXACTNESS_BEGIN[on_vllm])
    summary, _, *rows = rest.partition(END)[0].strip().splitlines()
    families, conversations, exact, refused, wrong = map(int, NUMBERS.findall(summary))
    assert (wrong, exact + refused) == (0, conversations)
    assert conversations == families * KINDS_OF_TOOLS * len(DIALECTS) * 2
    assert len(rows) == families + 2
    assert families >= 7
    assert "WRONG" not in rest
    assert all(f"`{reason}`" in before for reason in re.findall(r"`([^`]+)`", "\n".join(rows)))
