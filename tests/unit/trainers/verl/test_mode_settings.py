"""The settings of verl's trainer mode, and those of verl that it refuses."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepwell.errors import BadRequest
from stepwell.trainers.verl import mode_settings
from stepwell.trainers.verl.mode_settings import PoolModeSettings, read_mode_settings, require_usable

USABLE: dict[str, Any] = {
    "algorithm": {
        "adv_estimator": "grpo",
        "use_kl_in_reward": False,
        "rollout_correction": {"bypass_mode": True, "rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"},
    },
    "actor_rollout_ref": {
        "actor": {
            "strategy": "fsdp2",
            "checkpoint": {"async_save": False},
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 1024,
        },
        "model": {"lora": {"rank": 0}},
    },
    "data": {"max_prompt_length": 512, "max_response_length": 512},
    "trainer": {"test_freq": -1, "val_before_train": False, "total_training_steps": 10},
}
CONFIG: dict[str, Any] = yaml.safe_load((Path(mode_settings.__file__).parent / "config" / "stepwell.yaml").read_text())


def test_settings_are_read_and_engines_may_be_given() -> None:
    settings = read_mode_settings({"weights": "w", "engines": ["http://a"], "credit": "split"})
    assert settings == PoolModeSettings(weights="w", engines=("http://a",), credit="split")


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(BadRequest, match=r"no wieghts; it has: .*weights"):
        read_mode_settings({"wieghts": "w"})


def test_the_folder_of_weights_must_be_set() -> None:
    with pytest.raises(BadRequest, match=r"trainer\.v1\.stepwell\.weights: the folder"):
        read_mode_settings({})


def test_the_configuration_has_every_setting_with_its_default() -> None:
    section = CONFIG["trainer"]["v1"]["stepwell"]
    assert read_mode_settings(
        {**section, "weights": "w", "temperature": None, "divide_by_std": True}
    ) == PoolModeSettings(weights="w")
    assert section.keys() == set(PoolModeSettings.__dataclass_fields__)


def test_a_usual_configuration_is_usable() -> None:
    require_usable(USABLE)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("algorithm.adv_estimator", "gae", "adv_estimator=grpo"),
        ("algorithm.use_kl_in_reward", True, "use_kl_loss"),
        ("algorithm.rollout_correction.rollout_is", "token", "no effect: set .*bypass_mode=False"),
        ("algorithm.rollout_correction.rollout_rs", "seq_mean_k1", "no effect: set .*bypass_mode=False"),
        ("algorithm.rollout_correction.loss_type", "reinforce", "no effect"),
        ("actor_rollout_ref.actor.checkpoint.async_save", True, "async_save"),
        ("actor_rollout_ref.model.lora.rank", 8, "lora.merge"),
        ("actor_rollout_ref.model.lora_rank", 8, "lora.merge"),
        ("trainer.test_freq", 5, "test_freq"),
        ("trainer.val_before_train", True, "val_before_train"),
        ("trainer.total_training_steps", None, "total_training_steps"),
        ("data.max_response_length", 513, "ppo_max_token_len_per_gpu=1025"),
    ],
)
def test_what_cannot_be_done_with_agents_is_refused_with_a_remedy(path: str, value: object, text: str) -> None:
    config = deepcopy(USABLE)
    *folders, name = path.split(".")
    section = config
    for folder in folders:
        section = section[folder]
    section[name] = value
    with pytest.raises(BadRequest, match=text):
        require_usable(config)


@pytest.mark.parametrize("wanted", [{"rollout_is": "token"}, {"rollout_rs": "seq_mean_k1"}])
def test_corrections_of_log_probabilities_that_verl_computes_itself_are_usable(wanted: dict[str, str]) -> None:
    config = deepcopy(USABLE)
    config["algorithm"]["rollout_correction"] |= {"bypass_mode": False, **wanted}
    require_usable(config)
