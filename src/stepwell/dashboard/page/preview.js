// The next batch: what the trainer of a channel would get now, and what waits.

import { get } from "./api.js";
import { el, field, fill } from "./dom.js";
import { count, moment, plural, reward } from "./format.js";
import { adjust, toGroup } from "./routes.js";
import { table } from "./table.js";

const USUAL = "train";
const MOST_REWARDS = 8;

export function open(shell, params) {
  return new Preview(shell, params);
}

class Preview {
  title = "Next batch";
  every = 5000;
  legend = [];

  constructor(shell, { channel = "" }) {
    this.channel = channel;
    this.select = el("select", { onchange: () => {
      this.channel = this.select.value;
      adjust("preview", { channel: this.channel });
      shell.tick();
    } });
    this.asked = el("p", { class: "facts" });
    this.waits = el("div", { role: "status" });
    this.batch = el("div", {});
    this.waiting = el("div", {});
    this.keys = {};
    const bar = el("div", { class: "controls" }, field("Channel", this.select), this.asked);
    this.node = el("section", { class: "preview", "aria-label": "Next batch" }, bar, this.waits, this.batch, this.waiting);
  }

  update({ channel = "" }) {
    this.channel = channel;
  }

  async refresh(asked) {
    const status = await asked;
    if (!status.pool) return;
    this.offer(status.channels.map(({ name }) => name));
    if (!this.select.value) {
      fill(this.asked, "There are no steps yet.");
      return;
    }
    const channel = this.select.value;
    const next = await get("preview", { channel });
    if (channel === this.select.value && !this.node.contains(focused(this.select))) this.show(next);
  }

  show(next) {
    fill(this.asked, sentence(next));
    const away = next.missing.length ? `no answer from ${next.missing.join(", ")}` : null;
    const waits = next.is_complete ? null : `A fetch would wait for ${next.waits_for}.`;
    fill(this.waits, [waits, away].map((text) => text && el("p", { class: "note" }, text)));
    const caption = next.is_complete ? "In the next batch" : "Ready so far";
    fill(this.batch, table(caption, COLUMNS, next.batch, "Nothing is ready."));
    fill(this.waiting, table("Not in it, the oldest first", [...COLUMNS, WHY], next.waiting, "Nothing else is held."));
  }

  offer(names) {
    const wanted = [...new Set([...names, this.channel].filter(Boolean))].sort();
    const known = [...this.select.options].map((option) => option.value);
    if (wanted.join("\n") !== known.join("\n")) {
      fill(this.select, wanted.map((name) => el("option", { value: name }, name)));
    }
    this.select.value = this.channel || (wanted.includes(USUAL) ? USUAL : wanted[0] ?? "");
  }
}

/** The element in the view that has the focus: a table is not redrawn under the reader. */
function focused(select) {
  return document.activeElement === select ? null : document.activeElement;
}

const COLUMNS = [
  ["Group", (g) => el("a", { href: toGroup(g) }, g.prompt_uid), "uid"],
  ["Prompt", (g) => g.prompt || "–", "wide prompt"],
  ["Rollouts", (g) => `${count(g.rollouts)} of ${count(g.size)}`, "n"],
  ["Rewards", (g) => rewards(g.rewards), "rewards"],
  ["Mean", (g) => reward(mean(g.rewards)), "n"],
  ["Steps", (g) => count(g.steps), "n"],
  ["Oldest version", (g) => (g.behind ? `${g.oldest_version}, ${count(g.behind)} behind` : count(g.oldest_version)), "n"],
  ["Opened", (g) => (g.from_history ? "from history" : moment(g.opened_at)), "n"],
];
const WHY = ["Why not", (g) => g.why, "wide"];

function sentence({ asked_at: at, request }) {
  const { count: wanted, unit, order, history, min_exactness: grade, untrainable, kind } = request;
  const what = kind === "exact" ? `groups with exactly ${plural(wanted, "trajectory")}` : `${count(wanted)} ${unit}`;
  const terms = [
    order === "strict" && "in strict order",
    history && `${Math.round(100 * history)} % from history`,
    `exactness at least ${grade}`,
    untrainable && "untrainable steps too",
  ].filter(Boolean).join(", ");
  if (!at) return `No trainer has asked since the pool started. Shown is what a fetch of ${what} would take.`;
  return `The trainer asked for ${what} last, at ${moment(at)}: ${terms}.`;
}

function rewards(all) {
  const shown = all.slice(0, MOST_REWARDS).map(reward).join("  ");
  return all.length > MOST_REWARDS ? `${shown} …` : shown;
}

function mean(all) {
  const known = all.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
