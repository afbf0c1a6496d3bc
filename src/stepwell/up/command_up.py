"""`stepwell up`: starts everything in the order of dependencies, and ends it in the reverse order.

- After a failure, nothing that was started is left running.
- A Ray cluster that was joined keeps its DataPool, because others may use it.
"""

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from stepwell.config.serving import DashboardSettings, GatewaySettings
from stepwell.config.up import UpSettings
from stepwell.errors import BadRequest
from stepwell.pool.client.ray_cluster import join_ray, local_ray, make_ray_folder
from stepwell.up.background import detach, redirect_output
from stepwell.up.engine_model import ServedModel, missing_lines, wait_for_model
from stepwell.up.launch_plan import LaunchPlan, make_plan, url_of
from stepwell.up.processes import END_SIGNALS, StartupScreen, programs, serve, why_no_weights
from stepwell.up.state_folder import RunRecord, StateFolder, started, this_folder
from stepwell.wiring.pool import run_pool
from stepwell.wiring.rewards import run_rewards

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers

ENGINE_KEY = "STEPWELL_GATEWAY_ENGINE_KEY"
STORE = 512 * 2**20
"""Bytes of Ray's object store, which large batches pass through."""
SNIPPET = """\
import stepwell
from openai import OpenAI
with stepwell.connect("{url}", key={key}).trajectory(prompt_uid="hello", group_size=1) as t:
    agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
    print(agent.chat.completions.create(model={model}, messages={messages}, max_tokens=64).choices[0].message.content)
"""
PLAIN = """\
A plain client of OpenAI's or Anthropic's APIs is recorded with this base_url and key. In a shell:

export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}
export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}

Each conversation becomes a session, which ends after {idle} s without a call. The header x-stepwell-trajectory of an
answer names it: POST {url}/TRAJECTORY/v1/feedback with {{"value": 1.0}} rewards it.
"""
MESSAGES = '[{"role": "user", "content": "Hello!"}]'


def run_up(settings: UpSettings) -> None:
    """Runs until a signal ends it."""
    folder = this_folder()
    folder.make()
    if settings.detach:
        detach(folder)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)  # the screen reports what succeeded
    screen = StartupScreen(sys.stdout)
    with folder.occupied():
        try:
            Up(settings, folder, screen).run()
        except KeyboardInterrupt:
            screen.say("stopped before it was ready")
            sys.exit(130)


