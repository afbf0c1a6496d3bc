"""`stepwell train`: the reference trainer beside `stepwell up`. It learns from what agents do, and brings each update's
weights to the engines.

- Nothing is trained before an engine has shown that it takes weights.
- A run is a folder. The same command continues it from its last checkpoint, also after a kill; what is in no
  checkpoint goes back to the pool.
- The weights of the last update are in FOLDER/model at the end, as a folder that engines and transformers load.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from stepwell.commands.processes import StartupScreen
from stepwell.commands.sections import PoolSection
from stepwell.common.imports import load_member, require
from stepwell.engines.vllm_control import one_line
from stepwell.errors import BadRequest, FetchTimeout, NotReady, SyncFailed
from stepwell.pool.client import DataPool

if TYPE_CHECKING:
    import torch

    from stepwell.engines.engine import EngineControl
    from stepwell.pool.client.batch import Batch
    from stepwell.trainers.reporting import Report, UpdateMetrics
    from stepwell.trainers.settings import Settings

A_LOOK = 5.0
"""Seconds between two lines that say what a batch waits for."""
METRICS, VALIDATIONS, CHECKPOINTS, WEIGHTS, MODEL = (
    "metrics.jsonl",
    "validations.jsonl",
    "checkpoints",
    "weights",
    "model",
)
"""The parts of a run's folder."""
BATCH = "a batch"


class TrainSettings(PoolSection, env_prefix="STEPWELL_TRAIN_"):
    """Train the model that the engines serve on what agents do, and bring each update's weights to the engines.

    It needs a pool with rewards, as `stepwell up` starts it, and engines that take weights. In the folder of `stepwell
    up`, read .stepwell/env first: `. .stepwell/env`. The same command continues a run that was stopped.
    """

    examples = (
        "stepwell train --model ./model",
        "stepwell train --model ./model --updates 200 --groups 32 --lora-rank 16 --wandb my-project",
    )

    model: Path
    """Folder of the model that the engines were started with."""
    out: Path = Path("training")
    """Folder of the run: checkpoints, weights for the engines, metrics, and the model at the end. The engines must see
    it under the same path."""
    channel: str = "train"
    """Channel from which the groups are taken."""
    groups: int = Field(default=16, ge=1)
    """Groups in a batch, which is one update."""
    updates: int = Field(default=120, ge=1)
    """Updates, those before a restart included."""
    algorithm: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo"] = "grpo"
    """The objective; each has defaults of its own."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the first update; it falls to a tenth. Without it, one that fits the number of trained
    parameters."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty towards the model before training. Above 0, that model is held in memory too."""
    max_refills: int = Field(default=0, ge=0)
    """How often an update may fetch more groups in place of those whose rewards are all equal."""
    lora_rank: int = Field(default=0, ge=0)
    """Train an adapter of this rank (needs peft); 0: all parameters. The engines get the weights with it merged."""
    device: str = "cpu"
    """Device that trains, for example cuda."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads that train; without it, as many as torch takes."""
    validate_with: str | None = None
    """Your function, module:function or path/to/file.py:function. It plays tasks that are not trained, and returns
    their mean reward, or a reward by task."""
    validate_every: int = Field(default=10, ge=1)
    """Updates between two validations; there is one before the first update and one after the last, too."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a batch before the run ends; it says meanwhile what is missing."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Updates between checkpoints. What was trained since the last one is trained again after a crash."""
    engine_key: str | None = None
    """API key of the engines."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the metrics (needs wandb)."""


def run_train(settings: TrainSettings) -> None:
    """Runs until the updates are done; Ctrl-C ends it after the last checkpoint."""
    require("torch", "train")
    need("transformers")
    from stepwell.engines.vllm_control import VllmControl
    from stepwell.pool.client import PoolClient
    from stepwell.pool.client.ray_cluster import join_ray

    screen = StartupScreen(sys.stdout)
    require_model(settings.model)
    validate = None if settings.validate_with is None else load_validation(settings.validate_with)
    join_ray(settings.ray_address, settings.ray_namespace)
    pool = TalkingPool(PoolClient(settings.data_pool_name, settings.ray_namespace), screen)
    engines = pool.engines()
    require_engines([VllmControl(url, key=settings.engine_key) for url in engines])
    screen.say(f"{len(engines)} {'engine takes' if len(engines) == 1 else 'engines take'} weights")
    run = TrainingRun(settings, pool, screen, validate)
    try:
        run.run()
    except KeyboardInterrupt:
        screen.say(f"stopped after update {run.trainer.update}; the same command continues in {settings.out}")
        sys.exit(130)
    finally:
        run.close()


class HeldOutReward(NamedTuple):
    """The rewards of tasks that are not trained, at one moment."""

    update: int
    mean: float
    tasks: int

    @property
    def text(self) -> str:
        return f"validation after update {self.update}: {self.mean:.3f}" + (
            f" over {self.tasks} tasks" * bool(self.tasks)
        )


