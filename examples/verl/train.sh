#!/usr/bin/env bash
# verl's own trainer on the rollouts in the pool: bash train.sh MODEL WEIGHTS [OVERRIDE …]
# MODEL is the policy's folder; WEIGHTS a folder for new weights, which vLLM sees under the same path.
set -euo pipefail

overrides=(
    actor_rollout_ref.model.path="$1"
    trainer.v1.stepwell.weights="$2"
    trainer.total_training_steps=100
    trainer.save_freq=10
    trainer.n_gpus_per_node=1
    data.train_batch_size=16                        # groups in a step
    actor_rollout_ref.actor.ppo_mini_batch_size=16  # the same number: one optimizer step on each batch
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.strategy=fsdp2
    data.max_prompt_length=4096                     # longer rows than both together are left out
    data.max_response_length=4096
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    # Ray was started by `stepwell up`, in another environment than verl's:
    ray_kwargs.ray_init.runtime_env.py_executable="$(command -v python)"
)
exec python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://stepwell.trainers.verl]' +config=stepwell "${overrides[@]}" "${@:3}"