class Up:
    def __init__(self, settings: UpSettings, folder: StateFolder, screen: StartupScreen) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._record = RunRecord(pid=os.getpid(), started=started(os.getpid()))

    def run(self) -> None:
        _handle_signals(signal.default_int_handler)
        self._folder.write_record(self._record)
        key = self._folder.key()
        model = self._ask_engine()
        plan = make_plan(self._settings, model, self._folder, key)
        _require_free(plan.gateway, "--port")
        _require_free(plan.dashboard, "--dashboard-port")
        with self._ray() as (ray_address, joining):
            _handle_signals(signal.default_int_handler)  # Ray has replaced our handlers
            plan = plan.on(ray_address)
            self._folder.write_environment({"STEPWELL_URL": url_of(plan.gateway), "STEPWELL_KEY": key, **joining})
            self._start_actors(plan)
            was_ready = asyncio.run(self._serve(plan, model, key))
            _handle_signals(signal.SIG_IGN)  # ending Ray takes a moment and must not be interrupted
        if not was_ready:
            raise KeyboardInterrupt
        joined = self._settings.ray_address
        self._screen.say(f"ended; the DataPool {plan.pool.name!r} stays on Ray at {joined}" if joined else "ended")

    def _ask_engine(self) -> ServedModel:
        address, what = self._settings.engine[0], f"the engine at {self._settings.engine[0]}"
        key = str(os.environ.get(ENGINE_KEY) or self._settings.gateway.get("engine_key") or "") or None
        model = wait_for_model(address, key, lambda why: self._screen.wait(what, why))
        self._screen.say(f"{what} serves {model.name!r}", instead_of=what)
        for line, where in missing_lines(self._settings.engine, key).items():
            self._screen.say(f"{', '.join(where)}: {line}")
        return model

    @contextmanager
    def _ray(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Joins a cluster, or starts one that ends with the block. Yields its address, and the variables to join it."""
        address, namespace = self._settings.ray_address, self._settings.ray_namespace
        if address:
            self._screen.say(f"joining Ray at {address}")
            join_ray(address, namespace)
            yield address, {}
            return
        self._screen.say("starting Ray")
        files = make_ray_folder()
        self._folder.keep_ray_folder(files)
        with local_ray(namespace, token=self._folder.ray_token(), store=STORE, folder=files) as joining:
            yield joining["RAY_ADDRESS"], joining

    def _start_actors(self, plan: LaunchPlan) -> None:
        self._screen.say(f"starting the DataPool on Ray at {plan.pool.ray_address}")
        run_pool(plan.pool)
        if plan.rewards is not None:
            self._screen.say(f"starting reward workers for {plan.rewards.function}")
            run_rewards(plan.rewards)

    async def _serve(self, plan: LaunchPlan, model: ServedModel, key: str) -> bool:
        shown = key if self._settings.show_key else None

        def on_ready() -> None:
            self._folder.write_record(replace(self._record, dashboard=url_of(plan.dashboard), is_ready=True))
            why = why_no_weights(plan, key)
            self._screen.say("everything is up" if why is None else f"everything is up, but calls fail: {why}")
            self._screen.show(welcome(plan, model.name, ShownKey(self._folder.key_file, shown)))
            if self._settings.detach:
                self._screen.show("It continues in the background; `stepwell down` stops it.")
                redirect_output(self._folder.logs / "up.log")
            else:
                self._screen.show("Ctrl-C stops it; `stepwell status`, in another terminal here, shows its state.")

        def on_end() -> None:
            self._screen.say("ending: the gateway delivers its waiting steps")

        return await serve(programs(plan, key), self._folder.logs, self._screen, on_ready=on_ready, on_end=on_end)


@dataclass(frozen=True, slots=True)
class ShownKey:
    """How the key is told: by its file; by itself only if that was asked for, because a terminal's output is kept."""

    file: Path
    key: str | None = None

    @property
    def place(self) -> str:
        return self.key or f"in {self.file} (`. {self.file.parent / 'env'}` sets STEPWELL_KEY)"

    @property
    def in_shell(self) -> str:
        return shlex.quote(self.key) if self.key else f'"$(cat {shlex.quote(str(self.file))})"'

    @property
    def in_python(self) -> str:
        return json.dumps(self.key) if self.key else f"open({json.dumps(str(self.file))}).read().strip()"


def welcome(plan: LaunchPlan, model: str, key: ShownKey) -> str:
    """The addresses of everything, and a program to paste."""
    places = {
        "base_url": f"{url_of(plan.gateway)}/v1",
        "key": key.place,
        "dashboard": url_of(plan.dashboard) + (f"/#key={key.key}" if key.key else " (it asks for the key)"),
        "Ray": f"{plan.gateway.ray_address}, namespace {plan.gateway.ray_namespace}",
    }
    if plan.gateway.atropos:
        places["Atropos"] = f"{url_of(plan.gateway)}/atropos"
    listed = "\n".join(f"  {name:10} {place}" for name, place in places.items())
    snippet = SNIPPET.format(url=url_of(plan.gateway), key=key.in_python, model=json.dumps(model), messages=MESSAGES)
    plain = PLAIN.format(url=url_of(plan.gateway), key=key.in_shell, idle=f"{plan.pool.session_idle:g}")
    return f"\n{listed}\n\n{plain}\nPaste this into Python for a rollout with a reward:\n\n{snippet}"


def _handle_signals(handler: Handler) -> None:
    """All signals that end this process get the same handler."""
    for number in END_SIGNALS:
        signal.signal(number, handler)


def _require_free(settings: GatewaySettings | DashboardSettings, flag: str) -> None:
    try:
        socket.create_server((settings.host, settings.port)).close()
    except OSError as failure:
        raise BadRequest(
            f"cannot listen on {settings.host}:{settings.port} ({failure.strerror}); is it another `stepwell up`? "
            f"Choose another port with {flag}"
        ) from None
