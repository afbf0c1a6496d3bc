"""examples/live_service as its README says: a service that is started, and two users of it.

It has a pool of its own, because what is fetched as steps cannot be fetched as groups.
"""

from rig.fake_engine import Reply
from rig.gateways import free_port
from rig.waiting import answers, wait_until
from tests.examples.conftest import ExampleUser
from tests.examples.folders import addresses_replaced, missing_lines, shell_block


def test_live_service(user: ExampleUser) -> None:
    replies = {
        "Where is my parcel?": "It left our depot this morning.",
        "And my refund?": "I know nothing of refunds.",
        "Do you sell kettles?": "Yes, three kinds.",
    }
    user.running.engine.script = lambda messages: Reply(replies[messages[-1]["content"]])
    port = str(free_port())
    user.run(shell_block("live_service", "service.py &"), PORT=port)
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/docs"), "the service to answer")
    printed = user.run(addresses_replaced(shell_block("live_service", "/chat"), {"8300": port}))
    assert missing_lines("live_service", printed) == [], printed
    steps = user.running.fetch(3, unit="steps").steps()
    assert [(step.step_index, step.reward) for step in steps] == [(0, 1.0), (1, -1.0), (0, 1.0)]
    assert {step.prompt_uid.partition("@")[0] for step in steps} == {"session"}
