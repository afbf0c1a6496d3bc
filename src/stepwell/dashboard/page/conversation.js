// A step's turns, as they were said: what is new in the prompt, then the response.

import { el } from "./dom.js";
import { count, reward } from "./format.js";

export function turns(step, whyNoText) {
  if (whyNoText) return el("p", { class: "none" }, `There is no text to show: ${whyNoText}. The tokens' ids are there.`);
  return el("div", { class: "turns" }, step.turns.map(turn));
}

function turn({ role, text, is_response: isResponse }) {
  const kind = isResponse ? `turn ${role} response` : `turn ${role}`;
  return el("div", { class: kind }, el("span", { class: "role" }, role), el("pre", {}, text || "(nothing)"));
}

export function stepHead(step) {
  const length = step.tokens.ids.length;
  const facts = [
    `policy version ${versionsOf(step)}`, step.exactness, step.finish_reason && `finish: ${step.finish_reason}`,
    `${count(step.prompt_length)} + ${count(length)} tokens`,
    step.reward === null ? null : `reward ${reward(step.reward)}${step.reward_source && ` by ${step.reward_source}`}`,
  ];
  const flags = [["quarantine", "quarantined"], ["untrainable", "untrainable"]]
    .filter(([name]) => step[name]).map(([name, word]) => el("span", { class: "flag" }, `${word}: ${step[name]}`));
  return el("h3", {}, `Step ${step.step_index}`, el("small", {}, facts.filter(Boolean).join(" · ")), flags);
}

function versionsOf({ policy_version: version, version_spans: spans }) {
  const found = [...new Set((spans ?? []).map(([v]) => v))];
  return found.length > 1 ? found.join(", ") : String(version);
}

export function sampling(step) {
  const pairs = Object.entries(step.sampling ?? {}).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  return pairs.length ? el("p", { class: "sampling" }, pairs.join(" · ")) : null;
}
