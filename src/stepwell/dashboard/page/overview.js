// The overview: throughput, losses and their causes.

import { get } from "./api.js";
import { choice, el, field, fill } from "./dom.js";
import { OverviewCharts } from "./overview_charts.js";
import { Tables, poolFacts } from "./overview_tables.js";
import { adjust } from "./routes.js";

const TIMES = [["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "24 h"]];
const USUAL = "train";

export function open(shell, params) {
  return new Overview(params);
}

class Overview {
  title = "Overview";
  every = 2000;
  legend = [["1", "15 minutes"], ["2", "1 hour"], ["3", "6 hours"], ["4", "24 hours"]];

  constructor({ seconds = "900", channel = "" }) {
    Object.assign(this, { seconds, channel });
    this.times = choice("Time shown", TIMES, seconds, (value) => this.choose({ seconds: value }));
    this.select = el("select", { onchange: () => this.choose({ channel: this.select.value }) });
    this.charts = new OverviewCharts();
    this.tables = new Tables();
    this.facts = el("p", { class: "facts" });
    this.notes = el("div", { role: "status" });
    const bar = el("div", { class: "controls" }, this.times.node, field("Channel", this.select), this.facts);
    const grid = el("div", { class: "charts" }, this.charts.all.map((chart) => chart.node));
    this.node = el("section", { class: "overview", "aria-label": "Overview" }, bar, this.notes, grid, this.tables.node);
    this.keys = Object.fromEntries(TIMES.map(([value], i) => [String(i + 1), () => this.pick(value)]));
  }

  pick(value) {
    this.times.show(value);
    this.choose({ seconds: value });
  }

  choose(change) {
    Object.assign(this, change);
    adjust("overview", { seconds: this.seconds, channel: this.channel });
    this.drawSeries();
  }

  async refresh(asked) {
    await Promise.all([this.drawSeries(), asked.then((status) => this.tell(status))]);
  }

  tell(status) {
    if (status.pool) {
      fill(this.facts, poolFacts(status));
      const alarm = status.policy?.alarm ? [`canary: ${status.policy.alarm}`] : [];
      fill(this.notes, [...alarm, ...status.notes].map((text) => el("p", { class: "note" }, text)));
    }
    this.tables.show(status);
  }

  async drawSeries() {
    const seconds = this.seconds;
    const series = await get("series", { seconds });
    if (seconds !== this.seconds) return;
    this.offer(Object.keys(series.channels));
    this.series = series;
    this.charts.draw(series, this.select.value);
  }

  offer(names) {
    const wanted = [...new Set([...names, this.channel].filter(Boolean))].sort();
    const known = [...this.select.options].map((option) => option.value);
    if (wanted.join("\n") !== known.join("\n")) {
      fill(this.select, wanted.map((name) => el("option", { value: name }, name)));
    }
    this.select.value = this.channel || (wanted.includes(USUAL) ? USUAL : wanted[0] ?? "");
  }

  redraw() {
    for (const chart of this.charts.all) chart.build();
  }

  leave() {
    for (const chart of this.charts.all) chart.leave();
  }
}
