"""`stepwell up`: everything started in the order of who needs whom, and ended in the reverse.

What always holds: whatever fails, nothing that was started is left running; a Ray cluster that was joined keeps its
DataPool, for others may use it.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any, TypeAlias

from stepwell.config.serving import DashboardSettings, GatewaySettings
from stepwell.config.up import UpSettings
from stepwell.errors import BadRequest
from stepwell.up.background import detach, fall_silent
from stepwell.up.cluster import Cluster, joined_cluster, own_cluster
from stepwell.up.engine_model import Model, wait_for_model
from stepwell.up.launch_plan import Plan, make_plan, url_of
from stepwell.up.processes import ENDING, programs, serve
from stepwell.up.screen import Screen
from stepwell.up.state_folder import Record, StateFolder, started, this_folder
from stepwell.up.words import welcome

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers

ENGINE_KEY = "STEPWELL_GATEWAY_ENGINE_KEY"


def run_up(settings: UpSettings) -> None:
    """Until told to end."""
    folder = this_folder()
    folder.make()
    if settings.detach:
        detach(folder)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)  # what went well is said on the screen
    screen = Screen(sys.stdout)
    with folder.occupied():
        try:
            Up(settings, folder, screen).run()
        except KeyboardInterrupt:
            screen.say("stopped before it was ready")
            sys.exit(130)


class Up:
    def __init__(self, settings: UpSettings, folder: StateFolder, screen: Screen) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._record = Record(pid=os.getpid(), started=started(os.getpid()), started_at=time.time())

    def run(self) -> None:
        _signal_handling(signal.default_int_handler)
        self._write_record(self._record)
        key = self._folder.key()
        model = self._ask_engine()
        plan = make_plan(self._settings, model, self._folder, key)
        _require_free(plan.gateway, "--port")
        _require_free(plan.dashboard, "--dashboard-port")
        with self._cluster() as cluster:
            _signal_handling(signal.default_int_handler)  # Ray has put its own in the place of ours
            plan = plan.on(cluster.address)
            self._folder.write_environment({"STEPWELL_KEY": key, **cluster.joining})
            self._start_actors(plan)
            was_ready = asyncio.run(self._serve(plan, model, key))
            _signal_handling(signal.SIG_IGN)  # the rest takes a moment, and is not to be broken off
        if not was_ready:
            raise KeyboardInterrupt
        joined = self._settings.ray_address
        self._screen.say(f"ended; the DataPool {plan.pool.name!r} stays on Ray at {joined}" if joined else "ended")

    def _ask_engine(self) -> Model:
        address, what = self._settings.engine[0], f"the engine at {self._settings.engine[0]}"
        key = os.environ.get(ENGINE_KEY) or self._settings.gateway.get("engine_key")
        model = wait_for_model(address, str(key) if key else None, lambda why: self._screen.wait(what, why))
        self._screen.say(f"{what} serves {model.name!r}", instead_of=what)
        return model

    def _cluster(self) -> AbstractContextManager[Cluster]:
        address, namespace = self._settings.ray_address, self._settings.ray_namespace
        self._screen.say(f"joining Ray at {address}" if address else "starting Ray")
        return joined_cluster(address, namespace) if address else own_cluster(namespace, self._folder.ray_token())

    def _start_actors(self, plan: Plan) -> None:
        from stepwell import wiring  # it imports Ray, which must find its settings in the environment

        self._screen.say(f"starting the DataPool on Ray at {plan.pool.ray_address}")
        wiring.run_pool(plan.pool)
        if plan.rewards is not None:
            self._screen.say(f"starting reward workers for {plan.rewards.function}")
            wiring.run_rewards(plan.rewards)

    async def _serve(self, plan: Plan, model: Model, key: str) -> bool:
        def on_ready() -> None:
            self._write_record(
                replace(
                    self._record,
                    gateway=url_of(plan.gateway),
                    dashboard=url_of(plan.dashboard),
                    ray_address=plan.gateway.ray_address,
                    ray_namespace=plan.gateway.ray_namespace,
                    is_ready=True,
                )
            )
            self._screen.say("everything is up")
            self._screen.show(welcome(plan, model.name, key))
            if self._settings.detach:
                self._screen.show("It goes on in the background; `stepwell down` ends it.")
                fall_silent(self._folder.logs / "up.log")
            else:
                self._screen.show("Ctrl-C ends it; `stepwell status`, in another terminal here, shows what happens.")

        def on_end() -> None:
            self._screen.say("ending: the gateway delivers what it holds")

        return await serve(programs(plan, key), self._folder.logs, self._screen, on_ready=on_ready, on_end=on_end)

    def _write_record(self, record: Record) -> None:
        self._folder.write_record(record)


def _signal_handling(handler: Handler) -> None:
    """However this process is told to end, it goes the same way."""
    for number in ENDING:
        signal.signal(number, handler)


def _require_free(settings: GatewaySettings | DashboardSettings, flag: str) -> None:
    try:
        socket.create_server((settings.host, settings.port)).close()
    except OSError as failure:
        raise BadRequest(
            f"{settings.host}:{settings.port} cannot be listened on ({failure.strerror}); is it another `stepwell up`? "
            f"Choose another port with {flag}"
        ) from None
