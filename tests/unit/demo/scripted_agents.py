"""An agent process without agents: it is ready at once, answers `evaluate` with its seed, and exits on `stop`."""

import sys

from stepwell.demo.agent_process import Orders


def main(orders: Orders) -> None:
    say(0.0)
    for order in sys.stdin:
        if order.strip() == "stop":
            sys.exit("the gateway is on fire")
        say(orders.seed if order.strip() == "evaluate" else 0.0)


def say(number: float) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Orders.from_json(sys.argv[1]))
