// The charts of the overview: converts /api/series to columns for charts.js. Pure.

import { Chart } from "./charts.js";
import { reward, span } from "./format.js";

const PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6"];
const EMPTY = {
  steps: [], tokens: [], trained_steps: [], trained_tokens: [], reward_mean: [], reward_low: [], reward_high: [],
  staleness: [], groups: [], ready_groups: [], oldest_age: [], dropped_tokens: {},
};

export class OverviewCharts {
  constructor() {
    this.steps = new Chart("Steps", { unit: "per second" });
    this.tokens = new Chart("Tokens", { unit: "per second" });
    this.reward = new Chart("Reward", { unit: "of trained rollouts, mean and 10–90 %", format: reward });
    this.staleness = new Chart("Staleness", { unit: "rollouts by versions behind", isTime: false, axis: "behind" });
    this.queue = new Chart("Queue", { unit: "groups" });
    this.age = new Chart("Oldest group", { unit: "age in seconds", format: span });
    this.latency = new Chart("Gateway latency", { unit: "seconds per call", format: span });
    this.waste = new Chart("Waste", { unit: "tokens per second, by cause" });
    this.all = [this.steps, this.tokens, this.reward, this.staleness, this.queue, this.age, this.latency, this.waste];
  }

  draw(series, channel) {
    const window = series.channels[channel] ?? EMPTY;
    const over = (lists) => [series.ends, ...lists].map((list) => whole(list, series.ends.length));
    const rate = (list) => list.map((n) => n / series.interval);
    const lines = [{ label: "accepted", colour: "c1", kind: "line" }, { label: "trained", colour: "c2", kind: "line" }];
    this.steps.draw(lines, over([rate(window.steps), rate(window.trained_steps)]));
    this.tokens.draw(lines, over([rate(window.tokens), rate(window.trained_tokens)]));
    this.drawReward(over([window.reward_high, window.reward_low, window.reward_mean]));
    this.staleness.draw([{ label: "rollouts", colour: "c1", kind: "bars" }], histogram(window.staleness));
    const queued = [{ label: "groups", colour: "c1", kind: "line" }, { label: "ready", colour: "c2", kind: "line" }];
    this.queue.draw(queued, over([window.groups, window.ready_groups]));
    this.age.draw([{ label: "oldest", colour: "c1", kind: "line" }], over([window.oldest_age]));
    this.drawLatency(series.gateways);
    this.drawWaste(window.dropped_tokens, over, rate);
  }

  drawReward(data) {
    const edges = [{ label: "90 %", colour: "c1", kind: "edge" }, { label: "10 %", colour: "c1", kind: "edge" }];
    this.reward.draw([...edges, { label: "mean", colour: "c1", kind: "line" }], data, { bands: [[1, 2]] });
  }

  drawLatency(gateways) {
    const names = Object.keys(gateways);
    const tables = names.map((name) => [gateways[name].ends, gateways[name].p95, gateways[name].p50]);
    const host = (name) => (names.length > 1 ? `${name.replace(/^https?:\/\//, "")} ` : "");
    const lines = names.flatMap((name, i) => [
      { label: `${host(name)}p95`, colour: PALETTE[i % PALETTE.length], kind: "line" },
      { label: `${host(name)}p50`, colour: PALETTE[i % PALETTE.length], kind: "dash" },
    ]);
    this.latency.draw(lines, tables.length ? uPlot.join(tables) : [[]]);
  }

  drawWaste(dropped, over, rate) {
    const causes = Object.keys(dropped).filter((cause) => dropped[cause].some(Boolean)).sort();
    const shown = over(causes.map((cause) => rate(dropped[cause])));
    const lines = causes.map((label, i) => ({ label, colour: PALETTE[i % PALETTE.length], kind: "area" }));
    this.waste.draw(lines.reverse(), [shown[0], ...stacked(shown.slice(1)).reverse()], {
      shown: [shown[0], ...shown.slice(1).reverse()],
    });
  }
}

/** Without the last interval: it is not over, so its numbers would be too low. */
function whole(list, length) {
  return list.slice(0, Math.max(0, length - 1));
}

function histogram(staleness) {
  const sums = new Map();
  for (const part of staleness)
    for (const [behind, n] of Object.entries(part)) sums.set(Number(behind), (sums.get(Number(behind)) ?? 0) + n);
  const behind = [...sums.keys()].sort((a, b) => a - b);
  return [behind, behind.map((key) => sums.get(key))];
}

/** Cumulative lists. The largest is drawn first, the others above it. */
function stacked(lists) {
  const sums = [];
  for (const list of lists) sums.push(list.map((n, i) => n + (sums.at(-1)?.[i] ?? 0)));
  return sums;
}