class TrainingRun:
    """The parts of a run, from the settings to the trained model."""

    def __init__(
        self, settings: TrainSettings, pool: DataPool, screen: StartupScreen, validate: Callable[[], object] | None
    ) -> None:
        import torch

        from stepwell.trainers.reporting import ToJsonl, ToWandb
        from stepwell.trainers.trainer import AsyncTrainer
        from stepwell.trainers.transfers import CheckpointTransfer
        from stepwell.trainers.weight_sync import WeightSync

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._settings, self._screen, self._validate = settings, screen, validate
        self._wandb = None if settings.wandb is None else ToWandb(settings.wandb)
        transfer = CheckpointTransfer(settings.out / WEIGHTS, like=settings.model)
        self._sync = WeightSync(transfer=transfer, pool=pool, engine_key=settings.engine_key)
        reports: list[Report] = [Progress(screen, settings.updates), ToJsonl(settings.out / METRICS)]
        self.trainer = AsyncTrainer(
            pool,
            load_model(settings, settings.lora_rank),
            settings=trainer_settings(settings),
            sync=self._sync,
            checkpoints=settings.out / CHECKPOINTS,
            reference=load_model(settings, 0).eval().requires_grad_(False) if settings.kl_coefficient else None,
            reports=reports if self._wandb is None else [*reports, self._wandb],
        )

    def run(self) -> None:
        trainer, every = self.trainer, self._settings.validate_every
        trainer.start()
        begins = f"continues after update {trainer.update}" if trainer.update else "begins"
        self._screen.say(f"training {begins}: version {trainer.version} is in the engines")
        if not trainer.update:
            self._validated()
        while trainer.update < self._settings.updates:
            trainer.run(min(trainer.update - trainer.update % every + every, self._settings.updates))
            self._validated()
        folder = self._settings.out / MODEL
        write_trained(trainer.model, folder, like=self._settings.model)
        self._screen.say(f"{trainer.update} updates are done; the model is in {folder}")

    def close(self) -> None:
        self._sync.close()
        if self._wandb is not None:
            self._wandb.close()

    def _validated(self) -> None:
        if self._validate is None:
            return
        found = read_validation(self.trainer.update, self._validate())
        with (self._settings.out / VALIDATIONS).open("a") as file:
            file.write(json.dumps(found._asdict()) + "\n")
        self._screen.say(found.text)


class TalkingPool(DataPool):
    """A pool that says on the screen what a batch waits for."""

    def __init__(self, client: Any, screen: StartupScreen) -> None:
        super().__init__(client)
        self._screen = screen

    def fetch_batch(self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Any) -> "Batch":
        left = timeout
        while True:
            try:
                return super().fetch_batch(count, timeout=min(left, A_LOOK), lease=lease, **terms)
            except FetchTimeout as missing:
                left -= A_LOOK
                if left <= 0:
                    raise
                self._screen.wait(BATCH, str(missing))


class Progress:
    """A line for each update."""

    def __init__(self, screen: StartupScreen, updates: int) -> None:
        self._screen = screen
        self._updates = updates

    def __call__(self, done: "UpdateMetrics") -> None:
        seconds = done.fetch_seconds + done.train_seconds + done.save_seconds + done.sync_seconds
        self._screen.say(
            f"update {done.update:4d} of {self._updates}  reward {done.reward:6.3f}  KL {done.rollout_kl:7.4f}  "
            f"{done.rollouts / seconds:6.1f} rollouts/s (waited {done.fetch_seconds / seconds:3.0%})  "
            f"tokens {done.tokens:6d}  versions behind {done.staleness:4.1f}  version {done.version}",
            instead_of=BATCH,
        )


def trainer_settings(settings: TrainSettings) -> "Settings":
    from stepwell.trainers.settings import Settings

    return Settings(
        algorithm=settings.algorithm,
        channel=settings.channel,
        groups=settings.groups,
        updates=settings.updates,
        learning_rate=settings.learning_rate,
        kl_coefficient=settings.kl_coefficient,
        max_refills=settings.max_refills,
        checkpoint_every=settings.checkpoint_every,
        fetch_timeout=settings.timeout,
    )


def need(package: str) -> ModuleType:
    """A package that belongs to no extra, because people choose its version by their model."""
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise BadRequest(f"stepwell train needs {package} here: pip install {package}") from None


def require_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise BadRequest(
            f"--model {folder} is no model folder: it has no config.json. Name the folder that the engines were "
            "started with; one of the Hugging Face hub comes by `hf download NAME --local-dir FOLDER`"
        )


def require_engines(engines: "Sequence[EngineControl]") -> None:
    """NotReady if there is no engine, or one that cannot take weights."""
    if not engines:
        raise NotReady("the pool lists no engines: start a gateway with them, for example with `stepwell up`")
    for engine in engines:
        try:
            engine.version()
        except SyncFailed as failure:
            raise NotReady(f"an engine takes no weights: {failure}. Start it like this: {one_line()}") from None


def load_validation(name: str) -> Callable[[], object]:
    shown, call = load_member(name)
    if not callable(call):
        raise BadRequest(f"{shown} is no function but a {type(call).__name__}")
    return call


def read_validation(update: int, returned: object) -> HeldOutReward:
    """BadRequest if it is neither a number nor numbers by task."""
    values: Sequence[object] = list(returned.values()) if isinstance(returned, Mapping) else [returned]
    numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not numbers or len(numbers) != len(values):
        raise BadRequest(
            f"the function of --validate-with returned {returned!r:.200}; it returns a number, or {{task: number}}"
        )
    return HeldOutReward(update, sum(numbers) / len(numbers), len(numbers) if isinstance(returned, Mapping) else 0)


def load_model(settings: TrainSettings, lora_rank: int) -> "torch.nn.Module":
    import torch
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    if lora_rank:
        peft = need("peft")
        torch.manual_seed(0)  # adapters begin at random: the same in each run
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules="all-linear"))
    return model.to(settings.device)


def write_trained(model: "torch.nn.Module", folder: Path, like: Path) -> None:
    """Writes the model, adapters merged, as a folder that an engine can serve."""
    from stepwell.trainers.transfers import MAX_FILE_BYTES, copy_other_files, stream_weights, write_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    copy_other_files(like, folder)
    write_checkpoint(stream_weights(model), folder, MAX_FILE_BYTES)
