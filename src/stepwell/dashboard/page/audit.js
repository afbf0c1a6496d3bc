// The audit trail: who decided what, and when.

import { get } from "./api.js";
import { el, field, fill } from "./dom.js";
import { count, moment } from "./format.js";
import { adjust, toTrajectory } from "./routes.js";
import { table } from "./table.js";

const MOST = 1000;

export function open(shell, params) {
  return new Audit(shell, params);
}

class Audit {
  title = "Audit trail";
  every = 5000;
  legend = [];

  constructor(shell, { trajectory_uid = "" }) {
    const ask = () => this.refresh().catch((error) => shell.notice.failed(error));
    this.uid = el("input", { type: "search", value: trajectory_uid, spellcheck: "false", onchange: () => {
      adjust("audit", { trajectory_uid: this.uid.value });
      ask();
    } });
    this.found = el("p", { class: "found" });
    this.list = el("div", {});
    this.keys = { "/": () => this.uid.focus() };
    const bar = el("div", { class: "controls" }, this.found, field("Trajectory", this.uid));
    this.node = el("section", { class: "audit", "aria-label": "Audit trail" }, bar, this.list);
  }

  update({ trajectory_uid = "" }) {
    this.uid.value = trajectory_uid;
  }

  async refresh() {
    const { entries } = await get("audit", { limit: MOST, trajectory_uid: this.uid.value });
    const told = JSON.stringify(entries);
    if (told === this.drawn) return;
    this.drawn = told;
    fill(this.found, el("b", {}, count(entries.length)), entries.length === MOST ? " latest decisions" : " decisions");
    fill(this.list, auditTable(entries, false));
  }
}

/** `isOne`: all entries are about one trajectory, so it is not named. */
export function auditTable(entries, isOne) {
  const columns = [
    ["When", (e) => moment(e.at), "when"],
    ["Who", (e) => e.by],
    ["Did", (e) => (e.outcome === "done" ? e.action : `${e.action} (${e.outcome})`)],
    ["Trajectory", (e) => el("a", { href: toTrajectory(e) }, e.trajectory_uid), "uid"],
    ["Before → after", (e) => `${e.before || "–"} → ${e.after || "–"}`],
    ["Why", (e) => e.why, "wide"],
  ];
  const shown = isOne ? columns.filter(([name]) => name !== "Trajectory") : columns;
  return table("", shown, [...entries].sort((a, b) => b.at - a.at), "There is no decision yet.");
}
