"""Examples of each command, for --help and the reference. A test reads each as the command would."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "up": (
        "stepwell up --engine http://127.0.0.1:8001",
        "stepwell up --engine http://127.0.0.1:8001 --group-size 8 --reward my_rewards.py:score --detach",
    ),
    "down": ("stepwell down",),
    "status": ("stepwell status", "stepwell status --url http://10.0.0.5:8200 --json"),
    "doctor": (
        "stepwell doctor --engine http://127.0.0.1:8001",
        "stepwell doctor --engine http://127.0.0.1:8001 --harness claude-code",
    ),
    "pool": (
        "stepwell pool --journal /var/lib/stepwell --max-staleness 4 --group-deadline 1800",
        "stepwell pool --name data_pool --shards 8 --journal /var/lib/stepwell",
    ),
    "gateway": (
        "stepwell gateway --data-pool-name data_pool --vllm-addresses http://10.0.0.7:8001,http://10.0.0.8:8001 \\\n"
        "    --tokenizer-path Qwen/Qwen3-0.6B --prompt-length 8192 --response-length 2048 --spool spool",
    ),
    "gateway key": ("stepwell gateway key --user ann",),
    "keys create": ("stepwell keys create --role runner --name math-rollouts --channel math --expires 30d",),
    "keys list": ("stepwell keys list",),
    "keys revoke": ("stepwell keys revoke math-rollouts-1f0c9a3e",),
    "audit verify": ("stepwell audit verify audit.jsonl",),
    "atropos": ("stepwell atropos --port 8000 --state atropos.json",),
    "envs run": (
        "stepwell envs run verifiers my-taskset-v1 --python verifiers-env/bin/python --group-size 8",
        "stepwell envs run harbor tasks/ --python harbor-env/bin/python --timeout 1800",
    ),
    "dashboard": ("stepwell dashboard --gateways http://127.0.0.1:8100 --tokenizer-path Qwen/Qwen3-0.6B --port 8200",),
    "link": ("stepwell link --listen 0.0.0.0:8300 --tls-cert cert.pem --tls-key key.pem --secret-file link-secret",),
    "rewards": (
        "stepwell rewards --function my_rewards.py:score --workers 2 --tokenizer-path Qwen/Qwen3-0.6B",
        "stepwell rewards --function math_equal --tokenizer-path Qwen/Qwen3-0.6B",
    ),
    "reward try": ("stepwell reward try my_rewards.py:score --on steps.parquet --limit 10",),
    "rescore": ("stepwell rescore my_rewards.py:score --from archive --to archive-2",),
    "policy list": ("stepwell policy list",),
    "policy set": ("stepwell policy set 0",),
    "policy promote": ('stepwell policy promote --reason "reviewed by hand"',),
    "policy rollback": ('stepwell policy rollback --reason "users complain about the tone"',),
    "export": (
        "stepwell export --to steps.parquet",
        "stepwell export --from archive --to good.jsonl --reward-min 0.5 --since 2026-01-01",
        "stepwell export --from archive --to pairs.parquet --shape preferences --tokenizer-path Qwen/Qwen3-0.6B",
    ),
    "import": ("stepwell import trained.parquet --channel replay",),
    "forget": (
        "stepwell forget --subject user-4711 --receipt receipt.json",
        "stepwell forget --older-than 30d --receipt receipt.json",
    ),
    "lineage": ("stepwell lineage --archive archive --version 42 --verify",),
    "demo": ("stepwell demo", "stepwell demo --task live"),
}
"""By command."""


def examples_text(command: str) -> str:
    lines = (line for example in EXAMPLES[command] for line in example.splitlines())
    return "\n".join(("examples:", *(f"  {line}" for line in lines)))
