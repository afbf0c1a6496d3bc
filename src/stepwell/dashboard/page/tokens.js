// A step token by token. Colours are CSS classes, so that they follow the theme. Each scale has a legend.

import { el, fill } from "./dom.js";

/** Probabilities at which the colour changes, the highest first. */
const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01];
const HUES = 6;
/** Shown for a token that has only some bytes of a character; the character is shown with the last of them. */
const PART = "·";

export const SCALES = [["logprob", "log-probability"], ["mask", "loss mask"], ["version", "policy version"]];

export function legend(scale, steps) {
  if (scale === "mask") return [swatch("m1", "trained"), swatch("m0", "not trained")];
  if (scale === "version") {
    const found = [...new Set(steps.flatMap((step) => step.tokens.versions))].sort((a, b) => a - b);
    return found.map((version) => swatch(`v${hue(version)}`, String(version)));
  }
  const names = STEPS.map((p, i) => swatch(`p${i}`, i ? `${p}–${STEPS[i - 1]}` : `p ≥ ${p}`));
  return [...names, swatch(`p${STEPS.length}`, `p < ${STEPS.at(-1)}`), swatch("none", "unknown")];
}

function swatch(kind, text) {
  return el("span", {}, el("i", { class: `tok ${kind}` }, "\u00a0\u00a0"), text);
}

/** The new part of a step's prompt, then its response. Each token is an element that can be selected. */
export function tokenText(step, scale, telling) {
  const { prompt_tokens: prompt, tokens } = step;
  const cut = prompt.cut ? el("span", { class: "cut" }, `… ${prompt.cut} tokens not shown …`) : null;
  const before = textsOf(prompt).map((text, i) => token(text, "prompt", { part: "prompt", i }));
  const after = textsOf(tokens).map((text, i) => token(text, kindOf(tokens, i, scale), { part: "response", i }));
  const props = { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move" };
  const node = el("div", props, cut, before, after);
  new Pointing(node, (span) => telling(span ? about(step, span.dataset) : ""));
  return node;
}

/** Without a tokenizer there are only ids. */
function textsOf({ ids, texts }) {
  return texts.length ? texts : ids.map((id) => `${id} `);
}

function token(text, kind, data) {
  return el("span", { class: `tok ${kind}`, data }, text.replaceAll("\n", "⏎\n") || PART);
}

function kindOf(tokens, i, scale) {
  if (scale === "mask") return tokens.trained[i] ? "m1" : "m0";
  if (scale === "version") return `v${hue(tokens.versions[i])}`;
  const logprob = tokens.logprobs[i];
  if (logprob === null || logprob === undefined) return "none";
  const at = STEPS.findIndex((p) => Math.exp(logprob) >= p);
  return `p${at < 0 ? STEPS.length : at}`;
}

function hue(version) {
  return ((version % HUES) + HUES) % HUES;
}

function about({ tokens, prompt_tokens: prompt }, { part, i }) {
  if (part === "prompt") return `${JSON.stringify(prompt.texts[i] ?? "")} · id ${prompt.ids[i]} · of the prompt`;
  const trained = tokens.trained[i] ? "trained" : "not trained";
  const of = `policy version ${tokens.versions[i]} · ${trained}`;
  return `${JSON.stringify(tokens.texts[i] ?? "")} · id ${tokens.ids[i]} · ${likelihood(tokens.logprobs[i])} · ${of}`;
}

function likelihood(logprob) {
  if (logprob === null || logprob === undefined) return "log-probability unknown";
  return `log-probability ${logprob.toFixed(4)} (p ${Math.exp(logprob).toPrecision(3)})`;
}

/** The selected token: by the mouse, or by the arrow keys if the text has the focus. */
class Pointing {
  constructor(node, tell) {
    Object.assign(this, { node, tell });
    node.addEventListener("mouseover", (event) => this.point(event.target.closest(".tok")));
    node.addEventListener("mouseleave", () => this.point(null));
    node.addEventListener("focus", () => this.point(this.at ?? node.querySelector(".tok")));
    node.addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    const way = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = way && this.at?.[way];
    if (!next?.classList.contains("tok")) return;
    event.preventDefault();
    this.point(next);
    next.scrollIntoView({ block: "nearest" });
  }

  point(span) {
    this.at?.classList.remove("at");
    this.at = span;
    span?.classList.add("at");
    this.tell(span);
  }
}

/** The line about the selected token. */
export function readout() {
  const node = el("p", { class: "readout", role: "status" });
  const tell = (text) => fill(node, text || "Point at a token, or focus the text and use ← →.");
  tell("");
  return { node, tell };
}
