// The rollouts of a group side by side: last response, reward and advantage.

import { get } from "./api.js";
import { CURATION_KEYS, curationKeys } from "./curation.js";
import { button, el, fill } from "./dom.js";
import { plural, reward, signed, versions } from "./format.js";
import { Picking } from "./picking.js";
import { toTrajectory } from "./routes.js";
import { marks, state } from "./rows.js";
import { lastList } from "./trajectories.js";

export function open(shell, params) {
  return new Group(shell, params);
}

class Group {
  title = "Group";
  every = 5000;
  legend = [
    ["j k", "next, previous rollout"], ["Enter", "open"], ["x", "select"], ["X", "select all, or none"],
    ...CURATION_KEYS,
  ];

  constructor(shell, params) {
    this.params = params;
    this.picking = new Picking();
    this.head = el("div", { class: "head" });
    this.rollouts = el("div", { class: "rollouts" });
    const after = () => { this.picking.clear(); this.refresh().catch((error) => shell.notice.failed(error)); };
    this.keys = {
      j: () => this.move(1), k: () => this.move(-1), ArrowRight: () => this.move(1), ArrowLeft: () => this.move(-1),
      Enter: () => this.enter(), x: () => this.pick(this.picking.current()), X: () => this.pickAll(),
      "/": () => { location.hash = lastList(); }, ...curationKeys(() => this.picking.targets(), shell, after),
    };
    const act = CURATION_KEYS.map(([key, label]) => button(label, key, () => this.keys[key]()));
    const bar = el("div", { class: "controls" }, el("div", { class: "curating", role: "group" }, act));
    this.node = el("section", { class: "group", "aria-label": "Group" }, this.head, bar, this.rollouts);
  }

  update(params) {
    this.params = params;
  }

  async refresh() {
    const params = this.params;
    const found = await get("group", params);
    if (params !== this.params) return;
    this.found = found;
    this.picking.show(found.rows.map((row) => row.summary));
    const told = JSON.stringify(found);
    if (told !== this.drawn) this.draw();
    this.drawn = told;
  }

  draw() {
    const { prompt_uid, group, shard, size, mean, std, rows } = this.found;
    const spread = `reward mean ${reward(mean)}, standard deviation ${reward(std)}`;
    const about = `group ${group} on ${shard} · ${rows.length} of ${size} rollouts · ${spread}`;
    fill(this.head, el("p", { class: "crumbs" }, el("a", { href: lastList() }, "Trajectories")),
      el("h1", {}, el("span", { class: "uid" }, prompt_uid)), el("p", { class: "facts" }, about));
    const hadFocus = this.rollouts.contains(document.activeElement);
    fill(this.rollouts, rows.map((row, i) => this.rollout(row, i)));
    if (hadFocus) this.rollouts.children[this.picking.at]?.focus();
  }

  rollout({ summary, advantage, last }, i) {
    const isCurrent = i === this.picking.at;
    const props = { class: isCurrent ? "rollout current" : "rollout", tabindex: isCurrent ? "0" : "-1" };
    const box = el("input", { type: "checkbox", "aria-label": `Select ${summary.trajectory_uid}` });
    box.checked = this.picking.has(summary);
    box.addEventListener("change", () => this.pick(summary));
    return el("article", props,
      el("h3", {}, box, el("a", { href: toTrajectory(summary) }, summary.trajectory_uid)),
      score(summary.reward, advantage), el("p", { class: "facts" }, state(summary), ` · ${facts(summary)}`),
      el("p", {}, marks(summary.marks)), el("pre", {}, last || "(no text)"));
  }

  move(by) {
    if (!this.picking.move(by)) return;
    this.draw();
    const current = this.rollouts.children[this.picking.at];
    current.focus({ preventScroll: true });
    current.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  pick(summary) {
    if (!summary) return;
    this.picking.toggle(summary);
    this.draw();
  }

  pickAll() {
    this.picking.toggleAll();
    this.draw();
  }

  enter() {
    const current = this.picking.current();
    if (current) location.hash = toTrajectory(current);
  }
}

function score(earned, advantage) {
  const sign = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
  return el("p", { class: "score" }, el("span", {}, "reward ", el("b", {}, reward(earned))),
    el("span", { class: sign }, "advantage ", el("b", {}, signed(advantage))));
}

function facts({ steps, response_tokens: sampled, oldest_version: oldest, newest_version: newest }) {
  return `${plural(steps, "step")} · ${plural(sampled, "token")} sampled · version ${versions(oldest, newest)}`;
}
