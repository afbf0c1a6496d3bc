// The turns of a step: the new part of the prompt, then the response.

import { el } from "./dom.js";
import { count, reward } from "./format.js";

export function turns(step, whyNoText) {
  if (whyNoText) return el("p", { class: "none" }, `There is no text: ${whyNoText}. See the ids under Tokens.`);
  return el("div", { class: "turns" }, step.turns.map(turn));
}

function turn({ role, text, is_response: isResponse }) {
  const kind = isResponse ? `turn ${role} response` : `turn ${role}`;
  return el("div", { class: kind }, el("span", { class: "role" }, role), el("pre", {}, text || "(empty)"));
}

export function stepHead(step) {
  const length = step.tokens.ids.length;
  const facts = [
    `policy version ${versionsOf(step)}`, step.exactness, step.finish_reason && `finish: ${step.finish_reason}`,
    `${count(step.prompt_length)} + ${count(length)} tokens`,
    step.reward === null ? null : `reward ${reward(step.reward)}${step.reward_source && ` by ${step.reward_source}`}`,
    ...otherColumns(step),
  ];
  const flags = [["quarantine", "quarantined"], ["untrainable", "untrainable"]]
    .filter(([name]) => step[name]).map(([name, word]) => el("span", { class: "flag" }, `${word}: ${step[name]}`));
  return el("h3", {}, `Step ${step.step_index}`, el("small", {}, facts.filter(Boolean).join(" · ")), flags);
}

// Columns that have a place of their own, or none on this page. All others are listed by their name.
const PLACED = new Set([
  "step_index", "uid", "policy_version", "version_spans", "reward", "reward_source", "reward_revision", "exactness",
  "finish_reason", "quarantine", "untrainable", "sampling", "started_at", "prompt_length", "new_from", "turns", "tokens",
  "prompt_tokens",
]);

function otherColumns(step) {
  const others = Object.entries(step).filter(([name, value]) => !PLACED.has(name) && value !== null && value !== "");
  return others.map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "object" ? JSON.stringify(value) : value}`);
}

function versionsOf({ policy_version: version, version_spans: spans }) {
  const found = [...new Set((spans ?? []).map(([v]) => v))];
  return found.length > 1 ? found.join(", ") : String(version);
}

export function sampling(step) {
  const pairs = Object.entries(step.sampling ?? {}).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  return pairs.length ? el("p", { class: "sampling" }, pairs.join(" · ")) : null;
}
