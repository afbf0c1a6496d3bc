"""The families of chat templates that the matrix tries, each with one public template and a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from benchmarks.bridge_rig.public_templates import PublicTemplate, fetched, public_templates


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    """Its package and file."""
    tokenizer: str = "qwen"
    thinks: bool = False
    """The model thinks before each reply."""
    policy: ThinkingPolicy = ThinkingPolicy.TEMPLATE
    on_vllm: bool = False
    """Also tried on real vLLM."""


QWEN_3, DEEPSEEK_V32 = "llama_cpp/Qwen-Qwen3-0.6B", "llama_cpp/deepseek-ai-DeepSeek-V3.2"
FAMILIES = (
    Family("ChatML", "trl/qwen2_5", on_vllm=True),
    Family("Qwen 3", QWEN_3, on_vllm=True),
    Family("Qwen 3, thinking", QWEN_3, thinks=True, on_vllm=True),
    Family("Qwen 3, thinking kept", QWEN_3, thinks=True, policy=ThinkingPolicy.ALL, on_vllm=True),
    Family("Qwen 3.5, thinking", "llama_cpp/Qwen3.5-4B", thinks=True),
    Family("Qwen 3 Coder", "llama_cpp/Qwen3-Coder"),
    Family("Llama 3.1", "llama_cpp/meta-llama-Llama-3.1-8B-Instruct", on_vllm=True),
    Family("Llama 3.2 (vLLM)", "vllm/tool_chat_template_llama3.2_json"),
    Family("Llama 4 (vLLM)", "vllm/tool_chat_template_llama4_pythonic"),
    Family("Hermes 3", "llama_cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    Family("Mistral Nemo", "llama_cpp/mistralai-Mistral-Nemo-Instruct-2407", "tekken"),
    Family("Mistral Small 3.2", "llama_cpp/Mistral-Small-3.2-24B-Instruct-2506", "tekken"),
    Family("Mistral (vLLM)", "vllm/tool_chat_template_mistral3", "tekken", on_vllm=True),
    Family("DeepSeek V3.1", "llama_cpp/deepseek-ai-DeepSeek-V3.1", "deepseek", on_vllm=True),
    Family("DeepSeek V3.2, thinking", DEEPSEEK_V32, "deepseek", thinks=True),
    Family("DeepSeek V3.2, thinking kept", DEEPSEEK_V32, "deepseek", thinks=True, policy=ThinkingPolicy.ALL),
    Family("DeepSeek R1 (vLLM), thinking", "vllm/tool_chat_template_deepseekr1", "deepseek", thinks=True),
    Family("GLM 4", "vllm/tool_chat_template_glm4"),
    Family("GLM 4.6, thinking", "llama_cpp/GLM-4.6", thinks=True),
    Family("GLM 4.6, thinking kept", "llama_cpp/GLM-4.6", thinks=True, policy=ThinkingPolicy.ALL),
    Family("GLM 4.7", "llama_cpp/GLM-4.7-Flash", on_vllm=True),
    Family("gpt-oss", "llama_cpp/openai-gpt-oss-120b", on_vllm=True),
    Family("gpt-oss, thinking", "llama_cpp/openai-gpt-oss-120b", thinks=True),
    Family("Gemma 4", "llama_cpp/google-gemma-4-31B-it"),
    Family("Kimi K2", "llama_cpp/Kimi-K2-Instruct"),
    Family("MiniMax M2, thinking", "llama_cpp/MiniMax-M2", thinks=True),
)


def all_templates() -> list[Family]:
    """Every public template as a family of its own, whose models do not think."""
    return [Family(template.name, template.name) for template in public_templates()]


def template_of(family: Family) -> PublicTemplate:
    return PublicTemplate(family.template, (fetched() / "templates" / f"{family.template}.jinja").read_text())


def named(word: str, families: Sequence[Family]) -> list[Family]:
    return [family for family in families if word in family.name.lower()]
