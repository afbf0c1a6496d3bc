// The tables under the charts.

import { el, fill } from "./dom.js";
import { bytes, count, moment, plural, reward, short, span, tally } from "./format.js";
import { link } from "./routes.js";
import { table } from "./table.js";

/** The last values stay while the pool cannot be reached. A table that has the focus is not redrawn. */
export class Tables {
  constructor() {
    this.channels = el("div");
    this.gateways = el("div");
    this.engines = el("div");
    this.policy = el("div");
    this.losses = el("div");
    const serving = el("div", {}, this.gateways, this.engines);
    this.node = el("div", { class: "tables" }, this.channels, this.policy, serving, this.losses);
  }

  show(status) {
    if (this.node.contains(document.activeElement)) return;
    fill(this.gateways, gatewaysTable(status));
    fill(this.engines, enginesTable(status));
    if (!status.pool) return;
    fill(this.channels, channelsTable(status));
    if (status.policy) fill(this.policy, sidesTable(status), decisionsTable(status));
    fill(this.losses, lossesTable(status));
  }
}

export function poolFacts({ pool, version }) {
  const facts = [
    `${plural(pool.submitted, "step")} submitted`,
    plural(pool.leases, "lease"),
    plural(pool.shards, "shard"),
    pool.journal ? "journal" : "no journal: a restart loses all steps",
    rewards(pool.scoring),
    `stepwell ${version}`,
  ];
  return facts.filter(Boolean).join(" · ");
}

function rewards({ waiting, under_way: going, resting }) {
  if (!waiting && !going && !resting) return null;
  return `rewards: ${count(waiting)} waiting, ${count(going)} running, ${count(resting)} paused`;
}

function channelsTable({ channels }) {
  const columns = [
    ["Channel", (c) => el("a", { href: link("trajectories", { channel: c.name }) }, c.name)],
    ["Groups", (c) => count(c.groups), "n"],
    ["Ready", (c) => count(c.ready_groups), "n"],
    ["Trajectories", (c) => count(c.trajectories), "n"],
    ["Oldest", (c) => (c.groups ? span(c.oldest_age) : "–"), "n"],
    ["Held", (c) => `${short(c.held.tokens)} tok`, "n"],
    ["Memory", (c) => bytes(c.nbytes), "n"],
    ["Trained", (c) => `${short(c.shipped.steps)} steps`, "n"],
    ["Dropped", (c) => share(c.dropped, c.accepted), "n"],
    ["History", (c) => count(c.history_groups), "n"],
  ];
  return table("Channels", columns, channels, "There are no steps yet.");
}

/** Which version serves which sessions, and what it earned lately. */
function sidesTable({ policy, now }) {
  const columns = [
    ["Policy", (s) => s.side],
    ["Version", (s) => count(s.version), "n"],
    ["Sessions", (s) => `${Math.round(1000 * s.share) / 10} %`, "n"],
    ["Since", (s) => (s.since ? span(Math.max(0, now - s.since)) : "–"), "n"],
    ["Rewards", (s) => count(s.rewards), "n"],
    ["Mean", (s) => reward(s.reward_mean), "n"],
    ["Served by", (s) => s.engines.join(", ") || "all others", "wide"],
  ];
  return table("Policy", columns, policy.sides, "");
}

function decisionsTable({ policy }) {
  if (!policy.decisions.length) return null;
  const columns = [
    ["Decided", (d) => moment(d.at)],
    ["Action", (d) => d.action],
    ["Version", (d) => count(d.version), "n"],
    ["By", (d) => d.by],
    ["Reason", (d) => d.reason, "wide"],
  ];
  return table("Decisions", columns, policy.decisions, "");
}

function gatewaysTable({ gateways }) {
  const columns = [
    ["Gateway", (g) => g.url],
    ["State", (g) => g.error ?? (g.ready ? "ready" : `not ready: ${g.missing.join(", ")}`), "wide"],
    ["In flight", (g) => count(g.in_flight), "n"],
    ["Waiting steps", (g) => count(g.waiting_steps), "n"],
    ["Calls", (g) => count(g.calls), "n"],
    ["p50", (g) => span(g.p50), "n"],
    ["p95", (g) => span(g.p95), "n"],
    ["Lost", (g) => tally(g.lost) || "none"],
  ];
  return table("Gateways", columns, gateways, "There is none: start the dashboard with --gateways.");
}

function enginesTable({ engines }) {
  const columns = [
    ["Engine", (e) => e.address],
    ["State", (e) => [el("i", { class: `dot engine-${e.state}` }), e.why ? `${e.state}: ${e.why}` : e.state], "wide"],
    ["Weights", (e) => e.weight_version ?? "–", "n"],
    ["In flight", (e) => count(e.in_flight), "n"],
    ["Server", (e) => e.server ?? ""],
    ["Gateway", (e) => e.gateway],
  ];
  return table("Engines", columns, engines, "No gateway reports one.");
}

/** Submitted steps that will not be trained, by cause. */
function lossesTable({ channels, pool }) {
  const rows = [
    ...channels.flatMap((c) => losses(c.name, "dropped", c.dropped)),
    ...channels.flatMap((c) => losses(c.name, "left out", c.left_out)),
    ...Object.entries(pool.quarantined).map(([cause, steps]) => ({ fate: "quarantined", cause, steps })),
    ...Object.entries(pool.refused).map(([cause, steps]) => ({ fate: "refused", cause, steps })),
  ].filter((row) => row.steps);
  const columns = [
    ["Fate", (r) => r.fate],
    ["Cause", (r) => (r.fate === "dropped" ? el("a", { href: toDropped(r) }, r.cause) : r.cause), "wide"],
    ["Channel", (r) => r.channel ?? ""],
    ["Steps", (r) => count(r.steps), "n"],
    ["Tokens", (r) => (r.tokens === undefined ? "" : short(r.tokens)), "n"],
  ];
  return table("Not trained", columns, rows, "Nothing was lost.");
}

function losses(channel, fate, causes) {
  return Object.entries(causes).map(([cause, { steps, tokens }]) => ({ channel, fate, cause, steps, tokens }));
}

function toDropped({ channel, cause }) {
  return link("trajectories", { channel, state: "dropped", cause });
}

function share(dropped, accepted) {
  const lost = Object.values(dropped).reduce((sum, { tokens }) => sum + tokens, 0);
  return accepted.tokens ? `${((100 * lost) / accepted.tokens).toFixed(1)} % tok` : "–";
}
