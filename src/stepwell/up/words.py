"""What `up` says once everything is ready: where it is, and what to paste."""

import json

from stepwell.up.launch_plan import Plan, url_of

SNIPPET = """\
import stepwell
from openai import OpenAI
with stepwell.connect("{url}", key="{key}").trajectory(prompt_uid="hello", group_size=1) as t:
    agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
    print(agent.chat.completions.create(model={model}, messages={messages}, max_tokens=64).choices[0].message.content)
"""
MESSAGES = '[{"role": "user", "content": "Hello!"}]'


def welcome(plan: Plan, model: str, key: str) -> str:
    places = {
        "base_url": url_of(plan.gateway),
        "key": key,
        "dashboard": f"{url_of(plan.dashboard)}/#key={key}",
        "Ray": f"{plan.gateway.ray_address}, namespace {plan.gateway.ray_namespace}",
    }
    if plan.gateway.atropos:
        places["Atropos"] = f"{url_of(plan.gateway)}/atropos"
    listed = "\n".join(f"  {name:10} {place}" for name, place in places.items())
    snippet = SNIPPET.format(url=url_of(plan.gateway), key=key, model=json.dumps(model), messages=MESSAGES)
    return f"\n{listed}\n\nPaste this into Python; each call becomes a step:\n\n{snippet}"
