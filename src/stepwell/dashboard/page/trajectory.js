// One trajectory: as a conversation, token by token, and the reason if it is not trained.

import { get } from "./api.js";
import { auditTable } from "./audit.js";
import { sampling, stepHead, turns } from "./conversation.js";
import { CURATION_KEYS, curationKeys } from "./curation.js";
import { button, choice, el, fill } from "./dom.js";
import { count, moment, reward, versions } from "./format.js";
import { link, toGroup, toTrajectory } from "./routes.js";
import { marks, state } from "./rows.js";
import { SCALES, legend, readout, tokenText } from "./tokens.js";
import { lastList, neighbour } from "./trajectories.js";

const GONE = "Its tokens have left the pool. If there is an archive, they are there; this page reads only the pool.";
const MODES = [["conversation", "Conversation"], ["tokens", "Tokens"]];

let mode = "conversation";
let scale = "logprob";

export function open(shell, params) {
  return new Trajectory(shell, params);
}

class Trajectory {
  title = "Trajectory";
  every = 5000;
  legend = [
    ["t", "conversation or tokens"], ["1", "colour by log-probability"], ["2", "by loss mask"],
    ["3", "by policy version"], ["j k", "next, previous step"], ["n p", "next, previous trajectory of the list"],
    ["s", "its group, side by side"], ...CURATION_KEYS,
  ];

  constructor(shell, params) {
    this.params = params;
    this.head = el("div", { class: "head" });
    this.steps = el("div", { class: "steps" });
    this.side = el("aside", { "aria-label": "Details" });
    this.key = el("p", { class: "scale" });
    this.readout = readout();
    this.modes = choice("Shown as", MODES, mode, (value) => this.show({ mode: value }));
    this.scales = choice("Colour by", SCALES, scale, (value) => this.show({ mode: "tokens", scale: value }));
    const after = () => this.reload().catch((error) => shell.notice.failed(error));
    this.keys = { ...this.moves(), ...curationKeys(() => (this.found ? [this.found.summary] : []), shell, after) };
    const act = CURATION_KEYS.map(([key, label]) => button(label, key, () => this.keys[key]()));
    const curating = el("div", { class: "curating", role: "group", "aria-label": "Curate it" }, act);
    this.pointing = el("div", { class: "pointing" }, this.key, this.readout.node);
    const bar = el("div", { class: "controls sticky" }, this.modes.node, this.scales.node, curating, this.pointing);
    const columns = el("div", { class: "columns" }, this.steps, this.side);
    this.node = el("section", { class: "trajectory", "aria-label": "Trajectory" }, this.head, bar, columns);
  }

  moves() {
    const colour = (value) => () => this.show({ mode: "tokens", scale: value });
    return {
      t: () => this.show({ mode: mode === "tokens" ? "conversation" : "tokens" }),
      1: colour("logprob"), 2: colour("mask"), 3: colour("version"), j: () => this.scroll(1), k: () => this.scroll(-1),
      n: () => this.toNeighbour(1), p: () => this.toNeighbour(-1), "/": () => { location.hash = lastList(); },
      s: () => { if (this.found) location.hash = toGroup(this.found.summary); },
    };
  }

  update(params) {
    this.params = params;
    this.drawn = "";
    scrollTo(0, 0);
  }

  async refresh() {
    await this.reload();
  }

  async reload() {
    const params = this.params;
    const found = await get("trajectory", params);
    if (params !== this.params) return;
    const told = JSON.stringify(found);
    if (told === this.drawn) return;
    this.drawn = told;
    this.found = found;
    this.draw();
  }

  show(change) {
    mode = change.mode;
    scale = change.scale ?? scale;
    this.modes.show(mode);
    this.scales.show(mode === "tokens" ? scale : "");
    if (this.found) this.drawSteps();
  }

  draw() {
    const { summary, why } = this.found;
    const uid = el("span", { class: "uid" }, summary.trajectory_uid);
    const title = el("h1", {}, uid, state(summary), el("span", {}, marks(summary.marks)));
    const reason = why ? el("p", { class: "why" }, why) : null;
    fill(this.head, el("p", { class: "crumbs" }, el("a", { href: lastList() }, "Trajectories"), " / ",
      el("a", { href: toGroup(summary) }, summary.prompt_uid)), title, reason);
    this.drawSide();
    this.show({ mode });
  }

  drawSteps() {
    const { steps, held, why_no_text: whyNoText } = this.found;
    const isTokens = mode === "tokens";
    fill(this.key, isTokens ? legend(scale, steps) : null);
    this.pointing.hidden = !isTokens;
    this.readout.tell("");
    const shown = steps.map((step) => el("article", { class: "step", tabindex: "-1" }, stepHead(step), sampling(step),
      isTokens ? tokenText(step, scale, this.readout.tell) : turns(step, whyNoText)));
    const none = el("p", { class: "none" }, held ? "It has no step yet." : GONE);
    fill(this.steps, shown.length ? shown : none);
  }

  drawSide() {
    const { summary: s, metadata, audit } = this.found;
    const facts = [
      ["Channel", s.channel], ["Source", s.source || "–"], ["Group", `${s.group} on ${s.shard}, of ${s.group_size}`],
      ["Reward", `${reward(s.reward)}${s.reward_source && ` by ${s.reward_source}`}`],
      ["Steps", `${s.steps} (${s.quarantined} quarantined, ${s.untrainable} untrainable)`],
      ["Tokens", `${count(s.tokens)}, of which ${count(s.response_tokens)} sampled`],
      ["Policy version", versions(s.oldest_version, s.newest_version)], ["Exactness", s.exactness || "–"],
      ["Opened", moment(s.started_at)], ["Changed", moment(s.changed_at)],
    ];
    const list = el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    const trail = el("a", { href: link("audit", { trajectory_uid: s.trajectory_uid }) }, "Audit trail");
    fill(this.side, list, el("h2", {}, "Metadata"), el("pre", { class: "json" }, JSON.stringify(metadata, null, 1)),
      el("h2", {}, trail), auditTable(audit, true));
  }

  /** Scrolls to the step after (or before) the one at the top of the page. */
  scroll(by) {
    const steps = [...this.steps.children];
    const top = this.node.querySelector(".sticky").getBoundingClientRect().bottom + 4;
    const at = steps.findLastIndex((step) => step.getBoundingClientRect().top <= top + 4);
    const step = steps[Math.max(0, Math.min(steps.length - 1, at + by))];
    if (step) scrollBy(0, step.getBoundingClientRect().top - top);
    step?.focus({ preventScroll: true });
  }

  toNeighbour(by) {
    const next = neighbour(this.params, by);
    if (next) location.hash = toTrajectory(next);
  }
}
